"""TensorBoard: scalars for the native boards, one tensor per step for the Attention tab.

    attention/<stat>                 scalar of the model
    attention/<stat>/<layer>         scalar of a layer
    attention_change/<channel>       scalar, since the baseline
    attention_heads                  float32 [stat, layer, head], NaN-padded; layout in its metadata
    attention/alerts                 scalar, alerts raised so far
    attention_alerts                 text, what was raised at a step
    attention_alerts_json            text tensor for the tab, everything raised so far

All heads as scalars would cost 2.3 s and 64,000 tags per step for 100 layers x 128 heads; the
tensor costs milliseconds. Scalars go out in one event per step.
"""

import json
import logging
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import numpy as np

from entropy_monitor.alerts.alert import Alert
from entropy_monitor.names import (
    CHANGE_NAMES,
    CHANGE_PREFIX,
    CHANGE_STAT_NAMES,
    STAT_PREFIX,
    STATISTICS,
    check_statistics,
)
from entropy_monitor.writers import crc32c
from entropy_monitor.writers.base import Emission, as_grid, clean_tag, clean_tags
from entropy_monitor.writers.heatmap import encode_png, heatmap

PLUGIN_NAME = "entropy_monitor"
HEADS_TAG = "attention_heads"
SINCE_NAME = "change_since"
"""Last line of the tensor: the step that the change counts from, the same for every head."""

ALERTS_TEXT_TAG = "attention_alerts"
ALERTS_JSON_TAG = "attention_alerts_json"
ALERTS_COUNT_TAG = f"{STAT_PREFIX}/alerts"
METADATA_VERSION = 1

MAX_SCALAR_TAGS = 512
"""TensorBoard's page slows down beyond; the Attention tab shows every head without a scalar."""

_log = logging.getLogger("entropy_monitor")

_MAX_ALERTS = 500
_FAST_CHECKSUM_FROM = 1 << 15
_UNITS = {statistic.name: statistic.unit for statistic in STATISTICS}


class TooManyTagsError(ValueError):
    """More scalar tags were asked for than TensorBoard's page can show."""


