"""Tokens: text, code, a bag-of-tokens task that grows a sink, copying, masked text."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

import entropy_monitor

VOCABULARY = 128
BOS, MASK = 0, 1


def _bytes(text: str) -> Tensor:
    return torch.tensor(
        [min(ord(letter), VOCABULARY - 1) for letter in text if ord(letter) >= 2], dtype=torch.long
    )


def corpus(name: str) -> Tensor:
    """A long row of tokens."""
    if name == "code":
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))[:40]
        return _bytes(
            "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)[:200_000]
        )
    return _bytes(
        (Path(entropy_monitor.__file__).parent / "demo" / "data" / "sample.txt").read_text()
    )


class Stream:
    """Batches of (tokens, targets) by step: the same for a run and its twin.

    Targets of -100 do not count.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.text = corpus("text") if kind in ("text", "mixed", "masked") else None
        self.code = corpus("code") if kind in ("code", "mixed") else None

    def batch(
        self, step: int, size: int, length: int, *, held_out: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The batch of a step; `held_out` draws from the last tenth of the corpus."""
        generator = torch.Generator().manual_seed(
            self.seed * 1_000_003 + step + (500_000 if held_out else 0)
        )
        if self.kind in ("bag", "copy"):
            return getattr(self, f"_{self.kind}")(generator, size, length)
        source = (
            self.text
            if self.code is None or (self.text is not None and step % 2 == 0)
            else self.code
        )
        cut = int(0.9 * len(source))
        low, high = (cut, len(source) - length - 1) if held_out else (0, cut - length - 1)
        starts = torch.randint(low, high, (size,), generator=generator)
        rows = source[starts[:, None] + torch.arange(length + 1)]
        if self.kind != "masked":
            return rows[:, :-1], rows[:, 1:]
        tokens = rows[:, :-1].clone()
        hide = torch.rand(tokens.shape, generator=generator) < 0.15
        targets = torch.where(hide, tokens, -100)
        tokens[hide] = MASK
        return tokens, targets

    def _bag(self, generator: torch.Generator, size: int, length: int) -> tuple[Tensor, Tensor]:
        """After <bos>, letters drawn from the few that this row holds: a sink grows."""
        letters = torch.randint(2, VOCABULARY, (size, 4), generator=generator)
        pick = torch.randint(0, 4, (size, length), generator=generator)
        rows = letters.gather(1, pick)
        plain = torch.rand((size, length), generator=generator) < 0.5
        rows = torch.where(plain, torch.full_like(rows, 5), rows)
        tokens = torch.cat([torch.full((size, 1), BOS), rows[:, :-1]], dim=1)
        return tokens, rows

    def _copy(self, generator: torch.Generator, size: int, length: int) -> tuple[Tensor, Tensor]:
        """The second half repeats the first: induction heads form."""
        half = length // 2 + 1
        first = torch.randint(2, VOCABULARY, (size, half), generator=generator)
        rows = torch.cat([first, first], dim=1)[:, : length + 1]
        targets = rows[:, 1:].clone()
        targets[:, : half - 1] = -100
        return rows[:, :-1], targets
