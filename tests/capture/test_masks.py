"""Large numbers that hide keys, and biases that only look like them."""

import pytest
import torch
from torch import Tensor, nn

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


class Scores(nn.Module):
    """Attention by hand that adds a mask to scores of its own type, in one of several ways."""

    def __init__(self, way: str, mask: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.way, self.mask, self.dtype = way, mask, dtype
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.to(self.dtype).flatten(0, 1) for t in (q * self.scale, k, v))
        whole = self.mask.to(self.dtype).expand(len(q), T, T)
        scores = torch.bmm(q, k.mT)
        if self.way == "add":
            scores = scores + self.mask
        elif self.way == "alpha":
            scores = torch.add(scores, -self.mask, alpha=-1)
        elif self.way == "subtract":
            scores = scores - -self.mask
        elif self.way == "subtract_":
            scores -= -self.mask
        elif self.way == "baddbmm":
            scores = torch.baddbmm(whole, q, k.mT)
        else:  # the buffer holds anything and is not read
            scores = torch.baddbmm(whole, q, k.mT, beta=0) + self.mask
        return (scores.softmax(-1).to(self.dtype) @ v).unflatten(0, (B, H))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "way", ["add", "alpha", "subtract", "subtract_", "baddbmm", "baddbmm_buffer"]
)
@pytest.mark.parametrize("value", [-1e4, -65504.0, -float("inf")])
@pytest.mark.parametrize("made_in", [torch.float16, torch.float32])
def test_masks_of_one_type_in_scores_of_another(
    value: float, way: str, dtype: torch.dtype, made_in: torch.dtype
) -> None:
    q, k, v = (rand(B, H, T, 8, seed=n) for n in range(3))
    model, measured = Scores(way, filled(value).to(made_in), dtype), Measured()
    with CaptureSession(model, on_error="raise").window(measured):
        model(q, k, v)
    (stats,) = measured.stats.values()
    assert stats.support.unique(dim=0).unique(dim=1).flatten().tolist() == list(range(T))


@pytest.mark.parametrize("level", [0.0, 300.0, 2e4])
def test_taking_the_largest_score_away_hides_nothing(level: float) -> None:
    class Stable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = self.scale * q @ k.mT + level
            scores = scores - scores.amax(-1, keepdim=True)
            return scores.softmax(-1) @ v

    model, measured = Stable(), Measured()
    with CaptureSession(model, on_error="raise").window(measured):
        model(*(torch.zeros(1, 1, 3, 8) for _ in range(3)))
    (stats,) = measured.stats.values()
    assert stats.support.flatten().tolist() == [2, 2, 2]
    torch.testing.assert_close(stats.sink_mass, torch.full((1, 1, 3), 1 / 3))


def test_a_bias_taken_away_from_scores_hides_nothing() -> None:
    q, k, v = (rand(B, H, T, 8, seed=n) for n in range(3))
    slopes = -2.0 * (torch.arange(T)[:, None] - torch.arange(T)).abs()
    model, measured = Scores("subtract", slopes, torch.float64), Measured()
    with CaptureSession(model, on_error="raise").window(measured):
        model(q, k, v)
    assert (next(iter(measured.stats.values())).support == T - 1).all()


def test_fused_attention_in_float16_with_dropout_has_the_support_of_its_mask() -> None:
    """Without a fused kernel, torch adds the float16 mask to float32 scores."""
    q, k, v = (rand(B, H, T, 8, seed=n).half() for n in range(3))
    lowest = torch.finfo(torch.float16).min
    model = Kernel(attn_mask=filled(lowest).half(), dropout_p=0.1).half()
    measured = Measured()
    with CaptureSession(model, on_error="raise").window(measured) as report:
        model(q, k, v)
    assert report.way == {"Kernel": "softmax"}
    stats = measured.stats["Kernel"]
    logits = q.double() @ k.double().mT / 8**0.5
    p = logits.masked_fill(~CAUSAL, -torch.inf).softmax(-1)
    entropy = torch.special.entr(p).sum(-1)
    torch.testing.assert_close(stats.total_entropy.double(), entropy, atol=1e-5, rtol=0)
    assert stats.support[0, 0].tolist() == list(range(T))
