"""What one `attention_heads` tensor holds: its statistics, layers and heads, checked.

The description travels as JSON in the summary metadata and comes from a log folder that anyone may
have written, so every field is checked and bounded before it is believed. No TensorBoard, no torch.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_STATS = 256
MAX_NAME = 512
MAX_METADATA = 4 << 20
MAX_VALUES = 1 << 26
"""Values of one tensor, 256 MiB as float32: more than TensorBoard can hand out in one answer."""


class LayoutError(ValueError):
    """The description of a tensor is not one of ours, or is out of bounds."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One attention layer.

    Attributes:
        name: Qualified name of the owning module; a second call in one forward ends in ``#1``.
        heads: Number of query heads.
    """

    name: str
    heads: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The axes of a tensor ``[stat, layer, head]``.

    Attributes:
        stats: Name of each line of the first axis.
        layers: Layers in the order of the second axis; the third is as long as the largest one.
    """

    stats: tuple[str, ...]
    layers: tuple[Layer, ...]

    @property
    def heads(self) -> int:
        """Heads of all layers together."""
        return sum(layer.heads for layer in self.layers)

    @property
    def max_heads(self) -> int:
        """Heads of the largest layer."""
        return max((layer.heads for layer in self.layers), default=0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape a tensor must have."""
        return len(self.stats), len(self.layers), self.max_heads

    @cached_property
    def mask(self) -> npt.NDArray[np.bool_]:
        """``(layers, max_heads)``, True where a head exists; picks heads in layer order."""
        counts = np.array([layer.heads for layer in self.layers], dtype=np.int64)
        mask: npt.NDArray[np.bool_] = np.arange(self.max_heads) < counts[:, None]
        return mask

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Where each layer's heads begin on the compact axis, then the end of the last."""
        return np.concatenate([[0], np.cumsum([layer.heads for layer in self.layers])]).astype(
            np.int64
        )

    def head(self, layer: int, head: int) -> int:
        """Return a head's place on the compact axis.

        Raises:
            LayoutError: If there is no such head.
        """
        if not 0 <= layer < len(self.layers):
            raise LayoutError(f"`layer` must be in [0, {len(self.layers)}), got {layer}.")
        if not 0 <= head < self.layers[layer].heads:
            raise LayoutError(f"`head` must be in [0, {self.layers[layer].heads}), got {head}.")
        return int(self.starts[layer]) + head

    def layer_means(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Average ``(..., heads)`` within each layer, over the heads that have a value.

        Returns:
            ``(..., layers)`` in float64, NaN where a layer has no value.
        """
        if not self.layers:
            return np.zeros((*values.shape[:-1], 0))
        finite = np.isfinite(values)
        edges = self.starts[:-1]
        sums = np.add.reduceat(np.where(finite, values, 0.0), edges, axis=-1, dtype=np.float64)
        counts = np.add.reduceat(finite, edges, axis=-1, dtype=np.int64)
        means: npt.NDArray[np.float64] = np.divide(
            sums, counts, out=np.full(sums.shape, math.nan), where=counts > 0
        )
        return means


def parse_layout(content: bytes) -> Layout:
    """Read the description of a tensor out of its metadata.

    Args:
        content: JSON ``{"version": 1, "stats": [...], "layers": [{"name", "heads"}]}``.

    Raises:
        LayoutError: If it is not that, or names nothing, or more than the bounds allow.

    Example:
        >>> content = {"version": 1, "stats": ["s"], "layers": [{"name": "a", "heads": 2}]}
        >>> parse_layout(json.dumps(content).encode()).shape
        (1, 1, 2)
    """
    if len(content) > MAX_METADATA:
        raise LayoutError(f"The metadata has {len(content)} bytes, more than {MAX_METADATA}.")
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LayoutError("The metadata is not JSON.") from error
    if not isinstance(raw, dict) or raw.get("version") != 1:
        raise LayoutError("The metadata is not of version 1, the only one this version reads.")
    stats, layers = raw.get("stats"), raw.get("layers")
    if not isinstance(stats, list) or not 0 < len(stats) <= MAX_STATS:
        raise LayoutError(f"`stats` must be a list of 1 to {MAX_STATS} names.")
    if not isinstance(layers, list) or not 0 < len(layers) <= MAX_LAYERS:
        raise LayoutError(f"`layers` must be a list of 1 to {MAX_LAYERS} layers.")
    if len({_name(stat) for stat in stats}) != len(stats):
        raise LayoutError("`stats` names a statistic twice.")
    layout = Layout(stats=tuple(map(_name, stats)), layers=tuple(map(_layer, layers)))
    if math.prod(layout.shape) > MAX_VALUES:
        raise LayoutError(f"A tensor of shape {layout.shape} is too large.")
    return layout


def _name(value: object) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_NAME:
        raise LayoutError(f"A name must be a text of 1 to {MAX_NAME} characters.")
    # A lone surrogate can be written in JSON but not sent on as UTF-8.
    return value.encode("utf-8", "replace").decode("utf-8")


def _layer(value: object) -> Layer:
    if not isinstance(value, dict):
        raise LayoutError("A layer must be an object with `name` and `heads`.")
    heads = value.get("heads")
    if isinstance(heads, bool) or not isinstance(heads, int) or not 0 < heads <= MAX_HEADS:
        raise LayoutError(f"`heads` of a layer must be in [1, {MAX_HEADS}].")
    return Layer(name=_name(value.get("name")), heads=heads)
