"""Cost and memory of the row statistics, against what one would do without this package.

Run by hand: `python tests/benchmarks/bench_statistics.py` (one thread). Every ratio is to the
forward of `F.scaled_dot_product_attention` on the same tensors. All ways run in turn in one
process, timed by the CPU time of the thread; the least of several rounds counts. Peak extra memory
is measured in a process of its own for each way.
"""

import argparse
import ctypes
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from entropy_monitor.calls import AttentionCall, select_rows
from entropy_monitor.statistics import measure_call

HEADS, WIDTH = 8, 64
SHAPES = {"T=256 B=4": (4, 256), "T=1024 B=2": (2, 1024), "T=4096 B=1": (1, 4096)}


def inputs(batch: int, t: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, HEADS, t, WIDTH).to(dtype) for _ in range(3))
    return q, k, v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All weights at once, and -sum p log p."""
    t = q.shape[-2]
    hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
    logits = (q.float() @ k.float().transpose(-1, -2)) / math.sqrt(WIDTH)
    p = torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
    return -(p * torch.log(p + 1e-12)).sum(-1)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention that returns its weights, as `attn_implementation="eager"` computes it."""
    t = q.shape[-2]
    bias = torch.full((t, t), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    p = torch.softmax(q @ k.transpose(-1, -2) * WIDTH**-0.5 + bias, -1, dtype=torch.float32)
    return p.to(v.dtype) @ v


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return measure_call(AttentionCall(query=q, key=k, is_causal=True)).total_entropy


def sampled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows, weights = select_rows(q.shape[2], 64, batch=q.shape[0])
    call = AttentionCall(query=q, key=k, is_causal=True)
    return measure_call(call, rows=rows, weights=weights).total_entropy


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa forward": sdpa,
    "materialised softmax, -p log p": materialised,
    "eager attention with weights": eager,
    "tiles, every row, exact": exact,
    "sampled rows, R = 64": sampled,
}


@torch.no_grad()
def seconds(
    q: Tensor, k: Tensor, v: Tensor, rounds: int, ways: tuple[str, ...] = tuple(WAYS)
) -> dict[str, float]:
    """Least CPU seconds of each way, run in turn."""
    best = dict.fromkeys(ways, math.inf)
    for _ in range(rounds + 1):  # the first round warms up
        for name in ways:
            if math.inf > best[name] > 2.0:
                continue  # once is enough for what takes seconds
            begin = time.thread_time()
            WAYS[name](q, k, v)
            best[name] = min(best[name], time.thread_time() - begin)
    return best


def peak_mib(name: str, batch: int, t: int, dtype: str) -> float:
    """Peak extra memory of one way, in a fresh process (Linux), after a small call."""
    command = [sys.executable, __file__, "--peak", name, str(batch), str(t), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


@torch.no_grad()
def print_peak(name: str, batch: int, t: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    WAYS[name](*inputs(1, 128, dtype))
    q, k, v = inputs(batch, t, dtype)
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else memory freed by the inputs would be used again
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    WAYS[name](q, k, v)
    print((_status("VmHWM") - before) / 1024)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        cpu = names[0] if names else cpu
    return f"{cpu}, {os.cpu_count()} cores, one thread used; torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-ours", action="store_true", help="leave out the two slow ways")
    parser.add_argument(
        "--peak", nargs=4, metavar=("WAY", "BATCH", "T", "DTYPE"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.peak:
        name, batch, t, dtype = options.peak
        print_peak(name, int(batch), int(t), getattr(torch, dtype))
        return
    torch.set_num_threads(1)
    print(machine())
    ways = tuple(WAYS)
    if options.only_ours:
        ways = ("sdpa forward", "tiles, every row, exact", "sampled rows, R = 64")
    columns = {
        **{n: (*s, "float32") for n, s in SHAPES.items()},
        "T=4096 bf16": (1, 4096, "bfloat16"),
    }
    table: dict[str, list[float]] = {name: [] for name in ways}
    for batch, t, dtype in columns.values():
        best = seconds(*inputs(batch, t, getattr(torch, dtype)), options.rounds, ways)
        for name in ways:
            table[name].append(best[name])
    print(f"\n{'ratio to sdpa forward':34s}" + "".join(f"{c:>14s}" for c in columns))
    for name, row in table.items():
        if name == "sdpa forward":
            print(f"{name + ' (ms)':34s}" + "".join(f"{x * 1e3:14.1f}" for x in row))
        else:
            ratios = (x / base for x, base in zip(row, table["sdpa forward"], strict=True))
            print(f"{name:34s}" + "".join(f"{x:14.3f}" for x in ratios))
    if Path("/proc/self/clear_refs").exists():
        print("\npeak extra memory at T=4096, B=1 (MiB), float32 and bfloat16")
        for name in ways:
            peaks = [peak_mib(name, 1, 4096, dtype) for dtype in ("float32", "bfloat16")]
            print(f"{name:34s}" + "".join(f"{x:14.1f}" for x in peaks))


if __name__ == "__main__":
    main()
