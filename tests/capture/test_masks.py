"""Large numbers that hide keys, and biases that only look like them."""

import pytest
import torch
from torch import Tensor

from entropy_monitor.capture import CaptureSession
from entropy_monitor.capture.masks import Masks, hidden_at
from tests.capture.helpers import Measured
from tests.capture.test_fused import B, H, Kernel, T, rand

CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def filled(value: float) -> Tensor:
    return torch.zeros(T, T, dtype=torch.float64).masked_fill(~CAUSAL, value)


@pytest.mark.parametrize("value", [-100.0, -1e4, -65504.0])
def test_a_mask_of_two_values_hides(value: float) -> None:
    assert hidden_at(filled(value)) == value


@pytest.mark.parametrize(
    "bias",
    [
        torch.zeros(T, T),
        filled(-20.0),
        filled(-float("inf")),
        filled(-1e30),
        filled(torch.finfo(torch.float32).min),
        -torch.arange(20000.0),  # ALiBi over a long sequence
        torch.tensor([0.0, -100.0, 3.0]),
        torch.tensor([0.0, -100.0, -50.0]),
        torch.zeros(0),
        torch.zeros(3, dtype=torch.bool),
    ],
    ids=str,
)
def test_a_bias_hides_nothing_by_itself(bias: Tensor) -> None:
    assert hidden_at(bias) is None


def test_a_learned_bias_with_a_mask_in_it() -> None:
    assert hidden_at(filled(-1e4) + rand(T, T)) == pytest.approx(-1e4, abs=10)


def test_a_mask_that_was_written_to_is_looked_at_again() -> None:
    masks, mask = Masks(), torch.zeros(T, T)
    assert masks.hidden_at(mask) is None
    mask.masked_fill_(~CAUSAL, -1e4)
    assert masks.hidden_at(mask) == -1e4


@pytest.mark.parametrize("value", [-100.0, -1e4, -1e9, -float("inf")])
def test_fused_kernels_with_added_masks_have_the_support_of_the_bool_mask(value: float) -> None:
    q, k, v = (rand(B, H, T, 8, seed=n) for n in range(3))
    supports = []
    for mask in (CAUSAL, filled(value)):
        model, measured = Kernel(attn_mask=mask), Measured()
        with CaptureSession(model, on_error="raise").window(measured):
            model(q, k, v)
        supports.append(measured.stats["Kernel"].support)
    assert torch.equal(*supports)
