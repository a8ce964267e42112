"""Lightning runs on several ranks, started by `run_ranks` or by a launcher of Lightning's own."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy

from entropy_monitor import EntropyMonitor
from tests.runs import Language, bits, loader, traces, watch


class Heard:
    """An action on all ranks that writes down what this rank was told."""

    all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, 0

    def setup_trainer(self, trainer: Any, module: Any) -> None:
        self.rank = trainer.global_rank

    def __call__(self, alert: Any) -> None:
        with (self.folder / f"heard{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(alert.to_dict()) + "\n")


class Last(pl.Callback):
    """Writes down what each rank emitted last, and which files it holds."""

    def __init__(self, folder: Path, monitor: EntropyMonitor) -> None:
        self.folder, self.monitor = folder, monitor

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        last = self.monitor.last
        told = {
            "step": last.step,
            "stats": last.stats.tobytes().hex(),
            "metrics": sorted(trainer.callback_metrics),
            "writers": len(self.monitor.pipeline.writers),
        }
        (self.folder / f"last{trainer.global_rank}.json").write_text(json.dumps(told))


class Apart(pl.Callback):
    """Gives each rank weights and a random state of its own, however its process was started.

    Lightning does so for `spawn` alone: on a CPU the ranks that a fork server starts train the same
    memory, in a race that no two runs end alike, with a monitor or without.
    """

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        torch.manual_seed(trainer.global_rank)
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def fit(
    folder: Path,
    strategy: Any,
    *callbacks: Any,
    make: Any = None,
    batches: int = 12,
    **options: Any,
) -> Any:
    torch.manual_seed(0)
    model = make() if make is not None else Language(alarm=4)
    run = pl.Trainer(
        callbacks=[Apart(), *callbacks],
        strategy=strategy,
        accelerator="cpu",
        default_root_dir=folder,
        **{
            "devices": 2,
            "max_epochs": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            **options,
        },
    )
    run.fit(model, loader(batches=batches))
    return model, run


def as_rank(rank: int, world: int, port: int) -> None:
    """Tell Lightning that this process is a rank that somebody else started."""
    os.environ.update(
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        NODE_RANK="0",
        GROUP_RANK="0",
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )


def ranked_fit(rank: int, folder: Path, port: int, watched: bool) -> dict[str, Any]:
    as_rank(rank, 2, port)
    callbacks: list[Any] = []
    if watched:
        callback = watch(on_alert=[Heard(folder)], on_error="raise")
        callbacks = [callback, Last(folder, callback)]
    model, run = fit(folder, DDPStrategy(process_group_backend="gloo"), *callbacks)
    assert run.world_size == 2
    assert traces() == []
    return bits(model)
