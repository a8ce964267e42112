"""Attention that is written out: softmax over scores q k^T, whose result multiplies values.

Hugging Face's eager attention, nn.MultiheadAttention with weights, timm unfused, hand-written
modules, and F.scaled_dot_product_attention where it falls back to plain operations (dropout on a
CPU). A tensor is followed from a batched matrix product through element-wise operations and views
to a softmax, and from there to the matrix product that contracts its keys. Only then is it
attention: a router's softmax does not come from a batched product, a linear attention's does not
contract keys.

The softmax input is handed over when the values are multiplied, so it lives a little longer than it
would; if the model wrote into it in between, the call is reported as lost instead.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from entropy_monitor.calls import masked_below
from entropy_monitor.capture import layout
from entropy_monitor.capture.layout import Axes
from entropy_monitor.capture.masks import FILL_AT_MOST, Masks
from entropy_monitor.capture.seen import Found, Lost, Seen

aten = torch.ops.aten

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Found | None]
"""Called after an operation with (operation, args, kwargs, result)."""


_CONCATENATED = "scores of several products were put side by side before the softmax"
_OVERWRITTEN = "the input of the softmax was overwritten before the values were multiplied"
_CUT = "its weights were cut or filled up between the softmax and the product with the values"


@dataclass(slots=True, eq=False)
class Softmaxed:
    """The input of a softmax, kept until its result meets the values.

    Its result may meet several (the iterations of Nystrom attention): it is one attention still.
    """

    logits: Tensor | None
    axes: Axes
    version: int | None
    virtual_columns: int
    lost: str | None
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class Trace:
    """What is known of one tensor between q k^T and the product with V.

    Attributes:
        axes: Letters of its axes, see `layout`.
        softmax: None for scores, the softmax it went through for weights.
        virtual_columns: Columns appended to the keys (learned sinks); negative if put before them.
        lost: Why scores or weights can no longer be read, though attention is still computed.
        hidden: Where a constant or an added number hides scores, see `masks`.
        narrow: finfo.min of the narrowest type the scores have had.
    """

    axes: Axes
    softmax: Softmaxed | None = None
    virtual_columns: int = 0
    lost: str | None = None
    hidden: Tensor | None = None
    narrow: float = -float("inf")


class SoftmaxWay:
    """Follows scores through operations; one per hub, forgets everything when a window closes."""

    def __init__(self) -> None:
        self._traces: dict[int, tuple[weakref.ref[Tensor], Trace]] = {}
        self._masks = Masks()
        self._handlers: dict[Any, Handler] = {
            aten.bmm.default: self._product,
            aten.mm.default: self._product,
            aten.baddbmm.default: self._biased_product,
            aten._softmax.default: self._softmax,
            aten._safe_softmax.default: self._softmax,
            aten._masked_softmax.default: self._masked_softmax,
            aten.cat.default: self._cat,
            aten.add.Tensor: self._add,
            aten.add_.Tensor: self._add,
            aten.sub.Tensor: self._subtract,
            aten.sub_.Tensor: self._subtract,
            aten.masked_fill.Scalar: self._fill,
            aten.masked_fill.Tensor: self._fill,
            aten.masked_fill_.Scalar: self._fill,
            aten.masked_fill_.Tensor: self._fill,
            aten.where.self: self._where,
            aten.where.ScalarOther: self._where,
            aten.where.ScalarSelf: self._where,
            aten._to_copy.default: self._pointwise,
            aten.native_dropout.default: self._dropout,
            aten.constant_pad_nd.default: self._pad,
            aten.convolution.default: self._convolution,
            **dict.fromkeys(_VIEWS, self._view),
        }

    def handler(self, op: Any) -> Handler | None:
        """What to call after this operation; None if it does not matter."""
        known = self._handlers.get(op)
        if known is not None:
            return known
        if torch.Tag.pointwise in getattr(op, "tags", ()):
            return self._pointwise
        return None

    def forget(self) -> None:
        """Drop everything that is followed."""
        self._traces.clear()
        self._masks.forget()

    # Following ---------------------------------------------------------------------------------

    def _get(self, value: Any) -> Trace | None:
        entry = self._traces.get(id(value))
        return entry[1] if entry is not None and entry[0]() is value else None

    def _set(self, tensor: Tensor, trace: Trace | None) -> None:
        if trace is not None and len(trace.axes) == tensor.ndim:
            self._traces[id(tensor)] = (weakref.ref(tensor), trace)

    def _sweep(self) -> None:
        if len(self._traces) > 64:
            self._traces = {n: e for n, e in self._traces.items() if e[0]() is not None}

    def _pointwise(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not self._traces or not isinstance(out, Tensor):
            return
        for value in args:
            trace = self._get(value)
            # An operand that is broadcast (a bias) says nothing about the axes of the result.
            if trace is not None and value.shape == out.shape:
                if out is not value:
                    self._set(out, self._narrowed(trace, out))
                return

    def _narrowed(self, trace: Trace, out: Tensor) -> Trace:
        if trace.softmax is not None or not out.is_floating_point():
            return trace
        lowest = torch.finfo(out.dtype).min
        return replace(trace, narrow=lowest) if lowest > trace.narrow else trace

    def _add(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._pointwise(op, args, kwargs, out)
        trace = self._get(out) if self._traces else None
        if trace is None or trace.softmax is not None:
            return
        for added, factor in zip(args[:2], (1.0, _factor(kwargs, "alpha")), strict=True):
            if isinstance(added, Tensor) and added is not out and self._get(added) is None:
                self._hide(trace, added, out, factor)

    def _subtract(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._pointwise(op, args, kwargs, out)
        trace = self._get(out) if self._traces else None
        taken = args[1]
        if trace is None or trace.softmax is not None or not isinstance(taken, Tensor):
            return
        # One number for all keys of a row, its largest score for instance, hides none of them.
        axis = trace.axes.index("k") - out.ndim if "k" in trace.axes else -1
        if taken.ndim >= -axis and taken.shape[axis] > 1 and self._get(taken) is None:
            self._hide(trace, taken, out, -_factor(kwargs, "alpha"))

    def _hide(self, trace: Trace, added: Tensor, out: Tensor, factor: float) -> None:
        """Remember where an added tensor hides scores; what is added is `factor` times it."""
        if factor != 1:
            added = added * factor
        value = self._masks.hidden_at(added)
        limit = None if value is None else value / 2
        if limit is None and added.is_floating_point() and out.is_floating_point():
            # The smallest float16 hides in its own type, but no longer in wider scores.
            floor = masked_below(added.dtype)
            limit = floor if floor > masked_below(out.dtype) else None
        if limit is not None:
            self._set(out, _hiding(trace, added <= limit, out))

    def _view(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not self._traces:
            return
        trace = self._get(args[0])
        if trace is None or not isinstance(out, Tensor) or out is args[0]:
            return
        axes = _VIEWS[op](trace.axes, args, out)
        if axes is not None:
            hidden = trace.hidden
            if hidden is not None and trace.softmax is None:
                hidden = _viewed(op, hidden, args, out)
            if axes != trace.axes or hidden is not trace.hidden:
                trace = replace(trace, axes=axes, hidden=hidden)
            self._set(out, trace)

    def _dropout(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._pointwise(op, args, kwargs, out[0])

    def _fill(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        trace = self._get(args[0])
        if trace is not None and out.shape == args[0].shape:
            self._set(out, _filled(trace, args[1], args[2], out))

    def _where(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        shown = args[0]
        for value, other, hides in ((args[1], args[2], False), (args[2], args[1], True)):
            trace = self._get(value)
            if trace is not None and value.shape == out.shape:
                if _constant(other) is not None:
                    trace = _filled(trace, shown if hides else ~shown, other, out)
                self._set(out, trace)
                return

    def _cat(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if not self._traces:
            return
        parts = args[0]
        axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        traced = [n for n, part in enumerate(parts) if self._get(part) is not None]
        if not traced:
            return
        scores, trace = parts[traced[0]], self._get(parts[traced[0]])
        assert trace is not None
        if trace.softmax is not None or trace.axes[axis] != "k":
            return
        if len(traced) > 1:
            self._set(out, replace(trace, lost=_CONCATENATED))
        elif len(parts) == 2 and not trace.virtual_columns:
            more = out.shape[axis] - scores.shape[axis]
            self._set(out, replace(trace, virtual_columns=-more if traced[0] else more))

    def _pad(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        # Weights of real keys padded with zeros, or scores padded with a mask: axes stay, but the
        # padded columns would count as keys where nothing masks them.
        trace = self._get(args[0])
        if trace is not None and trace.softmax is not None:
            self._set(out, trace)

    def _convolution(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        # Talking heads: a 1 x 1 convolution mixes the heads and leaves queries and keys alone.
        trace = self._get(args[0])
        if (
            trace is not None
            and out.shape[2:] == args[0].shape[2:]
            and args[1].shape[2:].numel() == 1
        ):
            self._set(out, trace)

    # The three events ---------------------------------------------------------------------------

    def _product(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Found | None:
        first, second = args[0], args[1]
        if self._traces:
            for operand, axis in ((first, -1), (second, -2)):
                trace = self._get(operand)
                if trace is not None and trace.softmax is not None and trace.axes[axis] == "k":
                    return _take(trace.softmax, operand.shape[axis])
        # A linear layer is a plain product with a parameter; scores are not.
        if op is aten.mm.default and (_is_parameter(first) or _is_parameter(second)):
            return None
        self._start(out)
        return None

    def _biased_product(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> Found | None:
        found = self._product(op, args[1:], kwargs, out)
        trace = self._get(out)
        if trace is not None and trace.softmax is None and _factor(kwargs, "beta"):
            self._hide(trace, args[0], out, _factor(kwargs, "beta"))
        return found

    def _start(self, out: Tensor) -> None:
        self._sweep()
        axes: Axes = ("g", "q", "k") if out.ndim == 3 else ("q", "k")
        narrow = torch.finfo(out.dtype).min if out.is_floating_point() else -float("inf")
        self._set(out, Trace(axes=axes, narrow=narrow))

    def _softmax(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        self._weigh(args[0], args[0], args[1], out)

    def _masked_softmax(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        scores, hidden = args[0], args[1]
        axis = args[2] if len(args) > 2 and args[2] is not None else -1
        if self._get(scores) is not None and hidden.ndim <= scores.ndim:
            if hidden.ndim == 2 and scores.ndim == 4 and hidden.shape[0] == scores.shape[0]:
                hidden = hidden[:, None, None, :]
            self._weigh(scores, scores.masked_fill(hidden.bool(), -torch.inf), axis, out)

    def _weigh(self, scores: Tensor, logits: Tensor, axis: int, out: Tensor) -> None:
        trace = self._get(scores)
        if trace is None or trace.softmax is not None:
            return
        axis %= scores.ndim
        letter = trace.axes[axis]
        axes = trace.axes
        if letter == "q" and axes.count("q") == 1:
            # Scores written as k q^T: the softmax runs over what a product calls its rows.
            axes = tuple({"q": "k", "k": "q"}.get(a, a) for a in axes)
        elif letter == "1" and "k" not in axes:
            axes = (*axes[:axis], "k", *axes[axis + 1 :])
        elif letter != "k":
            return
        hidden = trace.hidden
        if trace.narrow / 2 > masked_below(scores.dtype):
            # float16 scores are masked with the smallest float16, and may have been widened since.
            low = logits <= trace.narrow / 2
            hidden = low if hidden is None else hidden | low
        known = Softmaxed(
            logits=logits,
            axes=axes,
            version=_version(logits),
            virtual_columns=trace.virtual_columns,
            lost=trace.lost,
            hidden=hidden,
        )
        self._set(out, Trace(axes=axes, softmax=known))


def _take(softmax: Softmaxed, keys: int) -> Found | None:
    """Hand over what a softmax was given, once."""
    logits, axis = softmax.logits, softmax.axes.index("k")
    if logits is None:
        return None
    softmax.logits = None
    if softmax.lost is not None:
        return Lost(softmax.lost)
    if softmax.version != _version(logits):
        return Lost(_OVERWRITTEN)
    columns, virtual = logits.shape[axis], softmax.virtual_columns
    if keys == columns:
        virtual = 0  # what was put beside the scores has values: they are keys
    elif keys != columns - abs(virtual):
        return Lost(_CUT)
    if softmax.hidden is not None:
        logits = logits.masked_fill(softmax.hidden, -torch.inf)
    if virtual < 0:
        logits = logits.roll(virtual, axis)
    return Seen(way="softmax", logits=logits, axes=softmax.axes, virtual_columns=abs(virtual))


def _constant(value: Any) -> float | None:
    """A number, also as a tensor of one element on the CPU; None for anything else."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.device.type != "cpu":
            return None
        value = value.item()
    return float(value)


