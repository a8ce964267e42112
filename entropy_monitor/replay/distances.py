"""How far apart attention heads are, under each convention, and what clusters that gives.

For the rows of all heads at one query on their common support, ``p = (s, (1-s) pi)``: cosine
distance, Jensen-Shannon divergence (nats) and Euclidean distance, with the sink kept (on p) and
dropped (on pi); and the Aitchison distance of the content, which is the same either way
(Papamichalis and Ruane, arXiv 2608.14712).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

METRICS = ("cosine", "jensen_shannon", "euclid", "aitchison_content")
CONVENTIONS = ("kept", "dropped")

_JS_BLOCK = 1 << 22  # numbers at once in the one distance that is no product of matrices

Matrix = Float[Tensor, "heads heads"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of all heads at one query, on the common support.

    Attributes:
        content: Logits of the content keys, float64.
        sink: Log-sum-exp of the sink logits.
    """

    content: Float[Tensor, "heads content"]
    sink: Float[Tensor, " heads"]

    @property
    def log_odds(self) -> Float[Tensor, " heads"]:
        """Z = LSE_S - LSE_C."""
        return self.sink - self.content.logsumexp(-1)

    @property
    def sink_mass(self) -> Float[Tensor, " heads"]:
        """S of every head."""
        return torch.sigmoid(self.log_odds)

    def with_sink_mass(self, mass: float) -> "Rows":
        """The same content with another sink mass in every head."""
        odds = float(np.log(mass) - np.log1p(-mass)) if mass > 0 else -np.inf
        return Rows(content=self.content, sink=self.content.logsumexp(-1) + odds)


def common_rows(
    logits: Float[Tensor, "heads keys"], sink: Bool[Tensor, " keys"], *, least: int = 3
) -> Rows | None:
    """Restrict rows of one query to the keys that every head may see.

    Args:
        logits: -inf where a head may not look.
        sink: Which keys are the sink.
        least: Fewest content keys of a row worth comparing.

    Returns:
        The rows; None if no sink key or too few content keys are in the common support.
    """
    common = torch.isfinite(logits).all(0)
    content = common & ~sink
    if not bool((common & sink).any()) or int(content.sum()) < least:
        return None
    wide = logits.double()
    return Rows(content=wide[:, content], sink=wide[:, common & sink].logsumexp(-1))


def pairwise(rows: Rows, convention: str) -> dict[str, Matrix]:
    """Return the distances between all heads at one query.

    Args:
        rows: The rows of all heads.
        convention: ``kept`` or ``dropped``.

    Returns:
        Metric name to a symmetric matrix with zeros on the diagonal. ``aitchison_content`` is
        computed from the log probabilities of the convention, not copied, so that its agreement is
        a finding.

    Example:
        >>> import math
        >>> rows = [[.90, .08, .02], [.70, .24, .06], [.90, .02, .08]]
        >>> p = torch.tensor(rows, dtype=torch.float64).log()
        >>> rows = Rows(content=p[:, 1:], sink=p[:, 0])
        >>> kept, dropped = pairwise(rows, "kept"), pairwise(rows, "dropped")
        >>> [bool(d["cosine"][0, 1] < d["cosine"][0, 2]) for d in (kept, dropped)]
        [False, True]
        >>> [round(float(d["aitchison_content"][0, 2]), 3) for d in (kept, dropped)]
        [1.961, 1.961]
    """
    log_pi = rows.content.log_softmax(-1)
    if convention == "dropped":
        log_p, content = log_pi, log_pi
    else:
        odds = rows.log_odds[:, None]
        content = log_pi + torch.nn.functional.logsigmoid(-odds)
        log_p = torch.cat([torch.nn.functional.logsigmoid(odds), content], dim=-1)
    p = log_p.exp()
    clr = content - content.mean(-1, keepdim=True)
    return {
        "cosine": _cosine(p),
        "jensen_shannon": _jensen_shannon(p),
        "euclid": _euclid(p),
        "aitchison_content": _euclid(clr),
    }


