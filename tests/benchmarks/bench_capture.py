"""What watching costs: opening a window, each operation inside one, and a monitored training step.

Statistics are left out (see `bench_statistics.py`): the receiver does nothing, so that what remains
is the price of seeing. Plain and watched steps alternate in one process; times are medians of
thread CPU time on one thread.

    python -m tests.benchmarks.bench_capture [--compiled]
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from entropy_monitor.calls import AttentionCall
from entropy_monitor.capture import CaptureSession


class Block(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.mT / (c // self.heads) ** 0.5).masked_fill(hidden, -torch.inf)
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.first(x))
        return x + self.feed(self.second(x))


class Model(nn.Module):
    def __init__(self, depth: int, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, heads, fused) for _ in range(depth))
        self.head = nn.Linear(width, 512)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    depth: int
    width: int
    heads: int
    batch: int
    tokens: int
    steps: int


CASES = (
    Case(name="toy", depth=2, width=64, heads=2, batch=2, tokens=64, steps=40),
    Case(name="small", depth=6, width=384, heads=6, batch=2, tokens=256, steps=10),
    Case(name="medium", depth=6, width=384, heads=6, batch=4, tokens=512, steps=5),
)


def nothing(call: AttentionCall) -> None:
    """Receive and forget."""


def median_us(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return 1e6 * statistics.median(times)


def interleaved(
    plain: Callable[[], Any], watched: Callable[[], Any], n: int
) -> tuple[float, float]:
    """Median thread CPU milliseconds of both, taken in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(n):
        for run, kept in zip((plain, watched), times, strict=True):
            start = time.thread_time()
            run()
            kept.append(1e3 * (time.thread_time() - start))
    return statistics.median(times[0]), statistics.median(times[1])


def operations(run: Callable[[], Any]) -> int:
    """How many operations reach the dispatcher in one run."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.n += 1
            return func(*args, **(kwargs or {}))

    with Count() as count:
        run()
    return count.n


def measure(case: Case, *, fused: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    raw = Model(case.depth, case.width, case.heads, fused=fused)
    model = torch.compile(raw) if compiled else raw
    ids = torch.randint(0, 512, (case.batch, case.tokens))
    optimizer = torch.optim.AdamW(raw.parameters(), fused=True)
    session = CaptureSession(raw)

    def finish(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def plain() -> None:
        finish(model(ids))

    def watched() -> None:
        with session.window(nothing):
            loss = model(ids)
        finish(loss)

    plain()
    first = median_us(watched, 1)
    watched()
    alone, seen = interleaved(plain, watched, case.steps)
    count = operations(lambda: raw(ids))
    way = ("sdpa" if fused else "written") + (", compiled" if compiled else "")
    extra = seen - alone
    print(
        f"{case.name:8s} {way:18s} {alone:9.2f} {extra:+9.3f} {100 * extra / alone:+7.2f} % "
        f"{count:7d} {1e3 * extra / count:8.1f} {first / 1e3:9.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiled", action="store_true", help="measure compiled models as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread\n")
    model = Model(6, 64, 2, fused=True)
    session = CaptureSession(model)

    def empty() -> None:
        with session.window(nothing):
            pass

    with session.window(nothing):
        model(torch.zeros(1, 8, dtype=torch.long))
    print(f"open and close a window (6 layers): {median_us(empty, 200):.0f} us\n")
    print("model    attention           step ms   seen ms    share  forward   us per  discovery")
    print("                                                              ops       op    step ms")
    for case in CASES:
        for fused in (True, False):
            measure(case, fused=fused, compiled=False)
            if options.compiled:
                measure(case, fused=fused, compiled=True)


if __name__ == "__main__":
    main()
