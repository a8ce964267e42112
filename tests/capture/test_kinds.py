"""Kinds of rows, counted by hand, through the fused kernel and through attention written out."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from entropy_monitor import AttentionMonitor
from entropy_monitor.calls import RowKind
from tests.capture.helpers import capture

WAYS = ["eager", "sdpa"]


class Plain(nn.Module):
    def __init__(self, way: str, **given: Any) -> None:
        super().__init__()
        self.way, self.given = way, given
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.way == "sdpa":
            return F.scaled_dot_product_attention(q * self.scale, k, v, **self.given)
        scores = q * self.scale @ k.mT / q.shape[-1] ** 0.5
        mask = self.given["attn_mask"]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -torch.inf)
        else:
            scores = scores + mask
        return scores.softmax(-1) @ v


def row(*visible: int) -> Tensor:
    return torch.tensor(visible, dtype=torch.bool)


LOWER = torch.ones(6, 6, dtype=torch.bool).tril()
KEPT, FIRST, TWO, NOTHING = RowKind.VALID, RowKind.NO_CONTENT, RowKind.TRIVIAL, RowKind.EMPTY
BEHIND = RowKind.NO_SINK
SHAPES: dict[str, tuple[Tensor, list[RowKind], list[int]]] = {
    # A mask (True = visible) of six queries, the kind of each row and its number of content keys.
    "causal": (LOWER, [FIRST, TWO, *[KEPT] * 4], [0, 1, 2, 3, 4, 5]),
    "one_row": (row(1, 1, 1, 1, 0, 0)[None], [*[KEPT] * 4, *[NOTHING] * 2], [3, 3, 3, 3, 0, 0]),
    "left": (
        LOWER & row(0, 0, 1, 1, 1, 1), [NOTHING, NOTHING, FIRST, TWO, KEPT, KEPT],
        [0, 0, 0, 1, 2, 3],
    ),
    "right": (
        LOWER & row(1, 1, 1, 1, 0, 0), [FIRST, TWO, KEPT, KEPT, NOTHING, NOTHING],
        [0, 1, 2, 3, 0, 0],
    ),
    "packed": (
        LOWER & (row(0, 0, 0, 1, 1, 1)[:, None] == row(0, 0, 0, 1, 1, 1)),
        [FIRST, TWO, KEPT, FIRST, TWO, KEPT], [0, 1, 2, 0, 1, 2],
    ),
    "window": (LOWER & LOWER.triu(-2), [FIRST, TWO, KEPT, *[BEHIND] * 3], [0, 1, 2, 3, 3, 3]),
    "nothing": (torch.zeros(6, 6, dtype=torch.bool), [NOTHING] * 6, [0] * 6),
}  # fmt: skip
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda mask: mask,
    "inf": lambda mask: torch.zeros(mask.shape).double().masked_fill(~mask, -torch.inf),
    "lowest": lambda mask: torch.finfo(torch.float64).min * (~mask).double(),
    "bert": lambda mask: -1e4 * (~mask).double(),
    "alibi": lambda mask: (
        (torch.arange(6)[:, None] - torch.arange(6)).abs().double().mul(-0.5)
        .masked_fill(~mask, -torch.inf)
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_each_kind_are_counted(shape: str, heads: int, form: str, way: str) -> None:
    visible, kinds, content = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 6, heads, 3, generator=generator, dtype=torch.float64).transpose(1, 2)
        for _ in range(3)
    )
    mask = FORMS[form](visible)
    model = Plain(way, attn_mask=mask)
    monitor = AttentionMonitor(model, rows=None, on_error="raise")
    with monitor.observe(step=0):
        model(q, k, v)
    counted = {
        kind: monitor.snapshot().array(f"rows_{kind.name.lower()}").flatten().tolist()
        for kind in RowKind
    }
    want = Counter(kinds)
    assert counted == {kind: [want[kind]] * heads for kind in RowKind}
    measured, *_ = capture(model, lambda: model(q, k, v))
    stats = measured.stats["Plain"]
    assert stats.kind[0].tolist() == [kinds] * heads
    assert stats.support[0].tolist() == [content] * heads
    logits = q @ k.mT / 3**0.5 + (mask if mask.dtype != torch.bool else 0)
    for i, kind in enumerate(kinds):
        if kind == NOTHING:
            continue
        seen = visible.expand(6, 6)[i].nonzero().flatten()
        assert len(seen) - (kind != BEHIND) == content[i]
        p = logits[0, :, i, seen].softmax(-1)
        pi = logits[0, :, i, seen[kind != BEHIND :]].softmax(-1)
        for got, weights in ((stats.total_entropy, p), (stats.content_entropy, pi)):
            want_entropy = torch.special.entr(weights).sum(-1)
            torch.testing.assert_close(got[0, :, i].double(), want_entropy, atol=1e-6, rtol=0)
        sink = p[:, 0] if kind != BEHIND else torch.zeros(heads).double()
        torch.testing.assert_close(stats.sink_mass[0, :, i].double(), sink, atol=1e-6, rtol=0)
