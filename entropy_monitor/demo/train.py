"""Train one small transformer on Bigram-Backcopy with Lightning and the callback.

The recipe grows a sink within seconds: GPT-NeoX with one layer and one head of 64, a rotary base
that fits 64 tokens, AdamW with a short memory, warm-up and then a constant learning rate (annealing
stops the sink while it grows). How far it grows depends on the seed: with <bos> the sink makes 64,
29, 20, 4 and 17 % of the fall for seeds 0 to 4; without it 4 % for each.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from jaxtyping import Float, Int
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from entropy_monitor.demo.backcopy import Backcopy
from entropy_monitor.lightning import EntropyMonitor
from entropy_monitor.schedules import any_of, every, log_spaced
from entropy_monitor.writers import MemoryWriter

# The probe is drawn with a seed that no training batch uses.
_PROBE_SEED = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the two models are trained; they differ in ``<bos>`` alone.

    Attributes:
        steps: Optimiser steps.
        seed: Seed of the weights and of the sequences.
        length: Tokens per sequence.
        batch: Sequences per step.
        width: Width of the model, and of its single head.
        learning_rate: Of AdamW, after the warm-up.
        warmup: Steps over which the learning rate rises.
        probe: Sequences measured, always the same ones.
        every_n_steps: Steps between two measurements, besides the early ones at 1, 2, 4, 8 ...
    """

    steps: int = 256
    seed: int = 0
    length: int = 64
    batch: int = 32
    width: int = 64
    learning_rate: float = 7e-3
    warmup: int = 50
    probe: int = 32
    every_n_steps: int = 8

    def __post_init__(self) -> None:
        for name in ("steps", "length", "batch", "width", "warmup", "probe", "every_n_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` must be in [0, 2**32), got {self.seed}.")


@dataclass(frozen=True, kw_only=True)
class Twin:
    """What one training gave.

    Attributes:
        bos: Whether sequences started with ``<bos>``.
        logdir: Folder of the TensorBoard logs and of the record.
        steps: Optimiser steps measured, ascending.
        curves: Model means at these steps by the name of the statistic.
        changes: ``total``, ``sink``, ``content``, ``support`` since step 0, nats, at these steps.
        summary: The last change as `EntropyChange.to_dict` gives it.
        trigger_sink: Final mean mass on the first key from trigger queries.
        other_sink: The same from all other queries.
        copies: Share of the copies after triggers predicted right.
        loss: Training loss of the last step, nats per token.
        tokens: One sequence of the probe, as printable characters.
        weights: Final attention of that sequence, query by key.
    """

    bos: bool
    logdir: Path
    steps: list[int]
    curves: Mapping[str, list[float]]
    changes: Mapping[str, list[float]]
    summary: Mapping[str, Any]
    trigger_sink: float
    other_sink: float
    copies: float
    loss: float
    tokens: list[str]
    weights: Float[np.ndarray, "queries keys"] = field(repr=False)


