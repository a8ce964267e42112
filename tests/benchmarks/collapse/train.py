"""Trains one run with Lightning and the callback, and keeps its trace."""

import logging
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from entropy_monitor.lightning import EntropyMonitor
from entropy_monitor.schedules import log_spaced
from entropy_monitor.writers import MemoryWriter
from tests.benchmarks.collapse.data import VOCABULARY, Stream
from tests.benchmarks.collapse.kinds import Run
from tests.benchmarks.collapse.model import Model

KEPT = (
    "sink_mass",
    "content_mass",
    "binary_entropy",
    "content_entropy",
    "content_mass_entropy",
    "content_evenness",
    "total_entropy",
    "max_logit",
    "logit_spread",
    "logit_spread_scaled",
    "support",
    "log_support",
    "rows_valid",
    "rows_nonfinite",
)


class Module(pl.LightningModule):
    """The run: model, optimiser, schedule, and the fault at its step."""

    def __init__(self, run: Run, seed: int) -> None:
        super().__init__()
        self.run, self.stream = run, Stream(run.data, seed)
        self.model = Model(run)
        self.losses: list[tuple[int, float, float, float]] = []
        self.norm = self.last = float("nan")

    def train_dataloader(self) -> Any:
        return DataLoader(range(self.run.steps), batch_size=None)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        run, step = self.run, int(batch)
        length = (
            run.length if not run.lengths else run.lengths[step * len(run.lengths) // run.steps]
        )
        self._inject(step)
        tokens, targets = self.stream.batch(step, run.batch, length)
        tokens, targets = self._spoil(tokens, targets, step)
        loss = self._loss(tokens, targets)
        self.last = float(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        # Not in the training step: the callback would measure this forward as well.
        step = int(batch)
        if step % max(self.run.every, 10) == 0:
            self.losses.append((step, self.last, self._validate(), self.norm))

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(
            self.model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100
        )

    @torch.no_grad()
    def _validate(self) -> float:
        was = self.training
        self.eval()
        loss = float(self._loss(*self.stream.batch(0, 32, self.run.length, held_out=True)))
        self.train(was)
        return loss

    def _spoil(self, tokens: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
        fault = self.run.fault
        if fault is None or not fault.step <= step < fault.step + fault.steps:
            return tokens, targets
        generator = torch.Generator().manual_seed(step)
        noise = torch.randint(2, VOCABULARY, tokens.shape, generator=generator)
        if fault.what == "labels":
            return tokens, noise
        return (noise, targets) if fault.what == "garbage" else (tokens, targets)

    @torch.no_grad()
    def _inject(self, step: int) -> None:
        fault = self.run.fault
        if fault is None or step < fault.step:
            return
        share = min((step - fault.step + 1) / fault.steps, 1.0)
        for index, block in enumerate(self.model.blocks):
            attention = block.attention
            if fault.layers is not None and index not in fault.layers:
                continue
            if fault.what == "qk_growth":
                for weight in (attention.query.weight, attention.key.weight):
                    rows = weight.view(-1, attention.size, weight.shape[1])
                    for head in range(len(rows)) if fault.heads is None else fault.heads:
                        rows[head] *= 1.0 + fault.size
            elif fault.what == "value_growth":
                for weight in (attention.value.weight, attention.out.weight):
                    weight *= 1.0 + fault.size
            elif fault.what == "scale":
                attention.scale = fault.size**share
            elif fault.what in ("one_key", "sink_bias"):
                attention.bias, attention.bias_at = (
                    fault.size * share,
                    5 if fault.what == "one_key" else 0,
                )
        if fault.what == "second_moment" and step == fault.step:
            for state in self.trainer.optimizers[0].state.values():
                state["exp_avg_sq"].zero_()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [weight.grad.norm() for weight in self.parameters() if weight.grad is not None]
        self.norm = float(torch.stack(grads).norm())

    def configure_optimizers(self) -> Any:
        run = self.run
        if run.optimiser == "sgd":
            optimiser: Any = torch.optim.SGD(self.parameters(), lr=run.rate, momentum=0.9)
        elif run.optimiser == "lion":
            optimiser = Lion(self.parameters(), lr=run.rate, weight_decay=run.decay)
        else:
            optimiser = torch.optim.AdamW(
                self.parameters(), lr=run.rate, betas=(0.9, run.beta2), weight_decay=run.decay
            )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, self._rate)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _rate(self, step: int) -> float:
        run, fault = self.run, self.run.fault
        factor = min(1.0, (step + 1) / run.warmup) if run.warmup else 1.0
        if run.schedule == "cosine":
            factor *= 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(step / run.steps, 1.0)))
        elif run.schedule == "restarts":
            factor *= 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step % 200) / 200))
        elif run.schedule == "sawtooth":
            factor *= 1.0 if step % 100 < 15 and step >= 100 else 0.1
        if (
            fault is not None
            and fault.what == "rate"
            and fault.step <= step < fault.step + fault.steps
        ):
            factor *= fault.size
        return factor


class Lion(torch.optim.Optimizer):
    """Sign of a mixed momentum (Chen et al., 2023)."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        if loss is not None:
            loss = loss.detach()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight *= 1 - group["lr"] * group["weight_decay"]
                weight -= group["lr"] * (0.9 * momentum + 0.1 * weight.grad).sign()
                momentum.mul_(0.99).add_(weight.grad, alpha=0.01)
        return loss


def train(run: Run, seed: int) -> dict[str, np.ndarray]:
    """Trains and returns the trace: statistics (steps, layers, heads), losses at their steps."""
    for name in ("pytorch_lightning", "lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl.seed_everything(seed, verbose=False)
    torch.set_num_threads(1)
    memory = MemoryWriter()
    cadence = (
        {"schedule": log_spaced(per_doubling=6)} if run.every == 0 else {"every_n_steps": run.every}
    )
    monitor = EntropyMonitor(**cadence, writers=[memory], record=False, alerts=None, rows=None)
    trainer = pl.Trainer(
        max_steps=run.steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=run.clip,
        callbacks=[monitor],
    )
    module = Module(run, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    trace = {name: np.stack(memory.grid(name)).astype(np.float32) for name in KEPT}
    losses = np.array(module.losses)
    return {
        "step": np.array(memory.steps),
        **trace,
        "loss_step": losses[:, 0].astype(np.int64),
        "loss": losses[:, 1],
        "val_loss": losses[:, 2],
        "grad_norm": losses[:, 3],
    }


def trace_of(name: str, run: Run, seed: int, folder: Path) -> dict[str, np.ndarray]:
    """The trace of a run, trained unless the folder has it."""
    path = folder / f"{name}_s{seed}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez_compressed(part, **train(run, seed))
        part.rename(path)
    with np.load(path) as data:
        return {key: data[key] for key in data.files}
