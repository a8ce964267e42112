"""`AttentionMonitor`: measures around a forward pass and hands out snapshots. Knows no host.

A monitor never harms a run: an error of its own switches it off with one warning, and nothing stays
installed after a window, an exception or Ctrl-C. It never silently measures nothing: a first window
without attention says what was looked for.
"""

import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from entropy_monitor.autosink import AutoSink
from entropy_monitor.calls import AttentionCall, select_rows
from entropy_monitor.capture import CaptureReport, CaptureSession
from entropy_monitor.capture.owners import head_count
from entropy_monitor.capture.quiet import recording
from entropy_monitor.distributed import HeadPart, Ranks, head_part, world
from entropy_monitor.pipeline import warn_once
from entropy_monitor.snapshot import HeadSums, RowValues, Snapshot, collect, row_values
from entropy_monitor.statistics import measure_call

Sink = str | int | Sequence[int] | Mapping[str, Sequence[int]]

_NAMED_SINKS = ("first", "none", "learned", "auto")


class AttentionMonitor:
    """Measures the attention of any model while it runs its own forward pass.

    The model is not changed, fused kernels stay fused, and its results are the same bit for bit.

    Args:
        model: The model, or any module that contains it.
        sink: Which keys are the sink: ``"first"`` (the first key a row may see, if its document
            starts there), key positions (negative ones count from the end), ``{"token_ids":
            [...]}`` (needs ``input_ids`` in `observe`), ``"learned"`` (only a model's own sink
            logits), ``"none"``, or ``"auto"``: measures with ``"first"``, finds the keys that hold
            more than 0.3 of the attention of a head, and proposes them in `proposed_sink`.
        rows: Rows measured per sequence beyond the first 16, drawn evenly; None measures every row.
        layers: Shell patterns of layer names to measure; None measures all.
        attention_modules: Shell pattern of the class names of attention modules, for models whose
            classes are not named so; only used to say what was not seen.
        keep_rows: Keep per-row values, so that two snapshots of the same batch are compared row by
            row.
        head_group: With tensor parallelism, the ranks that share the heads of a layer: a process
            group or a one-dimensional device mesh, in the order of their heads. ``"auto"`` finds
            those of ``parallelize_module``; None says that every rank sees all heads.
        on_error: ``"warn"`` switches the monitor off with one warning on an error of its own,
            ``"raise"`` raises it after the forward pass.

    Raises:
        ValueError: If an argument has a value that is not allowed.
        TypeError: If ``model`` is not a module.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> monitor = AttentionMonitor(layer)
        >>> with monitor.observe(step=0):
        ...     out = layer(torch.zeros(2, 8, 16))
        >>> snapshot = monitor.snapshot()
        >>> snapshot.layers
        ('self_attn',)
        >>> round(snapshot.mean("content_evenness"), 3)  # equal keys: attention is uniform
        1.0
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sink: Sink = "first",
        rows: int | None = 64,
        layers: str | Sequence[str] | None = None,
        attention_modules: str | None = None,
        keep_rows: bool = False,
        head_group: Any = "auto",
        on_error: str = "warn",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module; got {type(model).__name__}.")
        check_options(sink=sink, rows=rows, on_error=on_error)
        check_patterns(layers, attention_modules)
        self.model = model
        self.enabled = True
        self.report: CaptureReport | None = None
        self.ranks = Ranks()
        self._sink = sink
        self._auto = AutoSink() if sink == "auto" else None
        self._rows = rows
        self._patterns = (layers,) if isinstance(layers, str) else layers
        self._keep_rows = keep_rows
        self._on_error = on_error
        self._session = CaptureSession(model, candidates=attention_modules, on_error=on_error)
        self._sums: dict[str, HeadSums] = {}
        self._row_values: dict[str, RowValues] = {}
        self._step: int | None = None
        self._head_group = head_group
        self._parts: dict[str, HeadPart] = {}
        self._world = world()
        self._sink_keys: Tensor | None = None
        self._tokens_fit = False
        self._inside = False
        positions = sink if isinstance(sink, Sequence) and not isinstance(sink, str) else [sink]
        self._absent = {p for p in positions if isinstance(p, int)}
        self._told: set[str] = set()

    @property
    def proposed_sink(self) -> tuple[int, ...] | None:
        """With ``sink="auto"``, the positions that act as sinks; None before they are settled."""
        return self._auto.positions if self._auto is not None else None

    @contextmanager
    def observe(
        self, step: int | None = None, *, input_ids: Tensor | None = None
    ) -> Iterator[None]:
        """Measure every attention computed by the model inside this block.

        Blocks of the same step add up (micro-batches); a new step, or none, starts anew. A block
        within a block of the same monitor adds nothing. If the block raises, what was measured of
        its step is dropped: a part of a forward is not a measurement, and a retry starts anew.

        Args:
            step: Optimiser step.
            input_ids: ``(batch, tokens)`` ids of the batch, needed where the sink is given by token
                ids.

        Raises:
            ValueError: If the sink is given by token ids and ``input_ids`` is missing.
        """
        if isinstance(self._sink, Mapping) and input_ids is None:
            raise ValueError(
                "`input_ids` must be the batch's token ids where the sink is given by token ids; "
                "got None."
            )
        if self._inside:
            yield  # the outer block measures this forward already
            return
        window = ExitStack()
        self._inside = True
        try:
            report = self._open(window, step, input_ids)
            yield
        except BaseException:
            self._close(window, None)  # the model's error goes on, whatever ours does
            self._sums, self._row_values = {}, {}  # a part of a step is not a measurement
            raise
        finally:
            self._inside = False
        self._close(window, report)

    def snapshot(self) -> Snapshot:
        """What was measured at the current step, on this process alone; empty if nothing was."""
        return collect(self._sums, step=self._step, rows=self._row_values)

    @property
    def shares_heads(self) -> bool:
        """Whether this process was seen to measure only a part of the heads of a layer."""
        return any(part.count > 1 for part in self._parts.values())

    def reduced_snapshot(self, step: int | None = None) -> Snapshot:
        """What was measured at the current step on all processes; every process must call it.

        Args:
            step: The step, for a process that may have measured nothing at it.

        Raises:
            ValueError: If processes measured different steps, or layers with different heads.
            RuntimeError: If a process did not come within five minutes.
        """
        return self.ranks.reduce(self._at(step), self._parts)

    def probed_snapshot(self, step: int | None = None) -> Snapshot:
        """The same where all processes measured one and the same batch with the same weights.

        There is nothing to add up then, but heads that processes share are put together.
        """
        if not self.shares_heads:
            return self._at(step)
        first = all(part.replica == 0 for part in self._parts.values())
        mine = self._at(step) if first else Snapshot(step=self._step if step is None else step)
        return self.ranks.reduce(mine, self._parts)

    def _at(self, step: int | None) -> Snapshot:
        if step is None or step == self._step:
            return self.snapshot()
        return Snapshot(step=step)

    def switch_off(self, error: BaseException) -> None:
        """Measure nothing from now on and say why once, or raise with ``on_error="raise"``."""
        self.enabled = False
        self._sums, self._row_values = {}, {}  # a part of a step is not a measurement
        if self._on_error == "raise":
            raise error
        warn_once(
            "entropy_monitor: switched off for the rest of the run by an error of its own; "
            f"training goes on ({type(error).__name__}: {error}).",
            self._told,
        )

    def _open(
        self, window: ExitStack, step: int | None, input_ids: Tensor | None
    ) -> CaptureReport | None:
        if not self.enabled or recording():
            return None
        try:
            if step is None or step != self._step:
                self._sums, self._row_values, self._step = {}, {}, step
            if self._world != world():
                self._world, self._parts = world(), {}
            self._sink_keys = self._find_tokens(input_ids)
            return window.enter_context(self._session.window(self._measure))
        except Exception as error:
            self._close(window, None)
            self.switch_off(error)
            return None

    def _close(self, window: ExitStack, report: CaptureReport | None) -> None:
        try:
            window.close()
            if report is not None:
                self.report = report
                self._finish(report)
        except Exception as error:
            self.switch_off(error)

    def _find_tokens(self, input_ids: Tensor | None) -> Tensor | None:
        if not isinstance(self._sink, Mapping) or input_ids is None:
            return None
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
            given = (
                tuple(input_ids.shape)
                if isinstance(input_ids, Tensor)
                else type(input_ids).__name__
            )
            raise ValueError(f"`input_ids` must be a tensor (batch, tokens); got {given}.")
        self._tokens_fit = False
        wanted = torch.tensor(list(self._sink["token_ids"]), device=input_ids.device)
        return torch.isin(input_ids.detach(), wanted)

    def _measure(self, call: AttentionCall) -> None:
        name = call.name
        if self._patterns is not None and not any(
            fnmatch.fnmatch(name, pattern) for pattern in self._patterns
        ):
            return
        batch, heads, queries, _ = call.shape
        device = call.device
        sums = self._sums.get(name)
        if sums is None:
            sums = self._sums[name] = HeadSums(heads, device=device)
        part = self._part(call)
        rows, weights = select_rows(
            queries,
            self._rows,
            batch=batch,
            first_slot=part.slot(sums.slots),
            slot_step=part.replicas,
        )
        measured = measure_call(call, sink=self._sink_of(call), rows=rows, weights=weights)
        sums.update(measured, weights, slot=part.slot)
        if self._keep_rows:
            kept = row_values(measured, weights)
            self._row_values[name] = _append(self._row_values.get(name), kept)
        if self._auto is not None:
            self._auto.update(measured)

    def _part(self, call: AttentionCall) -> HeadPart:
        name, heads, processes = call.name, call.shape[1], self._world[1]
        if name not in self._parts:
            module = self._session.owners.modules.get(call.owner, self.model)
            self._parts[name] = head_part(module, self._head_group)
            stated = head_count(module)
            unsure = self._parts[name].count == 1 and self._head_group == "auto"
            if unsure and _may_share(stated, heads, processes):
                warn_once(
                    f"entropy_monitor: layer {name} states {stated} heads, but {heads} were seen "
                    "on this process. If processes share the heads of a layer (tensor "
                    "parallelism), pass `head_group`, or heads of different processes are added "
                    "up; None says that they do not.",
                    self._told,
                )
        return self._parts[name]

    def _sink_of(self, call: AttentionCall) -> Any:
        keys = call.shape[3]
        if isinstance(self._sink, (int, Sequence)) and not isinstance(self._sink, str):
            # Lengths vary from batch to batch: a short one may lack a position.
            wanted = [self._sink] if isinstance(self._sink, int) else self._sink
            present = [position for position in wanted if -keys <= position < keys]
            self._absent -= set(present)
            return present or "none"
        if self._sink_keys is not None:
            # Cross-attention looks at other tokens than the ids that were given.
            fits = tuple(self._sink_keys.shape) == (call.shape[0], keys)
            self._tokens_fit = self._tokens_fit or fits
            return self._sink_keys if fits else "none"
        return "first" if self._sink == "auto" else self._sink

    def _finish(self, report: CaptureReport) -> None:
        if report.errors:
            raise report.errors[0]
        if not report.reliable:  # compiled code mixed up the names of layers
            self._sums, self._row_values = {}, {}
        if self._absent and self._sums:
            raise ValueError(
                "`sink` must hold key positions of the sequences; "
                f"got {sorted(self._absent)}, which no attention of this batch has."
            )
        self._absent = set()
        if self._sink_keys is not None and self._sums and not self._tokens_fit:
            raise ValueError(
                "`input_ids` must have the shape (batch, keys) of an attention of this forward; "
                f"got {tuple(self._sink_keys.shape)}, which fits none."
            )
        if self._auto is not None:
            self._auto.close_window()
        if not report.seen:
            warn_once(f"entropy_monitor: no attention was seen. {report.describe()}", self._told)
        elif self._patterns is not None and not self._sums:
            warn_once(
                "entropy_monitor: `layers` must match an attention layer out of "
                f"{', '.join(report.seen)}; got {', '.join(self._patterns)}.",
                self._told,
            )
        elif report.unseen or report.opaque or report.lost or not report.reliable:
            warn_once(
                f"entropy_monitor: some attention was not seen. {report.describe()}", self._told
            )


def check_options(*, sink: Any, rows: Any, on_error: Any) -> None:
    """Check the options that all front doors share.

    Raises:
        ValueError: If one has a value that is not allowed; the message names it.
    """
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(
            f"`rows` must be a number of rows >= 1 or None for every row; got {rows!r}."
        )
    if on_error not in ("warn", "raise"):
        raise ValueError(f"`on_error` must be 'warn' or 'raise'; got {on_error!r}.")
    if isinstance(sink, str):
        allowed = sink in _NAMED_SINKS
    elif isinstance(sink, Mapping):
        ids = sink.get("token_ids") if len(sink) == 1 else None
        listed = isinstance(ids, Collection) and not isinstance(ids, (str, Mapping))
        allowed = listed and bool(ids) and all(isinstance(i, int) for i in ids or ())
    elif isinstance(sink, Sequence):
        allowed = len(sink) > 0 and all(
            isinstance(i, int) and not isinstance(i, bool) for i in sink
        )
    else:
        allowed = isinstance(sink, int) and not isinstance(sink, bool)
    if not allowed:
        names = ", ".join(repr(name) for name in _NAMED_SINKS)
        raise ValueError(
            f"`sink` must be one of {names}, key positions, or {{'token_ids': [...]}}; "
            f"got {sink!r}."
        )


def check_patterns(layers: Any, attention_modules: Any) -> None:
    """Check the shell patterns.

    Raises:
        ValueError: If one has a value that is not allowed; the message names it.
    """
    patterns = [layers] if isinstance(layers, str) else layers
    if patterns is not None and not (
        isinstance(patterns, Sequence)
        and len(patterns) > 0
        and all(isinstance(pattern, str) for pattern in patterns)
    ):
        raise ValueError(
            f"`layers` must be a shell pattern, a list of them, or None for all; got {layers!r}."
        )
    if attention_modules is not None and not isinstance(attention_modules, str):
        raise ValueError(
            "`attention_modules` must be a shell pattern of class names or None; "
            f"got {attention_modules!r}."
        )


def _may_share(stated: int | None, seen: int, processes: int) -> bool:
    """Whether `processes` processes could each compute `seen` of `stated` heads."""
    if stated is None or stated <= seen or stated % seen:
        return False
    return processes % (stated // seen) == 0


def _append(before: RowValues | None, new: RowValues) -> RowValues:
    if before is None:
        return new
    import numpy as np

    return RowValues(
        **{
            key: np.concatenate([value, vars(new)[key]], axis=0)
            for key, value in vars(before).items()
        }
    )