class BackcopyModule(pl.LightningModule):
    """A language model on the task.

    Args:
        task: The task.
        recipe: How to train it.
    """

    def __init__(self, task: Backcopy, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.model = small_gptneox(
            vocabulary=task.vocabulary, length=task.length, width=recipe.width
        )

    def forward(
        self, tokens: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch length vocabulary"]:
        """Logits of the next token."""
        logits: Tensor = self.model(tokens).logits
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The loss of one batch, nats per token."""
        (tokens,) = batch
        loss: Tensor = self.model(tokens, labels=tokens).loss
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW, warm-up, then a constant learning rate."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.recipe.learning_rate, betas=(0.9, 0.95)
        )
        warmup = self.recipe.warmup
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / warmup, 1.0)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def small_gptneox(*, vocabulary: int, length: int, width: int = 64) -> GPTNeoXForCausalLM:
    """GPT-NeoX with one layer and one head, random weights; 58 thousand parameters at width 64."""
    config = GPTNeoXConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        # The default base of 10,000 is made for thousands of tokens; over 64 it hardly tells
        # neighbours apart.
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.25,
        },
        use_cache=False,
    )
    model = GPTNeoXForCausalLM(config)
    model.set_attn_implementation("sdpa")
    return model


class _Progress(pl.Callback):
    """Tells how far the training is and what it looks like; the demo draws it."""

    def __init__(self, memory: MemoryWriter, tell: Callable[[int, float, float], None]) -> None:
        self.memory, self.tell = memory, tell

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last = self.memory.emissions[-1].model if self.memory.emissions else {}
        nan = float("nan")
        self.tell(
            trainer.global_step,
            last.get("attention/total_entropy", nan),
            last.get("attention/sink_mass", nan),
        )


def train_twin(
    *,
    bos: bool,
    recipe: Recipe,
    folder: Path,
    tell: Callable[[int, float, float], None] = lambda step, entropy, sink: None,
) -> Twin:
    """Train on sequences with or without ``<bos>`` and say what became of the attention.

    Args:
        bos: Whether sequences start with ``<bos>``.
        recipe: How to train.
        folder: Where logs and record go.
        tell: Called after every step with the step, the last entropy and the last sink mass.

    Returns:
        The curves, the attribution and a look at the trained head.
    """
    task = Backcopy(bos=bos, length=recipe.length)
    train = torch.from_numpy(task.draw(recipe.steps * recipe.batch, seed=recipe.seed))
    probe = torch.from_numpy(task.draw(recipe.probe, seed=recipe.seed + _PROBE_SEED))
    memory = MemoryWriter()
    monitor = EntropyMonitor(
        schedule=any_of(every(recipe.every_n_steps), log_spaced(per_doubling=1)),
        rows=None,
        probe=probe,
        writers=[memory],
        on_error="raise",
    )
    with _quiet(), _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        module = BackcopyModule(task, recipe)
        trainer = pl.Trainer(
            max_steps=recipe.steps,
            accelerator="cpu",
            devices=1,
            logger=TensorBoardLogger(folder, name="", version="", log_graph=False),
            callbacks=[monitor, _Progress(memory, tell)],
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            log_every_n_steps=recipe.every_n_steps,
        )
        trainer.fit(module, DataLoader(TensorDataset(train), batch_size=recipe.batch))
    curves = {
        name: memory.series(f"attention/{name}")
        for name in ("total_entropy", "content_entropy", "sink_mass", "content_mass", "max_logit")
    }
    changes = {
        name: memory.series(f"attention_change/{name}")
        for name in ("total", "sink", "content", "support")
    }
    return Twin(
        bos=bos,
        logdir=folder,
        steps=memory.steps,
        curves=curves,
        changes=changes,
        summary=memory.emissions[-1].summary,
        loss=float(trainer.callback_metrics["train/loss"]),
        **_look(module, task, probe),
    )


def _look(
    module: BackcopyModule, task: Backcopy, probe: Int[Tensor, "batch length"]
) -> dict[str, Any]:
    """Look at the trained head with the model's own eager weights (the monitor needs none)."""
    module.eval()
    module.model.set_attn_implementation("eager")
    with torch.no_grad():
        out = module.model(probe, output_attentions=True)
    weights = out.attentions[0][:, 0].double().numpy()
    tokens = probe.numpy()
    # Rows that count have at least two content keys, hence start at the third.
    rows = np.zeros_like(tokens, dtype=bool)
    rows[:, 2:] = True
    triggers = task.trigger_rows(tokens) & rows
    others = rows & ~triggers
    to_copy = triggers[:, :-1]
    right = out.logits.argmax(-1).numpy()[:, :-1] == tokens[:, 1:]
    shown = [task.text(token) for token in tokens[0, :, None]]
    return {
        "trigger_sink": float(weights[..., 0][triggers].mean()),
        "other_sink": float(weights[..., 0][others].mean()),
        "copies": float(right[to_copy].mean()),
        "tokens": shown,
        "weights": weights[0],
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: a model this small gets slower with more, and results hang on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's banners and its advice for large trainings away from the demo."""
    loggers = [
        logging.getLogger(name)
        for name in ("pytorch_lightning", "lightning.pytorch", "lightning_fabric")
    ]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*GPU available but not used.*")
        # Lightning 2.6 asks torch 2.13 an old question.
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        try:
            for logger in loggers:
                logger.setLevel(logging.ERROR)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
