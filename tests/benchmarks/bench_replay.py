"""What measuring costs a replay on top of the forward pass, and how much memory Pythia-1.4b needs.

Run by hand: `python tests/benchmarks/bench_replay.py` (one thread, random weights). Forward passes
with and without measuring alternate in one process, timed by the CPU time of the process; the least
of several rounds counts. The memory part runs layers of Pythia-1.4b's width at T = 2048 in a
process of its own: activations and statistics do not grow with the number of layers, per-row values
do.
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import time

import numpy as np
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from entropy_monitor.replay.models import LoadedModel, forward_of
from entropy_monitor.replay.worker import measure

SIZES = {  # hidden, heads, layers, sequences, T
    "70m shape, T=512": (512, 8, 6, 4, 512),
    "70m shape, T=2048": (512, 8, 6, 1, 2048),
    "410m shape (4 layers), T=1024": (1024, 16, 4, 1, 1024),
}


def model(hidden: int, heads: int, layers: int) -> LoadedModel:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=2048,
        dtype=torch.float32,
    )
    made = GPTNeoXForCausalLM(config).eval().requires_grad_(False)
    return LoadedModel(
        model=made,
        forward=forward_of(made, "cpu"),
        weights_sha256="",
        parameters=made.num_parameters(),
    )


def least(call, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
    return best


def cost(rounds: int) -> None:
    print(
        f"{'model':<32}{'forward':>10}{'64 rows':>10}{'all rows':>10}   on top of the forward pass"
    )
    for name, (hidden, heads, layers, sequences, length) in SIZES.items():
        loaded = model(hidden, heads, layers)
        tokens = np.random.default_rng(0).integers(0, 50304, (sequences, length))
        ids = torch.from_numpy(tokens)

        def plain(loaded=loaded, ids=ids):
            with torch.no_grad():
                loaded.forward(ids)

        def measured(rows, loaded=loaded, tokens=tokens, sequences=sequences):
            measure(loaded, tokens, step=0, batch=sequences, rows=rows, sink="first")

        times = {"plain": float("inf"), 64: float("inf"), None: float("inf")}
        for _ in range(rounds):  # in turn, so that a busy machine disturbs all alike
            times["plain"] = min(times["plain"], least(plain, 1))
            for rows in (64, None):
                times[rows] = min(times[rows], least(lambda rows=rows: measured(rows), 1))
        base = times["plain"]
        shares = "".join(f"{times[rows] / base - 1:>10.1%}" for rows in (64, None))
        print(f"{name:<32}{base:>9.2f}s{shares}")


def memory() -> None:
    """Peak memory above the weights, of two and four layers of Pythia-1.4b's width at T = 2048."""
    for layers in (2, 4):
        code = (
            "import sys; sys.path.insert(0, '.'); from tests.benchmarks.bench_replay import peak; "
            f"peak({layers})"
        )
        subprocess.run([sys.executable, "-c", code], check=True)


def peak(layers: int) -> None:
    loaded = model(2048, 16, layers)
    tokens = np.random.default_rng(0).integers(0, 50304, (2, 2048))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measure(loaded, tokens, step=0, batch=1, rows=64, sink="first")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = 4 * loaded.parameters / 1e9
    print(
        f"1.4b width, {layers} layers, T=2048, 2 sequences one at a time: weights {size:.2f} GB, "
        f"peak {after * 1024 / 1e9:.2f} GB, {(after - before) * 1024 / 1e9:.2f} GB above loading"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {os.cpu_count()} cores, torch {torch.__version__}, 1 thread")
    cost(arguments.rounds)
    memory()


if __name__ == "__main__":
    main()
