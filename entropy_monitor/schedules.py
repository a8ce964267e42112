"""When to look: schedules are plain callables, step -> bool, where step is the optimiser step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[int], bool]


@dataclass(frozen=True)
class every:  # noqa: N801 - reads as the function it is used as
    """True at multiples of `n`, step 0 included.

    Raises:
        ValueError: If `n` is not positive.

    Example:
        >>> [step for step in range(10) if every(4)(step)]
        [0, 4, 8]
    """

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"`n` must be a positive number of steps, got {self.n}.")

    def __call__(self, step: int) -> bool:
        """Say whether to look at this step."""
        return step % self.n == 0


@dataclass(frozen=True, kw_only=True)
class log_spaced:  # noqa: N801 - reads as the function it is used as
    """True at step 0, 1 and then at a fixed number of steps per factor, as in ``1, 2, 4, 8 ...``.

    A sink forms early and fast; equal spacing in log(step) sees it without paying for it later.

    Args:
        per_decade: Steps per factor of ten.
        per_doubling: Steps per factor of two.

    Raises:
        ValueError: Unless exactly one of the two is given, and positive.

    Example:
        >>> [step for step in range(200) if log_spaced(per_doubling=1)(step)]
        [0, 1, 2, 4, 8, 16, 32, 64, 128]
    """

    per_decade: int | None = None
    per_doubling: int | None = None

    def __post_init__(self) -> None:
        if (self.per_decade is None) == (self.per_doubling is None):
            raise ValueError("Exactly one of `per_decade` and `per_doubling` must be given.")
        count = self.per_doubling if self.per_decade is None else self.per_decade
        if count is None or count < 1:
            raise ValueError(f"Steps per factor must be a positive number, got {count}.")

    def __call__(self, step: int) -> bool:
        """Say whether to look at this step."""
        if step < 2:
            return step >= 0
        base, count = (10.0, self.per_decade) if self.per_decade else (2.0, self.per_doubling)
        assert count is not None
        # Steps are round(base^(k/count)); log and power round differently, hence the neighbours.
        nearest = round(count * math.log(step, base))
        return any(round(base ** (k / count)) == step for k in (nearest - 1, nearest, nearest + 1))


@dataclass(frozen=True, init=False)
class any_of:  # noqa: N801 - reads as the function it is used as
    """True where any of several schedules is: ``any_of(log_spaced(per_doubling=2), every(100))``.

    Example:
        >>> [step for step in range(12) if any_of(every(10), log_spaced(per_doubling=1))(step)]
        [0, 1, 2, 4, 8, 10]
    """

    schedules: tuple[Schedule, ...]

    def __init__(self, *schedules: Schedule) -> None:
        object.__setattr__(self, "schedules", schedules)

    def __call__(self, step: int) -> bool:
        """Say whether to look at this step."""
        return any(schedule(step) for schedule in self.schedules)
