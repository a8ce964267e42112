"""What only a GPU can show: kernels, CUDA graphs, synchronisation, cost. Under eight minutes.

    python tests/gpu/check.py            # on a GPU; without one it says so and ends well
    python tests/gpu/check.py --cpu      # the same code with tiny sizes, to try the script itself
    python tests/gpu/check.py kernels    # one check

Prints a line per check and ends with 1 if one failed.
"""

import argparse
import contextlib
import copy
import json
import platform
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from entropy_monitor import AttentionMonitor
from entropy_monitor.capture import CaptureSession
from entropy_monitor.statistics import measure_call
from entropy_monitor.testing import assert_matches_reference, reference_row_statistics

GPU = torch.cuda.is_available()


class Skipped(Exception):  # noqa: N818 - no error
    """This check cannot be made here."""


class Attention(nn.Module):
    """Causal attention with fewer keys than query heads where asked for."""

    def __init__(self, width: int, heads: int, kv_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, width // heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * self.kv_heads * self.size)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
        k, v = (
            t.unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
            for t in self.kv(x).chunk(2, -1)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=self.kv_heads != self.heads
        )
        return self.o(y.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.attn = Attention(width, heads, **options)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.norms[0](x), mask)
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(
        self, width: int, heads: int, layers: int, vocabulary: int = 512, **options: Any
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, **options) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Setting:
    """Where the checks run, and how large."""

    def __init__(self, *, cpu: bool) -> None:
        self.device = torch.device("cpu" if cpu else "cuda")
        self.cpu = cpu
        self.dtype = torch.bfloat16

    def model(self, width: int = 128, heads: int = 4, layers: int = 2, **options: Any) -> Model:
        torch.manual_seed(0)
        if self.cpu:
            width, heads, layers = 64, 4, 2
        return Model(width, heads, layers, **options).to(self.device)

    def ids(self, batch: int = 4, length: int = 256) -> Tensor:
        if self.cpu:
            batch, length = min(batch, 2), min(length, 48)
        torch.manual_seed(1)
        return torch.randint(512, (batch, length)).to(self.device)

    def wait(self) -> None:
        if not self.cpu:
            torch.cuda.synchronize()


def gradients(run: Callable[[], Tensor], model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = run()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same_training(run: Callable[[], Tensor], model: nn.Module, monitor: AttentionMonitor) -> str:
    """Loss and gradients with a monitor and without; some kernels vary by themselves."""
    plain, again = gradients(run, model), gradients(run, model)
    with monitor.observe(0):
        watched = gradients(run, model)
    assert torch.equal(plain[0], watched[0]), "the loss changed"
    noise = max((a - b).abs().max().item() for a, b in zip(plain[1], again[1], strict=True))
    change = max((a - b).abs().max().item() for a, b in zip(plain[1], watched[1], strict=True))
    if noise == 0:
        assert change == 0, f"gradients changed by {change}"
        return "bitwise equal"
    assert change <= 4 * noise, f"gradients changed by {change}, and vary by {noise} on their own"
    return f"gradients vary by {noise:.1e} on their own"


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def check_kernels(here: Setting) -> Iterator[str]:
    """Every fused kernel and the plain one: the same training, and statistics as in float64."""
    for name, backend in BACKENDS.items():
        for kv_heads, padded in ((None, False), (2, False), (None, True)):
            if padded and name == "flash":
                continue  # it takes no mask
            model, ids = here.model(kv_heads=kv_heads), here.ids()
            mask = None
            if padded:
                mask = torch.ones(
                    *ids.shape, ids.shape[1], dtype=torch.bool, device=ids.device
                ).tril()
                mask[0, :, :5] = False
                mask[0, :5, 0] = True  # no empty row: kernels differ in what they give there
                mask = mask[:, None]
            where = f"{name}{', grouped heads' * bool(kv_heads)}{', padded' * padded}"

            def run(
                model: Model = model, ids: Tensor = ids, mask: Any = mask, backend: Any = backend
            ) -> Tensor:
                with sdpa_kernel(backend), torch.autocast(here.device.type, here.dtype):
                    return model(ids, mask)

            try:
                run()
            except RuntimeError as error:
                yield f"{where}: skipped, {str(error).splitlines()[0]}"
                continue
            monitor = AttentionMonitor(model, rows=None, on_error="raise")
            same = same_training(run, model, monitor)
            assert monitor.snapshot().layers == ("layers.0.attn", "layers.1.attn"), monitor.report
            worst = against_float64(model, run)
            ways = ",".join(sorted(set(monitor.report.way.values())))
            yield f"{where}: seen as {ways}, {same}, statistics within {worst:.1e}"


def against_float64(model: nn.Module, run: Callable[[], Any]) -> float:
    """The largest difference of a mass or an entropy from the reference on the same q and k."""
    worst = 0.0

    def compare(call: Any) -> None:
        nonlocal worst
        measured = measure_call(call)
        given = {
            name: getattr(call, name)
            for name in ("query", "key", "logits", "mask", "sink_logits")
            if getattr(call, name) is not None
        }
        exact = reference_row_statistics(
            **{
                name: value.detach().double().cpu() if value.is_floating_point() else value.cpu()
                for name, value in given.items()
            },
            scale=call.scale,
            is_causal=call.is_causal,
            virtual_columns=call.virtual_columns,
        )
        for name in ("sink_mass", "content_entropy", "total_entropy"):
            mine = getattr(measured, name).double().cpu()
            theirs = torch.from_numpy(getattr(exact, name))
            worst = max(worst, (mine - theirs).abs().max().item())
        assert_matches_reference(to_cpu(measured), exact)

    session = CaptureSession(model, on_error="raise")
    with session.window(compare), torch.no_grad():
        run()
    assert worst < 1e-4, worst
    return worst


def to_cpu(measured: Any) -> Any:
    moved = copy.copy(measured)
    for name, value in vars(measured).items():
        if isinstance(value, Tensor):
            object.__setattr__(moved, name, value.cpu())
    return moved


def check_flex(here: Setting) -> Iterator[str]:
    """Flex attention, called directly and through transformers, forward and backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    flex = flex_attention if here.cpu else torch.compile(flex_attention)
    length = 128

    class Flex(Attention):
        def forward(self, x: Tensor, mask: Any = None) -> Tensor:
            q = self.q(x).unflatten(-1, (self.heads, self.size)).transpose(1, 2)
            k, v = (
                t.unflatten(-1, (self.kv_heads, self.size)).transpose(1, 2)
                for t in self.kv(x).chunk(2, -1)
            )
            return self.o(flex(q, k, v, block_mask=mask).transpose(1, 2).flatten(-2))

    model = here.model()
    for layer in model.layers:
        layer.attn.__class__ = Flex
    ids = torch.randint(512, (2, length), generator=torch.Generator().manual_seed(0)).to(
        here.device
    )
    blocks = create_block_mask(
        lambda b, h, q, k: q >= k, None, None, length, length, device=here.device.type
    )
    backward = not here.cpu  # no backward pass on a CPU

    def run() -> Tensor:
        with contextlib.nullcontext() if backward else torch.no_grad():
            return model(ids, blocks)

    monitor = AttentionMonitor(model, rows=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if backward:
            same = same_training(run, model, monitor)
        else:
            plain = run()
            with monitor.observe(0):
                same = "bitwise equal" if torch.equal(plain, run()) else "changed"
            assert same == "bitwise equal"
    report = monitor.report
    assert report is not None
    assert report.seen or report.unseen or report.opaque or report.lost, "neither seen nor reported"
    yield f"direct: {same}; {report.describe()[:160]}"
    yield from flex_in_transformers(here, backward)


def flex_in_transformers(here: Setting, backward: bool) -> Iterator[str]:
    try:
        import transformers
    except ModuleNotFoundError:
        yield "transformers: skipped, not installed"
        return
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, attn_implementation="flex_attention",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(here.device)
    ids = torch.randint(128, (2, 128), generator=torch.Generator().manual_seed(0)).to(here.device)

    def run() -> Tensor:
        with contextlib.nullcontext() if backward else torch.no_grad():
            return model(input_ids=ids, labels=ids).loss

    monitor = AttentionMonitor(model, rows=None, on_error="raise")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if backward:
            same = same_training(run, model, monitor)
        else:
            plain = run()
            with monitor.observe(0):
                assert torch.equal(plain, run())
            same = "bitwise equal"
    assert len(monitor.snapshot().layers) == 2, monitor.report
    yield f"transformers: {same}, {len(monitor.snapshot().layers)} layers"


def check_graphs(here: Setting) -> Iterator[str]:
    """Recording a CUDA graph inside a window must neither break nor change the graph."""
    if here.cpu:
        raise Skipped("CUDA graphs need a GPU (a CPU stand-in is in tests/test_monitor.py)")
    model, ids = here.model().eval(), here.ids()
    monitor = AttentionMonitor(model, rows=None)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                expected = model(ids)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with monitor.observe(0), torch.cuda.graph(graph):
                out = model(ids)
        graph.replay()
        here.wait()
        assert torch.equal(out, expected)
        assert any("recorded into a CUDA graph" in str(w.message) for w in caught), caught
        yield "recorded inside a window: replays right, and says what was not seen"
        with monitor.observe(1):
            graph.replay()
        with monitor.observe(2):
            model(ids)
        assert monitor.snapshot().layers == ("layers.0.attn", "layers.1.attn")
        yield "an eager forward after it is measured"
    model = here.model()
    compiled = torch.compile(model, mode="reduce-overhead")
    losses = []
    monitor = AttentionMonitor(model, rows=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            with monitor.observe(step) if step in (0, 4) else contextlib.nullcontext():
                loss = compiled(ids)
            loss.backward()
            losses.append(loss.item())
    assert monitor.enabled
    assert max(losses) - min(losses) < 1e-4, losses
    yield f"torch.compile with graphs: losses agree; {monitor.report.describe()[:120]}"


def check_bf16(here: Setting) -> Iterator[str]:
    """Weights in bfloat16: entropies stay finite and within the rounding of the queries."""
    model, ids = here.model(), here.ids()
    exact = AttentionMonitor(model, rows=None, on_error="raise")
    with exact.observe(0), torch.no_grad():
        model(ids)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    monitor = AttentionMonitor(rounded, rows=None, on_error="raise")
    with monitor.observe(0), torch.no_grad():
        rounded(ids)
    for stat in ("sink_mass", "content_entropy", "total_entropy"):
        a, b = exact.snapshot().array(stat), monitor.snapshot().array(stat)
        assert abs(a - b).max() < 0.02, (stat, abs(a - b).max())
    difference = abs(
        exact.snapshot().array("content_entropy") - monitor.snapshot().array("content_entropy")
    )
    yield f"content entropy differs by {difference.max():.1e} nats from float32"


SIZES = {"0.1B": (768, 12, 12), "0.4B": (1024, 16, 24), "1B": (2048, 16, 20)}


def check_cost(here: Setting) -> Iterator[str]:
    """A training step plain, between measurements, and measured: sampled (64 rows) and exact."""
    batch, length, rounds = (2, 48, 3) if here.cpu else (4, 1024, 12)
    sizes = {"tiny": (64, 4, 2)} if here.cpu else SIZES
    for name, (width, heads, layers) in sizes.items():
        model = here.model(width, heads, layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        ids = here.ids(batch, length)
        monitors = {
            "plain": None,
            "between": AttentionMonitor(model),
            "64 rows": AttentionMonitor(model, rows=64, on_error="raise"),
            "every row": AttentionMonitor(model, rows=None, on_error="raise"),
        }

        def step(
            kind: str,
            number: int,
            model: Model = model,
            ids: Tensor = ids,
            monitors: Any = monitors,
            optimizer: Any = optimizer,
        ) -> float:
            monitor = monitors[kind]
            here.wait()
            start = time.perf_counter()
            watched = kind not in ("plain", "between")
            window = monitor.observe(number) if watched else contextlib.nullcontext()
            with window, torch.autocast(here.device.type, here.dtype):
                loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watched:
                monitor.snapshot()
            here.wait()
            return time.perf_counter() - start

        times: dict[str, list[float]] = {kind: [] for kind in monitors}
        for number in range(rounds):  # in turn, so that all see the same machine
            for kind in monitors:
                times[kind].append(step(kind, number))
        least = {kind: statistics.median(found[2:] or found) for kind, found in times.items()}
        shown = ", ".join(
            f"{kind} {1e3 * value:.1f} ms ({value / least['plain'] - 1:+.1%})"
            for kind, value in least.items()
        )
        size = sum(p.numel() for p in model.parameters()) / 1e9
        yield f"{name} ({size:.3f}B, {layers} layers, {batch} x {length}): {shown}"
        yield f"{name} peak memory: {memory(here, model, ids)}"
        del model, optimizer, monitors


def memory(here: Setting, model: Model, ids: Tensor) -> str:
    if here.cpu:
        return "skipped without a GPU"
    found = []
    for monitor in (None, AttentionMonitor(model, rows=64), AttentionMonitor(model, rows=None)):
        torch.cuda.reset_peak_memory_stats()
        window = monitor.observe(0) if monitor else contextlib.nullcontext()
        with window, torch.autocast(here.device.type, here.dtype):
            loss = model(ids)
        loss.backward()
        model.zero_grad()
        found.append(torch.cuda.max_memory_allocated() / 2**20)
    plain, sampled, exact = found
    return f"plain {plain:.0f} MiB, 64 rows {sampled - plain:+.0f}, every row {exact - plain:+.0f}"


def check_waiting(here: Setting) -> Iterator[str]:
    """No wait for the device between measurements, and one transfer where a snapshot is taken."""
    if here.cpu:
        raise Skipped("waiting for a device needs one")
    model, ids = here.model(), here.ids()
    monitor = AttentionMonitor(model, rows=64, on_error="raise")
    with monitor.observe(0):
        model(ids)
    monitor.snapshot()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            model(ids).backward()  # the monitor exists and does not measure
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield "none while the monitor rests"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        with monitor.observe(1):
            model(ids)
        inside = len(caught)
        monitor.snapshot()
        torch.cuda.set_sync_debug_mode("default")
    yield f"{inside} in a measured forward of 2 layers, {len(caught) - inside} in its snapshot"
    assert len(caught) - inside <= 2, [str(w.message) for w in caught[inside:]]
    yield from unmonitored_lightning_steps(here)


def unmonitored_lightning_steps(here: Setting) -> Iterator[str]:
    """The callback's own hooks at steps that are not measured, with waiting forbidden."""
    try:
        import pytorch_lightning as pl
    except ModuleNotFoundError:
        yield "Lightning: skipped, not installed"
        return
    from entropy_monitor import EntropyMonitor

    class Strict(EntropyMonitor):
        checked = 0

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            self._strictly(super().on_train_batch_start, trainer, *args)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self._strictly(super().on_train_batch_end, trainer, *args)

        def _strictly(self, hook: Callable[..., None], trainer: Any, *args: Any) -> None:
            rests = not self.schedule(trainer.global_step) and self._pending is None
            torch.cuda.set_sync_debug_mode("error" if rests else "default")
            try:
                hook(trainer, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            self.checked += rests

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = here.model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    data = torch.utils.data.TensorDataset(here.ids(32).cpu())
    callback = Strict(every_n_steps=4, on_error="raise", record=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(
            max_epochs=1, logger=False, accelerator="gpu", devices=1, callbacks=[callback],
            enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
            default_root_dir=tempfile.gettempdir(),
        ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))  # fmt: skip
    assert callback.checked >= 8, callback.checked
    yield f"none in {callback.checked} hooks of the Lightning callback that did not measure"


CHECKS = {
    "kernels": check_kernels,
    "flex": check_flex,
    "graphs": check_graphs,
    "bf16": check_bf16,
    "waiting": check_waiting,
    "cost": check_cost,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", nargs="*", choices=[*CHECKS, []], help="all by default")
    parser.add_argument("--cpu", action="store_true", help="try the script without a GPU")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if not GPU and not arguments.cpu:
        print("skipped: no GPU is visible to torch (torch.cuda.is_available() is False)")
        return 0
    here = Setting(cpu=arguments.cpu)
    name = platform.processor() or platform.machine() if here.cpu else torch.cuda.get_device_name()
    print(f"torch {torch.__version__} on {name}")
    results: dict[str, Any] = {}
    for check in arguments.checks or CHECKS:
        start, lines, state = time.perf_counter(), [], "ok"
        try:
            for line in CHECKS[check](here):
                lines.append(line)
                print(f"  {check}: {line}", flush=True)
        except Skipped as reason:
            state = f"skipped: {reason}"
        except Exception:
            traceback.print_exc()
            state = "FAILED"
        print(f"{check}: {state} ({time.perf_counter() - start:.1f} s)", flush=True)
        results[check] = {"state": state, "lines": lines}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return int(any(result["state"] == "FAILED" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
