"""A writer that keeps emissions in memory: for tests (ours and users') and for notebooks."""

from entropy_monitor.writers.base import Array, Emission, as_grid


class MemoryWriter:
    """Keep every emission in a list.

    Attributes:
        emissions: All emissions, oldest first.
        closed: Whether `close` was called.
    """

    def __init__(self) -> None:
        self.emissions: list[Emission] = []
        self.closed = False

    @property
    def steps(self) -> list[int]:
        """The steps seen."""
        return [emission.step for emission in self.emissions]

    def series(self, tag: str) -> list[float]:
        """Return one scalar over the emissions, NaN where it was absent."""
        return [float(emission.model.get(tag, float("nan"))) for emission in self.emissions]

    def grid(self, name: str) -> list[Array]:
        """Return one statistic of each emission as (layers, heads), NaN-padded."""
        return [as_grid(emission.stat(name), emission.layers) for emission in self.emissions]

    def write(self, emission: Emission) -> None:
        """Keep one emission."""
        self.emissions.append(emission)

    def close(self) -> None:
        """Note that the run is over."""
        self.closed = True