class TensorBoardWriter:
    """Write emissions through a SummaryWriter.

    Args:
        target: A `torch.utils.tensorboard.SummaryWriter`, best the logger's own (a second one in
            the same folder loses data), or a folder to open one in.
        layers: Layers that get scalars of their own: None for all as long as there are no more than
            512 tags (more are left out with one warning), or names.
        scalars: Whether to write scalars; False where the host logs them itself.
        tab: Whether to write what the Attention tab shows; one monitor of a run does.
        images: Statistics to draw as heat maps (layers x heads) in the Images tab; none by default.
        histograms: Statistics to write as histograms over heads; none by default.
        custom_scalars: Whether to write the layout of the Custom Scalars tab. TensorBoard keeps one
            layout per run: who has an own one passes False and merges `custom_scalars_layout()`
            into it.
        alerts: Alerts of an earlier part of a resumed run.

    Raises:
        ValueError: If a statistic does not exist.
        TooManyTagsError: From `write`, if `layers` was given and still asks for more than 512
            scalar tags.
        ImportError: If `target` is a folder and tensorboard is not installed.
    """

    def __init__(
        self,
        target: Any,
        *,
        layers: Sequence[str] | None = None,
        scalars: bool = True,
        tab: bool = True,
        images: Iterable[str] = (),
        histograms: Iterable[str] = (),
        custom_scalars: bool = True,
        alerts: Sequence[Alert] = (),
    ) -> None:
        self.layers = None if layers is None else tuple(layers)
        self.scalars = scalars
        self.tab = tab
        self.images = check_statistics(images, argument="images")
        self.histograms = check_statistics(histograms, argument="histograms")
        self._owned = isinstance(target, (str, os.PathLike))
        self.summary_writer = _open(target) if self._owned else target
        self._layout_pending = custom_scalars and tab
        self._alerts = list(alerts)
        self._count = len(self._alerts)
        self._ranges: dict[str, tuple[float, float]] = {}
        self._warned: set[str] = set()

    def write(self, emission: Emission) -> None:
        """Write one emission; flushed at once if something was raised."""
        self._alerts = (self._alerts + list(emission.alerts))[-_MAX_ALERTS:]
        self._count += len(emission.alerts)
        if self._layout_pending:
            self.summary_writer.add_custom_scalars(custom_scalars_layout())
            self._layout_pending = False
        scalars = self._scalars(emission) if self.scalars else {}
        if hasattr(self.summary_writer, "_get_file_writer"):
            self._write_events(emission, scalars)
        else:  # a stand-in that only knows the public methods
            for tag, value in scalars.items():
                self.summary_writer.add_scalar(tag, value, emission.step)
        for name in self.histograms:
            values = emission.stat(name)
            finite = values[np.isfinite(values)]
            if finite.size:
                self.summary_writer.add_histogram(
                    f"{STAT_PREFIX}_heads/{name}", finite, emission.step
                )
        if emission.alerts:
            self.summary_writer.add_text(
                ALERTS_TEXT_TAG, alerts_markdown(emission.alerts), emission.step
            )
            # Default flush is every 120 s; who is alerted wants to look now, and the run may be
            # about to crash.
            self.summary_writer.flush()

    def close(self) -> None:
        """Flush, and close the SummaryWriter if this writer opened it."""
        if self.summary_writer is None:
            return
        self.summary_writer.flush()
        if self._owned:
            self.summary_writer.close()
        self.summary_writer = None

    def _scalars(self, emission: Emission) -> dict[str, float]:
        """Return the scalars to write: all, or the model's alone where layers are too many."""
        scalars = {ALERTS_COUNT_TAG: float(self._count), **clean_tags(emission.model)}
        if self.layers is not None:
            known = [name for name, _ in emission.layers]
            for name in self.layers:
                if name not in known:
                    self._warn_once(
                        f"`layers` names {name!r}, which is not among {', '.join(known)}."
                    )
            wanted = {None, *map(clean_tag, self.layers)}
            scalars = {tag: value for tag, value in scalars.items() if _layer_of(tag) in wanted}
        if len(scalars) > MAX_SCALAR_TAGS:
            advice = (
                f"{len(scalars)} scalar tags are more than the {MAX_SCALAR_TAGS} that the page of "
                f"TensorBoard bears; `layers` must name fewer of the {len(emission.layers)} "
                f"layers, such as layers=[{emission.layers[0][0]!r}]."
            )
            if self.layers is not None:
                raise TooManyTagsError(advice)
            self._warn_once(
                f"{advice} Scalars of layers are left out; the Attention tab and the record have "
                "every head."
            )
            scalars = {tag: value for tag, value in scalars.items() if _layer_of(tag) is None}
        return scalars

    def _write_events(self, emission: Emission, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto import summary_pb2

        file_writer = self.summary_writer._get_file_writer()
        if (
            file_writer is None
        ):  # torch's writer knows no other way to put a summary with our own metadata
            return
        values = [
            summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()
        ]
        values += [self._image(emission, name) for name in self.images]
        tensors = [heads_summary(emission)] if self.tab else []
        if emission.alerts and self.tab:
            tensors.append(alerts_summary(self._alerts, self._count))
        try:
            _use_fast_checksum(file_writer)
            file_writer.add_summary(summary_pb2.Summary(value=values), emission.step)
            file_writer.add_summary(summary_pb2.Summary(value=tensors), emission.step)
        except TypeError:  # tensorboardX has protocol buffers of its own
            self._warn_once(
                f"{type(self.summary_writer).__module__} cannot take tensors: the Attention tab "
                "stays empty. Install tensorboard and use its SummaryWriter."
            )
            for tag, value in scalars.items():
                self.summary_writer.add_scalar(tag, value, emission.step)

    def _image(self, emission: Emission, name: str) -> Any:
        """Draw one statistic; the range of colours only widens, so that pictures compare."""
        from tensorboard.compat.proto import summary_pb2

        grid = as_grid(emission.stat(name), emission.layers)
        finite = grid[np.isfinite(grid)]
        low, high = self._ranges.get(name, (0.0, 1.0 if _UNITS[name] in ("mass", "share") else 0.0))
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
        self._ranges[name] = (low, high)
        pixels = heatmap(grid, low, high)
        image = summary_pb2.Summary.Image(
            height=pixels.shape[0],
            width=pixels.shape[1],
            colorspace=3,
            encoded_image_string=encode_png(pixels),
        )
        return summary_pb2.Summary.Value(tag=f"{STAT_PREFIX}_heads/{name}", image=image)

    def _warn_once(self, message: str) -> None:
        """Warn; where warnings are errors, log instead, since a warning must not end a run."""
        if message in self._warned:
            return
        self._warned.add(message)
        try:
            warnings.warn(message, stacklevel=4)
        except UserWarning:
            _log.warning(message)


def heads_summary(emission: Emission) -> Any:
    """Return all heads as a `Summary.Value`: float32 [stat, layer, head] with our metadata."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

    # The change has its lines from the first step on, since TensorBoard keeps the metadata of the
    # first event of a tag.
    names = (*emission.stat_names, *CHANGE_STAT_NAMES, SINCE_NAME)
    values = np.full((len(names), emission.stats.shape[1]), np.nan, dtype="<f4")
    values[: len(emission.stat_names)] = emission.stats
    if emission.change is not None:
        values[len(emission.stat_names) : -1] = emission.change
        # In every tensor, since a loader may drop the one in which the baseline began.
        values[-1] = _or_nan(emission.summary.get("baseline_step"))
    grid = as_grid(values, emission.layers)
    layout = {
        "version": METADATA_VERSION,
        "stats": list(names),
        "layers": [{"name": name, "heads": heads} for name, heads in emission.layers],
        "changes": list(CHANGE_NAMES),
    }
    shape = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in grid.shape]
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_FLOAT,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=shape),
        tensor_content=grid.tobytes(),
    )
    return summary_pb2.Summary.Value(
        tag=HEADS_TAG, tensor=tensor, metadata=_metadata(layout, "every head, every step")
    )


def _or_nan(step: int | None) -> float:
    return math.nan if step is None else float(step)


def alerts_summary(alerts: Sequence[Alert], count: int) -> Any:
    """Return alerts so far as a `Summary.Value`: JSON ``{"version", "count", "alerts": []}``."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

    content = {
        "version": METADATA_VERSION,
        "count": count,
        "alerts": [alert.to_dict() for alert in alerts],
    }
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING,
        tensor_shape=tensor_shape_pb2.TensorShapeProto(),
        string_val=[json.dumps(content, default=float).encode()],
    )
    metadata = _metadata(
        {"version": METADATA_VERSION, "kind": "alerts"}, "alerts so far, newest last"
    )
    return summary_pb2.Summary.Value(tag=ALERTS_JSON_TAG, tensor=tensor, metadata=metadata)


