"""Runs a function on several processes, each a rank of a gloo group, with a hard time limit."""

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

# A server that has torch loaded is forked for every rank: importing it anew takes seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "pytorch_lightning", "entropy_monitor.lightning"])


def run_ranks(
    function: Callable[..., Any], world: int, *args: Any, limit: float = 120
) -> list[Any]:
    """What ``function(rank, *args)`` returns on every rank.

    Raises:
        AssertionError: With the traceback if a rank raised; if one took longer than `limit`
            seconds.
    """
    with TemporaryDirectory() as folder:
        ranks = [
            CONTEXT.Process(target=_run, args=(rank, world, folder, function, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + limit
        try:
            for process in ranks:
                process.join(max(0.0, end - time.monotonic()))
            late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
        answers = [_answer(Path(folder) / str(rank)) for rank in range(world)]
    errors = [f"rank {n}: {text}" for n, (text, _) in enumerate(answers) if text]
    assert not errors, "\n".join(errors) + f"\nranks {late} did not end in {limit} s"
    assert not late, f"ranks {late} did not end in {limit} s"
    return [value for _, value in answers]


def _run(
    rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
        answer = (None, function(rank, *args))
        dist.destroy_process_group()
    except BaseException:
        answer = (traceback.format_exc(), None)
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(answer))


def _answer(path: Path) -> tuple[str | None, Any]:
    return pickle.loads(path.read_bytes()) if path.exists() else ("no answer", None)


class Attention(nn.Module):
    """Four heads; projections apart, so that `parallelize_module` can share them out."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # Counts heads from what the projections give, as tensor-parallel code must.
        q, k, v = (
            p(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o(y.transpose(1, 2).flatten(-2))


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.place = nn.Embedding(64, 16)  # so that no two keys are equal
        self.blocks = nn.ModuleList(Attention() for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


def make_model(dtype: torch.dtype = torch.float64) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def make_ids(batch: int = 4, length: int = 12, seed: int = 0) -> Tensor:
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(seed))
