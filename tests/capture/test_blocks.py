"""Attention within blocks of a sequence: blocks are no heads; what cannot be told is said."""

from functools import partial
from itertools import product

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tests.capture.helpers import assert_weights, capture

HEADS, WIDTH = 4, 16

LAYOUTS = ["(b h) w", "(b w) h", "b h w", "b w h", "(b h w)"]


class BlockAttention(nn.Module):
    """Each query sees its own block and nothing else."""

    def __init__(self, layout: str, block: int, used: int = HEADS) -> None:
        super().__init__()
        self.heads, self.used, self.block, self.layout = HEADS, used, block, layout
        self.qkv = nn.Linear(WIDTH, 3 * used * 4)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        parts = self.qkv(x).view(b, t // self.block, self.block, 3, self.used, 4).unbind(3)
        self.weights = torch.einsum("bwqhd,bwkhd->wbhqk", *parts[:2]).div(2).softmax(-1)
        return self.attend(*(rearrange(p, f"b w q h d -> {self.layout} q d") for p in parts))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 2).softmax(-1) @ v


class FusedBlocks(BlockAttention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("used", [HEADS, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [BlockAttention, FusedBlocks])
def test_the_numbers_are_right_or_it_says_that_it_cannot_tell(
    layout: str, kind: type[BlockAttention], used: int
) -> None:
    read = set()
    for batch, blocks in product([1, 2, 3, 4], [2, 4, 5, 8]):
        torch.manual_seed(0)
        model = nn.Sequential(kind(layout, 6, used)).double()
        x = torch.randn(batch, 6 * blocks, WIDTH, dtype=torch.float64)
        measured, report, _ = capture(model, partial(model, x))
        if not measured.stats:
            assert set(report.lost) == {"0"}
            continue
        read.add((batch, blocks))
        assert measured.shapes["0"] == (batch * blocks, used, 6, 6)
        weights = model[0].weights
        expected = -(weights * weights.log()).sum(-1).mean((0, 1, 3))
        got = measured.stats["0"].total_entropy.mean((0, 2))
        assert torch.allclose(got, expected, rtol=1e-6)
    # The module states more heads than it cuts into blocks, as where others are linear.
    if used == HEADS and layout in ("(b w) h", "b w h"):
        assert {(1, 5), (2, 5), (3, 2)} <= read


class Landmarks(nn.Module):
    """A softmax that is multiplied several times, as the iterations of Nystrom attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        self.weights = (q @ k.mT).softmax(-1)
        return self.weights @ v + self.weights @ (self.weights @ v)


def test_one_softmax_is_one_attention_however_often_it_is_multiplied() -> None:
    model = nn.Sequential(Landmarks()).double()
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    measured, report, _ = capture(model, partial(model, x))
    assert set(measured.stats) == {"0"}
    assert report.seen == {"0": 1}
    assert_weights(measured, {"0": model[0].weights}, atol=1e-9)


class Pooled(nn.Module):
    """Fewer queries than tokens, made inside: no blocks, though their number would fit."""

    def __init__(self, queries: int) -> None:
        super().__init__()
        self.heads = HEADS
        self.queries = nn.Parameter(torch.randn(queries, WIDTH))
        self.kv = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q = self.queries.unflatten(-1, (HEADS, -1)).transpose(0, 1).expand(len(x), -1, -1, -1)
        self.weights = (q @ k.mT).softmax(-1)
        return self.weights @ v


@pytest.mark.parametrize("queries", [1, 2, 6])
def test_queries_of_the_modules_own_are_no_blocks(queries: int) -> None:
    model = nn.Sequential(Pooled(queries)).double()
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    measured, report, _ = capture(model, partial(model, x))
    assert report.complete
    assert measured.shapes["0"] == (2, HEADS, queries, 12)
    assert_weights(measured, {"0": model[0].weights}, atol=1e-9)