def _factor(kwargs: dict[str, Any], name: str) -> float:
    return float(kwargs.get(name, 1))


def _filled(trace: Trace, where: Tensor, value: Any, out: Tensor) -> Trace:
    """Remember where a constant hides scores, unless it hides them for every reader of logits."""
    constant = _constant(value)
    if trace.softmax is not None or constant is None or not out.is_floating_point():
        return trace
    if not masked_below(out.dtype) < constant <= FILL_AT_MOST:
        return trace
    return _hiding(trace, where, out)


def _hiding(trace: Trace, where: Tensor, out: Tensor) -> Trace:
    where = where.expand(out.shape)
    return replace(trace, hidden=where if trace.hidden is None else trace.hidden | where)


def _viewed(op: Any, hidden: Tensor, args: Sequence[Any], out: Tensor) -> Tensor:
    """The same view of another tensor; copies where its strides do not allow a view."""
    if hidden.ndim != args[0].ndim or op in _RESHAPES:
        return hidden.expand(args[0].shape).reshape(out.shape)
    viewed: Tensor = op(hidden, *args[1:])
    return viewed


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_parameter(tensor: Tensor) -> bool:
    if tensor.is_inference():
        return True  # keeps no track of its base; an unbatched single head is not seen there
    base = tensor._base if tensor._base is not None else tensor
    return isinstance(base, torch.nn.Parameter)


_RESHAPES = (aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default)


def _reshaped(axes: Axes, args: Sequence[Any], out: Tensor) -> Axes | None:
    return layout.reshaped(axes, tuple(args[0].shape), tuple(out.shape))


def _same(axes: Axes, args: Sequence[Any], out: Tensor) -> Axes | None:
    return axes if out.ndim == len(axes) else None


_VIEWS: dict[Any, Callable[[Axes, Sequence[Any], Tensor], Axes | None]] = {
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten._reshape_alias.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.permute.default: lambda axes, args, out: layout.permuted(axes, args[1]),
    aten.transpose.int: lambda axes, args, out: layout.transposed(axes, args[1], args[2]),
    aten.t.default: lambda axes, args, out: axes[::-1],
    aten.unsqueeze.default: lambda axes, args, out: layout.inserted(axes, args[1]),
    aten.select.int: lambda axes, args, out: (
        None if axes[args[1]] == "k" else layout.removed(axes, args[1])
    ),
    aten.expand.default: lambda axes, args, out: layout.expanded(axes, out.shape),
    aten.slice.Tensor: _same,
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.lift_fresh.default: _same,
}
