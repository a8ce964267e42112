"""Wrappers of torch.distributed in a group of one: plain names and tensors, or a reason."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from entropy_monitor.capture import CaptureSession
from tests.capture.helpers import capture
from tests.handmade import WIDTH, Fused
from tests.versions import needs_torch_2_10

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # torch.distributed warns about gloo and itself
]

NAMES = ["layers.0", "layers.1"]


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module] = Fused) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Sharded(nn.Module):
    """Projections apart, as tensor parallelism splits them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 4)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def x() -> Tensor:
    return torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    if not dist.is_available():
        pytest.skip("this torch is built without torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("attach", ["inside", "outside"])
def test_ddp(attach: str) -> None:
    raw = Stack()
    model = nn.parallel.DistributedDataParallel(raw)
    session = CaptureSession(raw if attach == "inside" else model, on_error="raise")
    for _ in range(2):
        measured, report, loss = capture(raw, lambda: model(x()), session=session)
        loss.backward()
        assert list(measured.stats) == NAMES
        assert report.complete


def test_fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Stack()
    want, *_ = capture(model, lambda: model(x()))
    for layer in model.layers:
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    session = CaptureSession(model, on_error="raise")
    for _ in range(2):
        measured, report, loss = capture(model, lambda: model(x()), session=session)
        loss.backward()
        assert list(measured.stats) == NAMES
        assert report.complete
    for name, stats in measured.stats.items():
        assert torch.equal(stats.total_entropy, want.stats[name].total_entropy)


@pytest.mark.parametrize("local", [True, pytest.param(False, marks=needs_torch_2_10)])
def test_tensor_parallel(local: bool) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = Stack(Sharded)
    column = lambda: ColwiseParallel(use_local_output=local)  # noqa: E731
    for layer in model.layers:
        parallelize_module(
            layer,
            dist.init_device_mesh("cpu", (1,)),
            {"q": column(), "k": column(), "v": column(), "o": RowwiseParallel()},
        )
    measured, report, _ = capture(model, lambda: model(x()))
    if local:
        assert list(measured.stats) == NAMES
        assert report.complete
    else:  # distributed tensors are not taken apart, and it says so
        assert not measured.stats
        assert "DTensor" in report.describe()
