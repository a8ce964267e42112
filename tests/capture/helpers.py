"""Capture a forward pass and compare it with the weights that eager attention returns."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from entropy_monitor.calls import AttentionCall
from entropy_monitor.capture import CaptureReport, CaptureSession
from entropy_monitor.statistics import RowStatistics, measure_call
from entropy_monitor.testing import assert_matches_reference, reference_row_statistics


class Measured:
    """A receiver that measures every row of every call."""

    def __init__(self, sink: Any = "first") -> None:
        self.sink = sink
        self.stats: dict[str, RowStatistics] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.cross: dict[str, bool | None] = {}
        self.visible: dict[str, Tensor] = {}

    def __call__(self, call: AttentionCall) -> None:
        assert call.name not in self.stats, f"{call.name} was handed over twice"
        self.stats[call.name] = measure_call(call, sink=self.sink)
        self.shapes[call.name] = call.shape
        self.cross[call.name] = call.cross


def capture(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    session: CaptureSession | None = None,
    sink: Any = "first",
) -> tuple[Measured, CaptureReport, Any]:
    """Run something inside a window; errors of the capture are raised."""
    session = session or CaptureSession(model, on_error="raise")
    measured = Measured(sink)
    with session.window(measured) as report:
        result = run()
    return measured, report, result


def assert_weights(
    measured: Measured, weights: Mapping[str, Tensor], *, atol: float = 1e-5
) -> None:
    """Statistics equal those of the logarithm of these weights; what is missing to 1 is a sink."""
    for name, stats in measured.stats.items():
        w = weights[name].detach().double()
        missing = (1 - w.sum(-1, keepdim=True)).clamp_min(0)
        virtual = int((missing > 1e-3).any())
        logits = torch.cat([w, missing], -1).log() if virtual else w.log()
        reference = reference_row_statistics(
            logits=logits, virtual_columns=virtual, sink=measured.sink, cross=measured.cross[name]
        )
        # A softmax does not know the level of its logits.
        shift = torch.as_tensor(reference.max_logit) - stats.max_logit.double()
        assert shift.isfinite().all()
        assert_matches_reference(_Levelled(stats, reference), reference, atol=atol)


class _Levelled:
    """Statistics with the level of the logits, which weights do not tell, of the reference."""

    def __init__(self, stats: RowStatistics, reference: Any) -> None:
        self._stats = stats
        self.max_logit = torch.as_tensor(reference.max_logit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stats, name)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def assert_same_training(
    plain: nn.Module, watched: nn.Module, losses: tuple[Tensor, Tensor]
) -> None:
    """Loss and gradients are equal bit for bit."""
    assert torch.equal(losses[0], losses[1])
    one, other = gradients(plain), gradients(watched)
    for name, gradient in one.items():
        if gradient is None:
            assert other[name] is None, name
        else:
            assert torch.equal(gradient, other[name]), name
