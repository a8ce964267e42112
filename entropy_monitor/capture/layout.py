"""Which axis of a score tensor is the query and which the key, followed through views.

Scores q k^T leave a batched matrix product as (g, q, k): group (batch and heads folded together),
query, key. Models then fold, split and permute them in many ways before the softmax. Every axis
carries a letter, and each view maps the letters of its input to those of its output. A result of
None means that the axes can no longer be told apart; the scores are then not followed further.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

Axes = tuple[str, ...]
"""One letter per axis: `g` group, `q` query, `k` key, `1` an axis of size one that was inserted."""


def reshaped(axes: Axes, old: Sequence[int], new: Sequence[int]) -> Axes | None:
    """Letters after `view` or `reshape` from the sizes `old` to `new`.

    Axes that are folded together keep their letter if they agree; a folded axis that is split gives
    its letter to all parts (scores of grouped queries, (g, h q, k) -> (g, h, q, k), get two `q`).

    Examples:
        >>> reshaped(("g", "q", "k"), (6, 5, 7), (2, 3, 5, 7))
        ('g', 'g', 'q', 'k')
        >>> reshaped(("g", "q", "k"), (6, 5, 7), (30, 7)) is None
        True
    """
    if 0 in old or 0 in new:
        return None
    letters: list[str] = []
    i = j = 0
    while i < len(old) or j < len(new):
        start_i, start_j = i, j
        left = right = 1
        if i < len(old):
            left, i = old[i], i + 1
        if j < len(new):
            right, j = new[j], j + 1
        while left != right:
            if left < right:
                if i == len(old):
                    return None
                left, i = left * old[i], i + 1
            else:
                if j == len(new):
                    return None
                right, j = right * new[j], j + 1
        # Axes of size one carry no order: let them join the block on their left, on both sides.
        if left == 1 and start_i < len(old) and start_j < len(new):
            letters.append(axes[start_i])
            continue
        block = {axes[n] for n in range(start_i, i) if old[n] != 1} or {"1"}
        if len(block) > 1:
            return None
        letter = block.pop()
        letters.extend(letter if new[n] != 1 else "1" for n in range(start_j, j))
    return tuple(letters)


def permuted(axes: Axes, order: Sequence[int]) -> Axes:
    """Letters after `permute`.

    Examples:
        >>> permuted(("g", "q", "k"), (1, 0, -1))
        ('q', 'g', 'k')
    """
    return tuple(axes[n] for n in order)


def transposed(axes: Axes, first: int, second: int) -> Axes:
    """Letters after `transpose`."""
    letters = list(axes)
    letters[first], letters[second] = letters[second], letters[first]
    return tuple(letters)


def inserted(axes: Axes, at: int) -> Axes:
    """Letters after `unsqueeze`."""
    at = at % (len(axes) + 1)
    return (*axes[:at], "1", *axes[at:])


def removed(axes: Axes, at: int) -> Axes:
    """Letters after `select`, or `squeeze` of one axis."""
    at = at % len(axes)
    return axes[:at] + axes[at + 1 :]


def expanded(axes: Axes, sizes: Sequence[int]) -> Axes:
    """Letters after `expand` to `sizes`: new axes are groups."""
    axes = ("g",) * (len(sizes) - len(axes)) + axes
    return tuple("g" if a == "1" and s != 1 else a for a, s in zip(axes, sizes, strict=True))


_UNCLEAR = "batch and heads share an axis of the scores and cannot be told apart"
_BLOCKS = (
    "attention within blocks of a sequence, where blocks, heads and sequences cannot be told apart"
)


@dataclass(frozen=True, slots=True)
class Arranged:
    """How to bring logits to (batch, heads, queries, keys): permute by `order`, then reshape."""

    order: tuple[int, ...]
    batch: int
    heads: int


def arranged(
    axes: Axes,
    sizes: Sequence[int],
    heads: int | None,
    batch: int | None,
    lengths: Sequence[int] = (),
) -> Arranged | str:
    """Find what makes (batch, heads, queries, keys) out of logits, or say why nothing does.

    Args:
        axes: Letters of the logits; exactly one `k`.
        sizes: Sizes of the logits.
        heads: Number of heads of the owner, if it tells.
        batch: Number of sequences the owner was given, if it could be read.
        lengths: Tokens of the inputs the owner was given, those of its first input first.

    Examples:
        >>> arranged(("g", "q", "k"), (6, 5, 7), heads=3, batch=2)
        Arranged(order=(0, 1, 2), batch=2, heads=3)
    """
    keys = [n for n, a in enumerate(axes) if a == "k"]
    if len(keys) != 1:
        return "the axis of the keys is not unique"
    queries = [n for n, a in enumerate(axes) if a == "q"]
    if len(queries) > 1:
        queries = _queries_among(queries, sizes, sizes[keys[0]], heads)
        if len(queries) != 1:
            return "queries and heads share an axis of the scores and cannot be told apart"
    groups = [n for n in range(len(axes)) if n not in (*keys, *queries)]
    last = (*queries, *keys)
    blocks = _blocks(prod(sizes[n] for n in queries), sizes[keys[0]], lengths)
    if blocks > 1 and batch is not None:
        if heads is None:
            return _BLOCKS
        if not _whole([sizes[n] for n in groups], heads, batch, blocks):
            return _grouped_blocks(groups, sizes, heads, batch, blocks, last)
    return _grouped(groups, sizes, heads, batch, last)


def misread(
    sizes: tuple[int, int, int, int],
    heads: int | None,
    batch: int | None,
    lengths: Sequence[int],
) -> str | None:
    """Say why sizes that should be (batch, heads, queries, keys) may be something else.

    Arguments are those of `arranged`.

    Examples:
        >>> misread((2, 3, 5, 5), heads=3, batch=2, lengths=[5]) is None
        True
    """
    if batch is None or _blocks(*sizes[2:], lengths) == 1:
        return None
    found = arranged(("g", "g", "q", "k"), sizes, heads, batch, lengths)
    if isinstance(found, str):
        return found
    return None if found.order == (0, 1, 2, 3) and found.heads == sizes[1] else _BLOCKS


def _whole(groups: Sequence[int], heads: int, batch: int, blocks: int) -> bool:
    """Whether these can only be sequences and heads, each with fewer queries than tokens."""
    if tuple(groups) == (batch, heads):
        return blocks != heads
    return prod(groups) == batch * heads and len(groups) == 1 and heads % blocks != 0


def _blocks(queries: int, keys: int, lengths: Sequence[int]) -> int:
    """Into how many blocks the owner may have cut its sequence; 1 if these rows are no blocks.

    Rows of blocks are as many as no input has tokens, and see their own block or several.
    """
    if not lengths or not queries or queries in lengths or keys % queries:
        return 1
    return -(-lengths[0] // queries)


def _grouped_blocks(
    groups: list[int],
    sizes: Sequence[int],
    heads: int,
    batch: int,
    blocks: int,
    last: tuple[int, ...],
) -> Arranged | str:
    """Find the heads beside blocks, which count as sequences, where only one reading fits."""
    wide = [n for n in groups if sizes[n] != 1]
    factors = {"b": batch, "h": heads, "w": blocks}
    left = tuple(name for name, size in factors.items() if size != 1)
    at = set(_readings([sizes[n] for n in wide], factors, left))
    if len(at) != 1:
        return _BLOCKS
    (where,) = at
    inner = [] if where is None else [wide[where]]
    order = (*(n for n in groups if n not in inner), *inner, *last)
    return Arranged(order=order, batch=batch * blocks, heads=heads)


def _readings(
    sizes: Sequence[int], factors: dict[str, int], left: tuple[str, ...], at: int = 0
) -> Iterator[int | None]:
    """Position of the axis that holds the heads, alone or within the batch, for each reading."""
    if not sizes:
        if not left:
            yield None
        return
    for label in ("b", "h", "w", "bw", "bh"):
        if set(label) <= set(left) and prod(factors[name] for name in label) == sizes[0]:
            rest = tuple(name for name in left if name not in label)
            for found in _readings(sizes[1:], factors, rest, at + 1):
                yield at if "h" in label else found


def _queries_among(
    axes: list[int], sizes: Sequence[int], keys: int, heads: int | None
) -> list[int]:
    wide = [n for n in axes if sizes[n] != 1]
    if len(wide) < 2:
        return wide or axes[:1]
    # In self-attention there are as many queries as keys.
    square = [n for n in wide if sizes[n] == keys]
    if len(square) == 1:
        return square
    others = [n for n in wide if sizes[n] != heads]
    return others if len(others) == 1 else wide


def _grouped(
    groups: list[int],
    sizes: Sequence[int],
    heads: int | None,
    batch: int | None,
    last: tuple[int, ...],
) -> Arranged | str:
    """Split the axes that are neither query nor key into batch and heads.

    Windows (of tokens that only see each other) count as further sequences.
    """
    total = prod(sizes[n] for n in groups)
    if not groups:
        return Arranged(order=last, batch=1, heads=1)
    if len(groups) == 1:
        b, h = _unfold(total, heads, batch)
        return Arranged(order=(*groups, *last), batch=b, heads=h)
    if len(groups) == 2:
        first, second = groups
        a, b = sizes[first], sizes[second]
        if batch is None:
            swapped = heads is not None and a == heads != b
        else:
            swapped = a != batch and b == batch and (heads is None or a == heads)
        if swapped:
            return Arranged(order=(second, first, *last), batch=b, heads=a)
        windowed = batch is not None and heads is not None and a == batch * heads
        if windowed and b == heads:
            return _UNCLEAR
        if batch in (None, a) or (a % batch == 0 and heads in (None, b) and not windowed):
            return Arranged(order=(*groups, *last), batch=a, heads=b)
    if heads is not None:
        for cut in range(len(groups) + 1) if len(groups) > 2 or batch == 1 else ():
            if prod(sizes[n] for n in groups[cut:]) == heads:
                return Arranged(order=(*groups, *last), batch=total // heads, heads=heads)
        folded = [n for n in groups if batch is not None and sizes[n] == batch * heads]
        if len(folded) == 1:
            windows = [n for n in groups if n not in folded]
            order = (*windows, *folded, *last)
            return Arranged(order=order, batch=total // heads, heads=heads)
    if batch is not None and sizes[groups[0]] == batch:
        return Arranged(order=(*groups, *last), batch=batch, heads=total // batch)
    return _UNCLEAR


def _unfold(group: int, heads: int | None, batch: int | None) -> tuple[int, int]:
    """Split one axis of batch x heads; without any knowledge it is a batch of single heads."""
    if heads is not None and batch is not None and group == heads * batch:
        return batch, heads
    if batch is not None and group == batch:
        return batch, 1
    if heads is not None and group % heads == 0:
        return group // heads, heads
    if batch is not None and group % batch == 0:
        return batch, group // batch
    return group, 1
