"""Attention written out by hand, in the many ways people do, and what only resembles it."""

import pytest
import torch
from torch import nn

from tests.capture.helpers import assert_same_training, assert_weights, capture
from tests.handmade import HANDMADE, NOT_ATTENTION, UNSEEN, WIDTH, Autocast16


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.mix = kind()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(x)).square().mean()


def net(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(kind).to(dtype)


def x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return 2 * torch.randn(3, 7, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("kind", HANDMADE)
@pytest.mark.parametrize("grad", [True, False])
def test_statistics_equal_those_of_its_own_weights(kind: type[nn.Module], grad: bool) -> None:
    model = net(kind, torch.float64)
    with torch.set_grad_enabled(grad):
        measured, report, _ = capture(model, lambda: model(x(torch.float64)))
    assert set(measured.stats) == {"mix"}
    assert report.complete
    assert_weights(measured, {"mix": model.mix.weights}, atol=2e-3 if kind is Autocast16 else 1e-9)


@pytest.mark.parametrize("kind", [*HANDMADE, *NOT_ATTENTION, *UNSEEN])
def test_training_is_the_same_bit_for_bit(kind: type[nn.Module]) -> None:
    if kind.__name__ == "OverwrittenAttention":
        pytest.skip("autograd itself refuses it")
    losses = []
    models = net(kind), net(kind)
    for model, watched in zip(models, (False, True), strict=True):
        torch.manual_seed(2)
        loss = capture(model, lambda m=model: m(x()))[2] if watched else model(x())
        loss.backward()
        losses.append(loss)
    assert_same_training(*models, tuple(losses))


@pytest.mark.parametrize("kind", NOT_ATTENTION)
def test_nothing_else_is_taken_for_attention(kind: type[nn.Module]) -> None:
    model = net(kind)
    measured, report, _ = capture(model, lambda: model(x()))
    assert not measured.stats
    assert not report.lost
    assert ("mix" in report.unseen) == ("Attention" in kind.__name__)


@pytest.mark.parametrize("kind", UNSEEN)
def test_what_cannot_be_read_is_reported_with_a_reason(kind: type[nn.Module]) -> None:
    model = net(kind)
    with torch.no_grad():
        measured, report, _ = capture(model, lambda: model(x()))
    assert not measured.stats
    reason = {**report.unseen, **report.lost}["mix"]
    assert len(reason) > 20
    assert "mix" in report.describe()
    assert "Looked for" in report.describe()
