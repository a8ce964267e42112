"""Fused kernels: what is read from their arguments explains their own result."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from entropy_monitor.calls import AttentionCall
from entropy_monitor.capture import CaptureSession
from entropy_monitor.capture.fused import KERNELS, named_arguments, read_kernel
from entropy_monitor.capture.seen import Lost, Seen

B, H, T, S, D = 2, 4, 7, 10, 8


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Outputs(TorchDispatchMode):
    """Below the tap: keeps values and results of fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "scaled_dot_product" in str(func):
            self.kept.append((args[2], out[0]))
        return out


def weights(call: AttentionCall) -> Tensor:
    """softmax of the logits of a call, from its fields alone; rows that see nothing are zero."""
    assert call.query is not None
    assert call.key is not None
    _, h, t, s = call.shape
    key = call.key.repeat_interleave(h // call.key.shape[1], 1)
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    logits = call.query.double() @ key.double().mT * scale
    if call.mask is not None:
        mask = call.mask
        logits = (
            logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        )
    if call.is_causal:
        hidden = ~torch.ones(t, s, dtype=torch.bool).tril(s - t)
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0)


class Kernel(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * self.scale, k, v, **self.options)


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> list[AttentionCall]:
    """Run inside a window; every call must explain the result of its kernel."""
    calls: list[AttentionCall] = []
    products: list[Tensor] = []

    def receive(call: AttentionCall) -> None:
        calls.append(call)
        products.append(weights(call))

    with Outputs() as outputs, CaptureSession(model, on_error="raise").window(receive) as report:
        model(*args, **kwargs)
    assert report.complete
    for p, (value, out) in zip(products, outputs.kept, strict=True):
        value = value.repeat_interleave(p.shape[1] // value.shape[1], 1)
        torch.testing.assert_close(p @ value.double(), out.double(), atol=1.2e-6, rtol=0)
    return calls


HOLES = torch.ones(B, 1, T, S, dtype=torch.bool)
HOLES[0, :, :, :3] = False
HOLES[1, :, 2] = False
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": HOLES},
    "additive": {"attn_mask": rand(1, H, T, S, seed=3)},
    "finfo_min": {"attn_mask": (~HOLES).double() * torch.finfo(torch.float64).min},
    "two_axes": {"attn_mask": torch.ones(T, S, dtype=torch.bool).tril(2)},
}


