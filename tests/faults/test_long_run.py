"""200 steps with faults everywhere at random, compiled and not, on one process and two."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from entropy_monitor.alerts.actions import CheckpointNow, StopTraining
from entropy_monitor.writers import MemoryWriter, read_run
from tests.distributed.lightning_runs import as_rank, fit, free_port
from tests.distributed.ranks import run_ranks
from tests.faults.faults import STAGES, Faults
from tests.runs import Language, Net, bits, traces, watch

STEPS = 200


@dataclass(frozen=True)
class Between:
    """A schedule: every `n`-th step from `first` on."""

    first: int
    n: int

    def __call__(self, step: int) -> bool:
        return step >= self.first and step % self.n == 0


def compiled() -> Any:
    net = Net()
    net.compile(backend="aot_eager")
    return Language(net)


def monitors(folder: Path) -> list[Any]:
    """Several, for each of them is switched off by its first fault; later ones begin later."""
    made = []
    for k in range(10):
        options: dict[str, Any] = {"probe": torch.arange(9)[None]} if k % 5 == 4 else {}
        # These act on all ranks, but only on alerts that this run does not raise.
        actions = [StopTraining(after=10**6), CheckpointNow(folder=folder, at_most=0)]
        made.append(
            watch(
                name=f"m{k}",
                schedule=Between(STEPS // 10 * k, 1 + k % 3),
                record=str(folder),
                writers=[MemoryWriter()],
                on_alert=actions if k % 2 else [],
                rows=None if k % 2 else 4,
                **options,
            )
        )
    return made


def long_run(folder: Path, make: Any, watched: bool, strategy: str, devices: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, run = fit(
            folder,
            strategy,
            *(monitors(folder) if watched else []),
            make=make,
            batches=STEPS * devices,
            devices=devices,
        )
    assert run.global_step == STEPS
    assert traces() == []
    return bits(model)


def assert_readable(folder: Path) -> int:
    """The records that were begun can be read; gives the number of steps in them."""
    steps = 0
    for lines in folder.glob("*/record.jsonl"):
        if lines.read_text().startswith('{"type":"header"') or '"header"' in lines.read_text():
            steps += len(read_run(lines.parent).steps)
    return steps


MAKES = [Language, compiled]
ON_TWO = [Language, pytest.param(compiled, marks=pytest.mark.slow)]


@pytest.mark.parametrize("make", MAKES, ids=["eager", "compiled"])
def test_one_process(tmp_path, monkeypatch, make):
    plain = long_run(tmp_path / "plain", make, False, "auto", 1)
    faults = Faults(monkeypatch, seed=1, probability=0.002)
    watched = long_run(tmp_path / "watched", make, True, "auto", 1)
    assert watched == plain
    assert sum(faults.raised.values()) >= 5, faults.raised
    assert assert_readable(tmp_path / "watched") > 50


def rank_run(rank: int, folder: Path, port: int, make: Any, watched: bool) -> Any:
    as_rank(rank, 2, port)
    raised: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        if watched:
            raised = Faults(patch, seed=10 + rank, probability=0.002).raised
        return long_run(folder, make, watched, "ddp", 2), raised


@pytest.mark.distributed
@pytest.mark.parametrize("make", ON_TWO, ids=["eager", "compiled"])
def test_two_processes(tmp_path, make):
    """Each process has faults of its own, and none waits for the other in vain."""
    (tmp_path / "watched").mkdir()
    plain = run_ranks(rank_run, 2, tmp_path / "plain", free_port(), make, False, limit=250)
    watched = run_ranks(rank_run, 2, tmp_path / "watched", free_port(), make, True, limit=250)
    assert [weights for weights, _ in watched] == [weights for weights, _ in plain]
    assert all(sum(raised.values()) >= 3 for _, raised in watched), [r for _, r in watched]
    assert assert_readable(tmp_path / "watched") > 30


def test_every_stage_can_fail(monkeypatch):
    """The table of stages names what exists."""
    Faults(monkeypatch, seed=0, probability=0.0)
    assert len(STAGES) > 25
