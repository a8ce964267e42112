"""Small Lightning runs whose results are compared bit for bit, with the monitor and without."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from entropy_monitor import EntropyMonitor


class Block(nn.Module):
    """Causal self-attention with dropout behind it, which would show a changed random state."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(y.transpose(1, 2).flatten(-2))


class Net(nn.Module):
    """Two layers on 11 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.attn0, self.attn1 = Block(), Block()
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.attn1(self.attn0(self.embed(ids))))


class Language(pl.LightningModule):
    """Next-token prediction.

    Args:
        net: The network.
        spoil: A step and a value that one line of the weights gets for good.
        alarm: A step at which NaN goes through a layer, without any effect on training.
    """

    def __init__(
        self,
        net: nn.Module | None = None,
        *,
        spoil: tuple[int, float] | None = None,
        alarm: int | None = None,
    ) -> None:
        super().__init__()
        self.net = Net() if net is None else net
        self.spoil, self.alarm = spoil, alarm

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        if self.spoil is not None and self.global_step == self.spoil[0]:
            with torch.no_grad():
                self.net.attn1.qkv.weight[0].fill_(self.spoil[1])
        if self.alarm == self.global_step:
            with torch.no_grad():
                self.net.attn1.forward(torch.full((1, 9, 16), torch.nan))
        logits = self.net(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(batches: int = 6, batch: int = 4, length: int = 9) -> Any:
    ids = torch.randint(11, (batches * batch, length), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=batch)


def trainer(
    folder: Path | str, callbacks: Iterable[pl.Callback] = (), **options: Any
) -> pl.Trainer:
    defaults = {
        "max_epochs": 1,
        "logger": False,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def train(
    folder: Path | str,
    *callbacks: pl.Callback,
    make: Any = Language,
    data: Any = None,
    **options: Any,
) -> tuple[Any, pl.Trainer]:
    """Trains a model made under a fixed seed; gives it with the trainer."""
    torch.manual_seed(0)
    model = make()
    run = trainer(folder, callbacks, **options)
    run.fit(model, data if data is not None else loader())
    return model, run


def watch(**options: Any) -> EntropyMonitor:
    """A monitor that measures every row of every step, and is silent about alarms."""
    return EntropyMonitor(**{"every_n_steps": 1, "rows": None, "on_alert": [], **options})


def bits(model: nn.Module) -> dict[str, bytes]:
    """All parameters and buffers, bit for bit: NaN equals NaN here, and 0 is not -0."""
    return {
        name: value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        for name, value in model.state_dict().items()
    }


def traces() -> list[Any]:
    """What a monitor could have left behind in this process."""
    from entropy_monitor.capture.hub import hub

    depth = torch._C._len_torch_dispatch_stack()
    stack = [torch._C._get_dispatch_stack_at(n) for n in range(depth)]
    return [*stack, *hub().windows, *torch.overrides._get_current_function_mode_stack()]