def alerts_markdown(alerts: Sequence[Alert]) -> str:
    """Return alerts as a Markdown table for the Text tab."""
    lines = ["| severity | kind | where | what |", "|---|---|---|---|"]
    for alert in alerts:
        cells = (alert.severity, alert.kind, alert.place, alert.message)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def custom_scalars_layout() -> dict[str, dict[str, list[Any]]]:
    """Return the layout of the Custom Scalars tab, to be merged with an own one.

    Example:
        >>> layout = {"loss": {"train": ["Multiline", ["loss"]]}} | custom_scalars_layout()
        >>> sorted(layout)
        ['attention', 'loss']
    """

    def lines(*tags: str) -> list[Any]:
        # Hugging Face's Trainer puts "train/" in front of every tag it logs.
        return ["Multiline", [f"^(train/)?{re.escape(tag)}$" for tag in tags]]

    stat = f"{STAT_PREFIX}/{{}}".format
    return {
        "attention": {
            "why entropy changed (nat)": lines(
                *(f"{CHANGE_PREFIX}/{name}" for name in CHANGE_NAMES)
            ),
            "entropy and its terms (nat)": lines(
                *map(stat, ("total_entropy", "binary_entropy", "content_mass_entropy"))
            ),
            "sink": lines(*map(stat, ("sink_mass", "dormant_rows"))),
            "content": lines(*map(stat, ("content_evenness", "one_hot_rows"))),
            "logits": lines(*map(stat, ("max_logit", "logit_spread", "logit_range"))),
            "alerts": lines(ALERTS_COUNT_TAG),
        }
    }


def _open(folder: str | os.PathLike[str]) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(os.fspath(folder))


def _layer_of(tag: str) -> str | None:
    """Return the layer in ``attention/<stat>/<layer>``, or None for a scalar of the model."""
    parts = tag.split("/", 2)
    return parts[2] if len(parts) == 3 else None


def _metadata(content: Mapping[str, Any], description: str) -> Any:
    from tensorboard.compat.proto import summary_pb2

    return summary_pb2.SummaryMetadata(
        plugin_data=summary_pb2.SummaryMetadata.PluginData(
            plugin_name=PLUGIN_NAME, content=json.dumps(content).encode()
        ),
        summary_description=description,
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )


def _cell(text: str) -> str:
    """Escape what Markdown or HTML would take as markup; layer names and messages are not ours."""
    for mark, safe in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("\n", " ")):
        text = text.replace(mark, safe)
    return text


def _use_fast_checksum(file_writer: Any) -> None:
    """Let this event file compute the checksum of large records by numpy; same bytes, faster.

    TensorBoard's own loop takes 0.3 s with the GIL held for 100 layers x 128 heads, which stops the
    training loop although the file is written by another thread. Private parts are touched on this
    one instance only, and if they are not what they were in TensorBoard 2.21, nothing is changed.
    """
    try:
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = file_writer.event_writer._async_writer._writer
        stream = record._writer
    except (ImportError, AttributeError):
        return
    if type(record) is not RecordWriter or "write" in vars(record) or not hasattr(stream, "write"):
        return

    def write(self: Any, data: bytes) -> None:
        if len(data) < _FAST_CHECKSUM_FROM:
            RecordWriter.write(self, data)
            return
        header = len(data).to_bytes(8, "little")
        header_crc = crc32c.masked_crc32c(header).to_bytes(4, "little")
        self._writer.write(
            header + header_crc + data + crc32c.masked_crc32c(data).to_bytes(4, "little")
        )

    record.write = MethodType(write, record)
