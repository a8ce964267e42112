"""What a monitored step costs: a 14M-parameter GPT, against what one would do without this package.

Run by hand: `python tests/benchmarks/bench_training.py` (one thread, about five minutes, quiet
machine; `make bench` runs it with the others). All ways run in turn in one process and are timed
by the CPU time of the process; a round gives one ratio to the plain step of the same round, and
the table shows the median of the rounds with the smallest and the largest. `nothing` is the plain
step once more: its spread is the noise.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from entropy_monitor import AttentionMonitor

LAYERS, WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 6, 384, 6, 512, 4, 8192


class Attention(nn.Module):
    """Causal self-attention; `way` says what is done besides."""

    way = "sdpa"

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        hidden = torch.full((LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)
        self.register_buffer("bias", hidden, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        if self.way == "eager":
            p = self.weights(q, k)
            mixed = p.to(v.dtype) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if self.way == "materialised":
            with torch.no_grad():
                p = self.weights(q.float(), k.float())
                self.entropy = -(p * torch.log(p + 1e-12)).sum(-1).mean((0, 2))
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        logits = q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5 + self.bias
        return torch.softmax(logits, -1, dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Token and position embeddings, six blocks, tied output."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.norm(self.blocks(x)) @ self.token.weight.T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bf16", action="store_true", help="under bf16 autocast")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    sampled, exact = AttentionMonitor(model), AttentionMonitor(model, rows=None)

    def step(way: str = "sdpa", observe: Callable = nullcontext) -> None:
        Attention.way = way
        with observe(), torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(tokens[:, :-1])
        F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    def monitored(monitor: AttentionMonitor) -> Callable[[], None]:
        def run() -> None:
            step(observe=monitor.observe)
            monitor.snapshot().mean("sink_mass")

        return run

    ways: dict[str, Callable[[], None]] = {
        "plain step": step,
        "nothing": step,
        "sampled, 16 + 64 rows": monitored(sampled),
        "exact, every row": monitored(exact),
        "materialised -p log p": lambda: step("materialised"),
        "eager attention": lambda: step("eager"),
    }
    for run in ways.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.rounds):
        # Another order each round, so that no way always follows the same neighbour.
        names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in names:
            start = time.process_time()
            ways[name]()
            seconds[name].append(time.process_time() - start)

    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    precision = "bf16 autocast" if args.bf16 else "float32"
    print(
        f"GPT {LAYERS} x {WIDTH}, {HEADS} heads, {parameters:.1f}M parameters, T = {LENGTH}, "
        f"batch {BATCH}, {precision}, {args.rounds} rounds, one thread"
    )
    print(f"{processor()}, torch {torch.__version__}, Python {platform.python_version()}\n")
    print(f"| {'step':<22} | {'CPU s':>6} | {'extra, median':>13} | {'smallest, largest':>18} |")
    print(f"|{'-' * 24}|{'-' * 8}|{'-' * 15}|{'-' * 20}|")
    plain = seconds["plain step"]
    for name, times in seconds.items():
        extra = [100 * (t / p - 1) for t, p in zip(times, plain, strict=True)]
        spread = f"{min(extra):+.1f} %, {max(extra):+.1f} %"
        print(
            f"| {name:<22} | {statistics.median(times):6.2f} "
            f"| {statistics.median(extra):+11.1f} % | {spread:>18} |"
        )


def processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
