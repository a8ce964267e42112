"""A fixed batch whose rows are compared over time: run without gradient, and without a trace.

The model's mode, the random state and its gradients are as before; batch normalisation keeps its
running statistics, since the forward pass is done in evaluation mode.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from entropy_monitor.monitor import AttentionMonitor


class Probe:
    """Runs a fixed batch through a module while a monitor observes.

    Args:
        batch: A tensor, a tuple or list of arguments, a dictionary of keyword arguments of the
            module's forward, or a function that gets the module and runs it.

    Raises:
        TypeError: If the batch is none of these.
    """

    def __init__(self, batch: Any) -> None:
        if not (callable(batch) or isinstance(batch, (Tensor, tuple, list, Mapping))):
            raise TypeError(
                "`probe` must be a tensor, a tuple, a dictionary of arguments or a function of the "
                f"module; got {type(batch).__name__}."
            )
        self.batch = batch

    def run(
        self,
        module: nn.Module,
        monitor: AttentionMonitor,
        step: int,
        *,
        move: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        """Run the batch once, observed.

        Args:
            module: The module to call.
            monitor: What observes.
            step: Optimiser step.
            move: Brings the batch to the module's device.
        """
        with undisturbed(module), torch.no_grad():
            if not isinstance(self.batch, Tensor) and callable(self.batch):
                with monitor.observe(step):
                    self.batch(module)
                return
            batch = move(self.batch)
            ids = _first_ids(batch)
            with monitor.observe(step, input_ids=ids):
                if isinstance(batch, Mapping):
                    module(**batch)
                elif isinstance(batch, (tuple, list)):
                    module(*batch)
                else:
                    module(batch)


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every submodule's mode and the random state as before afterwards."""
    modes = [(child, child.training) for child in module.modules()]
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        module.eval()
        try:
            yield
        finally:
            for child, mode in modes:
                child.training = mode


def _first_ids(batch: Any) -> Tensor | None:
    parts = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, (tuple, list))
        else [batch]
    )
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return batch["input_ids"]
    for part in parts:
        if isinstance(part, Tensor) and part.ndim == 2 and not part.is_floating_point():
            return part
    return None