def _cosine(p: Float[Tensor, "heads keys"]) -> Matrix:
    unit = p / p.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    # half the squared chord: 1 - cos without the cancellation that would decide verdicts between
    # near-equal rows
    return 0.5 * _euclid(unit) ** 2


def _euclid(x: Float[Tensor, "heads keys"]) -> Matrix:
    return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")


def _jensen_shannon(p: Float[Tensor, "heads keys"]) -> Matrix:
    heads, keys = p.shape
    entropy = -torch.xlogy(p, p).sum(-1)
    result = torch.zeros(heads, heads, dtype=p.dtype, device=p.device)
    first, second = torch.triu_indices(heads, heads, offset=1, device=p.device)
    step = max(1, _JS_BLOCK // keys)
    for start in range(0, len(first), step):
        i, j = first[start : start + step], second[start : start + step]
        middle = 0.5 * (p[i] + p[j])
        value = -torch.xlogy(middle, middle).sum(-1) - 0.5 * (entropy[i] + entropy[j])
        result[i, j] = value.clamp(min=0.0)
    return result + result.T


def verdicts(distance: Matrix, triples: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
    """Return for triples (a, b, c) whether b (-1) or c (+1) is nearer to a; 0 for a tie."""
    a, b, c = (torch.from_numpy(triples[:, k]) for k in range(3))
    difference = distance[a, b] - distance[a, c]
    return torch.sign(difference).to(torch.int8).numpy()


def draw_triples(heads: int, count: int, *, seed: int) -> npt.NDArray[np.int64]:
    """Draw triples of different heads.

    Example:
        >>> draw_triples(5, 2, seed=0).shape
        (2, 3)
    """
    generator = np.random.default_rng(seed)
    keys = generator.random((count, heads)) if heads <= 64 else None
    if keys is not None:
        return np.argsort(keys, axis=1)[:, :3].astype(np.int64)
    return np.stack([generator.choice(heads, 3, replace=False) for _ in range(count)]).astype(
        np.int64
    )


def average_linkage(distance: npt.NDArray[np.float64], clusters: int) -> npt.NDArray[np.int64]:
    """Cluster by average linkage (UPGMA), as head taxonomies do.

    Args:
        distance: Symmetric matrix.
        clusters: Clusters to stop at.

    Returns:
        Cluster numbers, in order of first appearance.
    """
    work = np.array(distance, dtype=np.float64)
    np.fill_diagonal(work, np.inf)
    size = np.ones(len(work))
    label = np.arange(len(work))
    for _ in range(len(work) - clusters):
        i, j = sorted(np.unravel_index(int(work.argmin()), work.shape))
        merged = (size[i] * work[i] + size[j] * work[j]) / (size[i] + size[j])
        work[i], work[:, i] = merged, merged
        work[i, i] = np.inf
        work[j], work[:, j] = np.inf, np.inf
        size[i] += size[j]
        label[label == j] = i
    _, first = np.unique(label, return_index=True)
    order = {label[position]: number for number, position in enumerate(np.sort(first))}
    return np.array([order[value] for value in label], dtype=np.int64)


def adjusted_rand(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Agreement of two clusterings: 1 the same, 0 as by chance (Hubert and Arabie, 1985).

    Example:
        >>> a = np.array([0, 0, 1, 1])
        >>> adjusted_rand(a, 1 - a), round(adjusted_rand(a, np.array([0, 1, 0, 1])), 2)
        (1.0, -0.5)
    """
    _, i = np.unique(first, return_inverse=True)
    _, j = np.unique(second, return_inverse=True)
    table = np.zeros((i.max() + 1, j.max() + 1))
    np.add.at(table, (i, j), 1)

    def pairs(counts: npt.NDArray[Any]) -> float:
        return float((counts * (counts - 1) / 2).sum())

    both, rows, columns = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    expected = rows * columns / max(pairs(np.array([len(i)])), 1.0)
    largest = 0.5 * (rows + columns)
    return 1.0 if largest == expected else (both - expected) / (largest - expected)
