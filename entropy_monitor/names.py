"""The names of what is measured: one table that records, tags, the dashboard and `scan` share.

Nothing here needs torch, so that readers of a record and TensorBoard's plugin stay light. Entropies
are in nats, masses in [0, 1]. Every mean runs over the rows that count (at least two content keys);
see `RowKind`.
"""

from dataclasses import dataclass
from typing import Literal

ROW_KINDS = ("valid", "no_sink", "trivial", "no_content", "empty", "nonfinite")
"""Why a row counts or does not, in the order of `entropy_monitor.calls.RowKind`."""

CHANGE_NAMES = ("total", "sink", "content", "support")
"""The channels of a change of entropy; the first is the sum of the others."""

CHANGE_PREFIX = "attention_change"
STAT_PREFIX = "attention"


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One line of the table of what is measured.

    Attributes:
        name: The name in `to_dict`, tags, records and `scan`.
        formula: The quantity in the paper's letters.
        unit: ``nat``, ``mass`` (a share of attention), ``share`` (a share of rows), ``logit``,
            ``keys``, ``rows`` or ``1``.
        reduce: How rows become one value per head: a mean, a maximum or a count.
        doc: How to read it, in one sentence.
    """

    name: str
    formula: str
    unit: str
    reduce: Literal["mean", "max", "count"]
    doc: str


def _mean(name: str, formula: str, unit: str, doc: str) -> Statistic:
    return Statistic(name=name, formula=formula, unit=unit, reduce="mean", doc=doc)


STATISTICS = (
    _mean("sink_mass", "s", "mass", "Attention on the sink, over the rows that can see a sink."),
    _mean(
        "content_mass",
        "1-s",
        "mass",
        "Attention left for the content; kept on its own since 1-mean(s) loses it.",
    ),
    _mean(
        "log_odds",
        "z = LSE_S - LSE_C",
        "1",
        "Log-odds of the sink, over the rows that can see one.",
    ),
    _mean(
        "binary_entropy",
        "Hb(s)",
        "nat",
        "What the split between sink and content alone contributes to H.",
    ),
    _mean(
        "content_entropy",
        "H(pi)",
        "nat",
        "How spread attention is over the content keys, whatever the sink holds.",
    ),
    _mean("content_mass_entropy", "(1-s) H(pi)", "nat", "What the content contributes to H."),
    _mean(
        "content_evenness",
        "J = H(pi)/log m",
        "1",
        "Content entropy free of length: 1 uniform, 0 one key.",
    ),
    _mean(
        "content_concentration",
        "D = log m - H(pi)",
        "nat",
        "Distance of the content from uniform attention.",
    ),
    _mean(
        "total_entropy", "H(p)", "nat", "The entropy everyone logs: Hb + s H(sigma) + (1-s) H(pi)."
    ),
    _mean(
        "sink_entropy",
        "s H(sigma)",
        "nat",
        "What the spread among several sink keys contributes; 0 with one sink.",
    ),
    _mean(
        "dormant_rows",
        "P(s > 0.5)",
        "share",
        "Share of rows in which the sink holds most of the attention.",
    ),
    _mean(
        "one_hot_rows",
        "P(J < 0.1)",
        "share",
        "Share of rows whose content attention is almost on one key.",
    ),
    Statistic(
        name="max_logit",
        formula="max l",
        unit="logit",
        reduce="max",
        doc="Largest attention logit after scale, bias and soft-cap (the quantity of QK-clip).",
    ),
    _mean(
        "logit_spread", "std_C l", "logit", "Standard deviation of the content logits within a row."
    ),
    _mean(
        "logit_range",
        "max_C l - mean_C l",
        "logit",
        "How far the largest content logit stands out in its row.",
    ),
    _mean(
        "logit_spread_scaled",
        "std_C l / sqrt(2 log m)",
        "1",
        "Scale-free spread: near 1 the softmax starts to concentrate, above 2.5 it has collapsed.",
    ),
    _mean(
        "best_column_mass",
        "max_j mean_i p_ij",
        "mass",
        "Mass of the single best key of a sequence.",
    ),
    _mean(
        "best_column_is_sink",
        "P(argmax_j in S)",
        "share",
        "Share of sequences whose best key is a sink key: low with high mass, the sink is wrong.",
    ),
    _mean("support", "m", "keys", "Content keys a row may see."),
    _mean("log_support", "log m", "nat", "Entropy of uniform content attention."),
    _mean(
        "content_mass_log_support",
        "(1-s) log m",
        "nat",
        "What uniform content would contribute to H: tells length from attention.",
    ),
    *(
        Statistic(name=f"rows_{kind}", formula=f"#{kind}", unit="rows", reduce="count", doc=doc)
        for kind, doc in (
            ("valid", "Rows with a sink and at least two content keys."),
            (
                "no_sink",
                "Rows whose mask hides the sink (a sliding window): s = 0 by structure, H(pi) = H.",
            ),
            ("trivial", "Rows with one content key: H(pi) = 0 by construction, not averaged."),
            ("no_content", "Rows that see the sink alone, such as the first causal row."),
            ("empty", "Rows that see nothing, or whose query is padding."),
            ("nonfinite", "Rows with a NaN or +inf logit: the model has overflowed."),
        )
    ),
)
"""The table of what is measured."""

STAT_NAMES = tuple(statistic.name for statistic in STATISTICS)

ATTRIBUTION_NAMES = (
    "sink_term",
    "content_mass",
    "content_mass_entropy",
    "content_mass_log_support",
)
"""The four means an attribution needs; sink_term = Hb + s H(sigma), so that H = sink_term + (1-s)
H(pi)."""

COVARIANCE_PAIRS = tuple(
    (first, second) for i, first in enumerate(ATTRIBUTION_NAMES) for second in ATTRIBUTION_NAMES[i:]
)
"""The order in which the ten covariances of those means are stored."""

CHANGE_STAT_NAMES = tuple(f"change_{name}" for name in CHANGE_NAMES)
"""Names of the change channels where they stand beside the statistics in one tensor."""


def check_statistics(names: object, *, argument: str = "stats") -> tuple[str, ...]:
    """Return statistic names as a tuple, or say which one does not exist.

    Args:
        names: Names from `STAT_NAMES`.
        argument: The name of the argument to blame.

    Raises:
        ValueError: If a name is unknown.

    Example:
        >>> check_statistics(["sink_mass"])
        ('sink_mass',)
    """
    chosen = (names,) if isinstance(names, str) else tuple(names)  # type: ignore[arg-type]
    unknown = [name for name in chosen if name not in STAT_NAMES]
    if unknown:
        raise ValueError(
            f"`{argument}` must be names out of {', '.join(STAT_NAMES)}; got {unknown[0]!r}."
        )
    return chosen