@pytest.mark.parametrize("lengths", [(T, T), (T, S), (S, T)])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_times_values_equal_the_kernels_output(
    option: str, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    t, s = lengths
    given = dict(OPTIONS[option])
    if "attn_mask" in given:
        if lengths != (T, S):
            pytest.skip("masks are made for one pair of lengths")
        mask = given["attn_mask"]
        if mask.dtype != torch.bool:
            given["attn_mask"] = mask.to(dtype).clamp_min(torch.finfo(dtype).min)
    q, k, v = (rand(B, H, n, D, seed=n + i).to(dtype) for i, n in enumerate((t, s, s)))
    explain(Kernel(**given), q, k, v)


def test_grouped_queries_stay_grouped() -> None:
    q, k = rand(B, H, T, D), rand(B, 2, T, D, seed=1)
    (call,) = explain(Kernel(is_causal=True, enable_gqa=True), q, k, k)
    assert call.key is not None
    assert call.key.shape[1] == 2


def test_dropout_is_not_in_the_weights() -> None:
    q, k, v = (rand(B, H, T, D, seed=i) for i in range(3))
    seen = {}
    for p in (0.0, 0.5):
        calls: list[AttentionCall] = []
        model = Kernel(dropout_p=p)
        with CaptureSession(model, on_error="raise").window(calls.append):
            model(q, k, v)
        (call,) = calls
        seen[p] = weights(call) if call.logits is None else call.logits.softmax(-1)
    torch.testing.assert_close(seen[0.0], seen[0.5], atol=1e-12, rtol=0)


# Kernels of other devices, by their schemas
# --------------------------------------------------------


def read(name: str, *args: Any, **kwargs: Any) -> Seen | Lost:
    space, op = name.split("::")
    overload = getattr(getattr(torch.ops, space), op).default
    return read_kernel(KERNELS[name], named_arguments(overload, args, kwargs))


@pytest.mark.parametrize("name", [n for n in KERNELS if n.startswith("aten")])
def test_every_kernel_of_torch_has_the_arguments_that_are_read(name: str) -> None:
    op = getattr(torch.ops.aten, name.split("::")[1], None)
    if op is None:
        pytest.skip("not in this torch")
    names = {argument.name for argument in op.default._schema.arguments}
    kernel = KERNELS[name]
    assert {"query", "key"} <= names
    assert kernel.mask is None or kernel.mask in names
    assert "is_causal" in names or "custom_mask_type" in names
    assert "scale" in names


def test_causal_corner_of_each_kernel() -> None:
    q, k, v = rand(B, H, T, D), rand(B, H, S, D), rand(B, H, S, D)
    top_left = torch.ones(T, S, dtype=torch.bool).tril()
    found = read("aten::_scaled_dot_product_efficient_attention", q, k, v, None, True, 0.0, True)
    assert isinstance(found, Seen)
    assert torch.equal(found.mask, top_left)
    assert not found.is_causal
    bias = rand(B, H, T, S)
    found = read("aten::_scaled_dot_product_cudnn_attention", q, k, v, bias, True, 0.0, True)
    assert torch.equal(found.mask, bias.masked_fill(~top_left, -torch.inf))
    found = read("aten::_scaled_dot_product_flash_attention", q, k, v, 0.0, True, scale=0.3)
    assert found.mask is None
    assert found.is_causal  # aligned to the last key, as AttentionCall has it
    assert found.scale == 0.3
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    for kind, causal in ((0, False), (2, True)):
        found = read(
            "aten::_efficient_attention_forward", *swapped, None, None, None, None, None, 0.0, kind
        )
        assert torch.equal(found.query, q)
        assert (found.is_causal, found.mask) == (causal, None)
    found = read(
        "aten::_efficient_attention_forward", *swapped, None, None, None, None, None, 0.0, 1
    )
    assert torch.equal(found.mask, top_left)


def test_packed_sequences_become_a_padded_batch() -> None:
    q, k = rand(9, H, D), rand(9, H, D, seed=1)
    starts = torch.tensor([0, 2, 9], dtype=torch.int32)
    found = read(
        "aten::_flash_attention_forward", q, k, k, starts, starts, 7, 7, 0.0, True, False,
        window_size_left=3, window_size_right=0,
    )  # fmt: skip
    assert isinstance(found, Seen)
    assert found.query.shape == (2, H, 7, D)
    assert torch.equal(found.query[0, :, :2], q[:2].transpose(0, 1))
    assert torch.equal(found.key[1], k[2:].transpose(0, 1))
    assert found.mask[0, 0, :2, :2].all()
    assert not found.mask[0, 0, 2:].any()
    assert not found.mask[0, 0, :, 2:].any()
    assert found.mask[1].all()
    assert (found.is_causal, found.window) == (True, 4)


def test_what_is_not_read_is_lost() -> None:
    q = rand(B, T, H, D)
    given: list[Any] = [q, q, q, None, None, T, T, 0.0, True, False]
    name = "aten::_flash_attention_forward"
    assert isinstance(read(name, *given, alibi_slopes=rand(H)), Lost)
    given[8] = False
    assert isinstance(read(name, *given, window_size_left=3, window_size_right=1), Lost)
    both = read(name, *given, window_size_left=3, window_size_right=3)
    assert isinstance(both, Seen)
    assert (both.window, both.is_causal) == (4, False)
    # What lies beyond the last query of a causal mask is all there is to the right.
    right = read(name, *given, window_size_left=-1, window_size_right=0)
    assert (right.window, right.is_causal) == (None, True)


def test_flash_attn_as_an_operation_of_another_package() -> None:
    library = torch.library.Library("flash_attn", "FRAGMENT")
    try:
        library.define(
            "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p,"
            " float softmax_scale, bool causal, int window_size_left, int window_size_right,"
            " float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor)"
        )
        library.impl("_flash_attn_forward", lambda q, *rest: (q + 0, q.sum((1, 3))), "CPU")

        class Flash(Kernel):
            def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                op = torch.ops.flash_attn._flash_attn_forward
                return op(q, k, v, 0.0, 0.25, True, 4, -1, 30.0, None, False)[0]

        q = rand(B, T, H, D)
        calls: list[AttentionCall] = []
        with CaptureSession(Flash(), on_error="raise").window(calls.append):
            pass
        model = Flash()
        with CaptureSession(model, on_error="raise").window(calls.append) as report:
            model(q, q, q)
        (call,) = calls
        assert report.way == {"Flash": "sdpa"}
        assert call.shape == (B, H, T, T)
        assert (call.scale, call.softcap, call.window, call.is_causal) == (0.25, 30.0, 5, True)
    finally:
        library._destroy()


def test_an_operation_named_attention_that_nobody_knows_is_opaque() -> None:
    library = torch.library.Library("somebody", "FRAGMENT")
    try:
        library.define("fast_attention(Tensor q) -> Tensor")
        library.impl("fast_attention", lambda q: q + 0, "CPU")

        class Unknown(Kernel):
            def forward(self, q: Tensor) -> Tensor:
                return torch.ops.somebody.fast_attention(q)

        model = Unknown()
        with CaptureSession(model, on_error="raise").window(lambda call: None) as report:
            model(rand(B, T, D))
        assert "fast_attention" in report.opaque["Unknown"]
        assert "fast_attention" in report.describe()
    finally:
        library._destroy()
