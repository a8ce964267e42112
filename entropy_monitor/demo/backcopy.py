"""Bigram-Backcopy: the smallest task on which a transformer grows an attention sink.

From Guo et al., arXiv 2410.13835. A sequence starts with ``<bos>`` (or does not) and goes on with
characters drawn from the bigram statistics of a real text. After a *trigger* character the next one
is no draw: it copies the character before the trigger::

    <bos> s h e h ...      e is a trigger: what follows it is the h that stood before it

To predict well a head must look one key back from every trigger, and nowhere in particular from all
other characters, whose successor depends on themselves alone. Where there is a ``<bos>``, the head
learns to rest on it.
"""

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

DATA = "data/bigrams.json"


@dataclass(frozen=True, kw_only=True)
class Bigrams:
    """Which character follows which in a real text.

    Attributes:
        characters: The most common characters of the text, most common first; a token is an index
            into it.
        counts: How often the second character followed the first.
        source: The text.
    """

    characters: str
    counts: Int[np.ndarray, "first second"]
    source: str

    def __post_init__(self) -> None:
        size = len(self.characters)
        if self.counts.shape != (size, size):
            raise ValueError(
                f"`counts` must be {size} x {size}, a row per character; got {self.counts.shape}."
            )
        if not (self.counts.sum(axis=1) > 0).all():
            empty = self.characters[int(np.argmin(self.counts.sum(axis=1)))]
            raise ValueError(
                f"every character must be followed by some other, but nothing follows {empty!r}."
            )

    @property
    def successors(self) -> Float[np.ndarray, "first second"]:
        """The probability of the second character after the first; rows sum to one."""
        return self.counts / self.counts.sum(axis=1, keepdims=True)

    @property
    def frequencies(self) -> Float[np.ndarray, " first"]:
        """The probability of each character."""
        return self.counts.sum(axis=1) / self.counts.sum()


@functools.cache
def load_bigrams() -> Bigrams:
    """The bigrams that ship with the package: 64 characters of *Pride and Prejudice*.

    Example:
        >>> bigrams = load_bigrams()
        >>> bigrams.counts.shape, bigrams.characters[:8]
        ((64, 64), ' etaonih')
    """
    data: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath(DATA).read_text(encoding="utf-8")
    )
    return Bigrams(
        characters=data["characters"],
        counts=np.array(data["counts"], dtype=np.int64),
        source=data["source"],
    )


@dataclass(frozen=True, kw_only=True)
class Backcopy:
    """The task; draws sequences of tokens.

    Attributes:
        bos: Whether every sequence starts with the token ``<bos>``.
        length: Tokens of a sequence, ``<bos>`` included.
        triggers: Characters after which the one before them is copied.
        bigrams: Which character follows which; the ones of the package unless given.

    Raises:
        ValueError: If a trigger is not a character of the bigrams, or the length leaves nothing to
            copy.

    Example:
        >>> task = Backcopy(bos=True, length=12)
        >>> tokens = task.draw(2, seed=0)
        >>> tokens.shape, bool((tokens[:, 0] == task.bos_token).all())
        ((2, 12), True)
    """

    bos: bool
    length: int = 64
    triggers: str = "ten"
    bigrams: Bigrams | None = None

    def __post_init__(self) -> None:
        if self.length < 4:
            raise ValueError(
                f"`length` must be at least 4, to leave something to copy, got {self.length}."
            )
        unknown = sorted(set(self.triggers) - set(self.table.characters))
        if unknown:
            raise ValueError(
                f"`triggers` must be out of {self.table.characters!r}, got {unknown[0]!r}."
            )

    @property
    def table(self) -> Bigrams:
        """The bigrams in use."""
        return load_bigrams() if self.bigrams is None else self.bigrams

    @property
    def bos_token(self) -> int:
        """The token ``<bos>``; a part of both vocabularies, so that the models are alike."""
        return len(self.table.characters)

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return len(self.table.characters) + 1

    def draw(self, sequences: int, *, seed: int) -> Int[np.ndarray, "sequences length"]:
        """Draw sequences, always the same for the same seed.

        The first character comes from the frequencies of the text. A copy needs a character before
        the trigger: ``<bos>`` is never copied.
        """
        generator = np.random.default_rng(seed)
        first = np.cumsum(self.table.frequencies)
        after = np.cumsum(self.table.successors, axis=1)
        first[-1] = after[:, -1] = 1.0  # rounding must not leave a gap at the top
        is_trigger = self._is_trigger

        tokens = np.full((sequences, self.length), self.bos_token, dtype=np.int64)
        start = int(self.bos)
        tokens[:, start] = np.searchsorted(first, generator.random(sequences), side="right")
        for t in range(start + 1, self.length):
            last = tokens[:, t - 1]
            drawn = (after[last] <= generator.random(sequences)[:, None]).sum(axis=1)
            copied = tokens[:, t - 2] if t >= start + 2 else drawn
            tokens[:, t] = np.where(is_trigger[last], copied, drawn)
        return tokens

    def trigger_rows(
        self, tokens: Int[np.ndarray, "*batch length"]
    ) -> Bool[np.ndarray, "*batch length"]:
        """Queries whose successor is a copy: a trigger with a character before it."""
        rows: np.ndarray = self._is_trigger[tokens]
        rows[..., : int(self.bos) + 1] = False
        return rows

    @property
    def _is_trigger(self) -> Bool[np.ndarray, " vocabulary"]:
        is_trigger = np.zeros(self.vocabulary, dtype=bool)
        is_trigger[[self.table.characters.index(trigger) for trigger in self.triggers]] = True
        return is_trigger

    def text(self, tokens: Int[np.ndarray, " length"]) -> str:
        """A sequence as text."""
        return "".join(
            "<bos>" if token == self.bos_token else self.table.characters[token] for token in tokens
        )
