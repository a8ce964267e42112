"""The one dispatch mode behind all open windows of a thread.

It is pushed while at least one window is open and removed with the last, so several monitors share
it and may close in any order. It sits below autograd and autocast and sees every operation that
really runs, in eager mode and inside inductor's graphs, without a recompilation.
"""

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from entropy_monitor.capture.flex import FlexWay
from entropy_monitor.capture.fused import FusedWay
from entropy_monitor.capture.interface import InterfaceTap
from entropy_monitor.capture.native import NativeWay
from entropy_monitor.capture.seen import Found, Lost
from entropy_monitor.capture.softmax import SoftmaxWay

_ATTENTION_NAMES = ("attention", "attn", "mha_", "multi_head")

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Found | None]


@runtime_checkable
class Receiver(Protocol):
    """An open window."""

    discovering: bool

    def receive(self, found: Found, frame: FrameType | None) -> None:
        """Take one attention; must not raise."""

    def ran(self, frame: FrameType | None) -> None:
        """Note which modules are running."""

    def failed(self, error: Exception) -> None:
        """Take an error of the capture itself."""


def _nothing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Stands for operations that only show which modules run."""


class OpaqueWay:
    """Comes last: operations that are attention by their name, and that nothing else can read."""

    def handler(self, op: Any) -> Handler | None:
        """What to call after this operation; None if its name says nothing of attention."""
        name = str(op).lower()
        if "backward" in name or not any(part in name for part in _ATTENTION_NAMES):
            return None
        reason = f"operation {op} computes attention in a way that is not known"
        return lambda op, args, kwargs, out: Lost(reason, opaque=True)

    def forget(self) -> None:
        """Nothing to drop."""


class Hub:
    """Open windows of one thread and the mode that feeds them."""

    def __init__(self) -> None:
        self.windows: list[Receiver] = []
        self.ways = (FusedWay(), SoftmaxWay(), FlexWay(), NativeWay(), OpaqueWay())
        self.told = 0
        self.discovering = False
        self._mode: _PlainTap | None = None

    def open(self, window: Receiver, *, force_eager: bool, interface: bool) -> None:
        """Start feeding a window; have compiled code step aside, wrap transformers' table."""
        if force_eager:
            _STANCES.enter(window)
        if interface:
            _INTERFACE.enter(window)
        self.windows.append(window)
        self.discovering = self.discovering or window.discovering
        if self._mode is None:
            kind = _Tap if "torch._dynamo" in sys.modules else _PlainTap
            mode = kind(self)
            mode.__enter__()  # type: ignore[no-untyped-call]
            self._mode = mode

    def close(self, window: Receiver) -> None:
        """Stop feeding a window, with the last one remove everything. Harmless when repeated."""
        if window in self.windows:
            self.windows.remove(window)
        self.discovering = any(other.discovering for other in self.windows)
        try:
            if not self.windows and self._mode is not None:
                mode, self._mode = self._mode, None
                for way in self.ways:
                    way.forget()
                _remove(mode)
        finally:
            _INTERFACE.leave(window)
            _STANCES.leave(window)

    def handler(self, op: Any) -> Handler | None:
        """What to call after an operation of this kind."""
        for way in self.ways:
            handler = way.handler(op)
            if handler is not None:
                return handler
        return _nothing if op in _PROJECTIONS else None

    def tell(self, found: Found, frame: FrameType | None) -> None:
        """Hand one attention to all windows."""
        self.told += 1
        for window in tuple(self.windows):
            window.receive(found, frame)

    def note(self, frame: FrameType | None) -> None:
        """Let windows that still learn note which modules are running."""
        for window in tuple(self.windows):
            if window.discovering:
                window.ran(frame)

    def failed(self, error: Exception) -> None:
        """Hand an error of the capture to all windows."""
        for window in tuple(self.windows):
            window.failed(error)


class _PlainTap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Used while torch._dynamo is not loaded, so that opening a window does not load it."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay out of compilation, see what compiled code runs."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, hub: Hub) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hub = hub
        self.thread = threading.get_ident()
        self.handlers: dict[Any, Handler | None] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _dispatch(self, func, args, kwargs or {})


class _Tap(_PlainTap):  # type: ignore[no-untyped-call]
    """The same, kept out of torch._dynamo's sight while compiled code runs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _dispatch(self, func, args, kwargs or {})


def _dispatch(tap: _PlainTap, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.is_inference_mode_enabled() and _is_composite(func):
        # Without autograd, operations made of others arrive whole: take them apart as it would.
        with tap:
            return func.decompose(*args, **kwargs)
    out = func(*args, **kwargs)
    try:
        try:
            handler = tap.handlers[func]
        except KeyError:
            handler = tap.handlers[func] = tap.hub.handler(func)
        if handler is None:
            return out
        # Within a backward pass only activation checkpointing computes attention: it was seen
        # before.
        if torch._C._current_graph_task_id() != -1 or threading.get_ident() != tap.thread:
            return out
        found = handler(func, args, kwargs, out)
        if found is not None:
            tap.hub.tell(found, sys._getframe(1))
        elif tap.hub.discovering and func in _PROJECTIONS:
            tap.hub.note(sys._getframe(1))
    except Exception as error:
        tap.hub.failed(error)
    return out


@functools.cache
def _is_composite(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name: str = func.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


_PROJECTIONS = frozenset(
    (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten.linear.default,
        torch.ops.aten.convolution.default,
    )
)
"""Whatever computes attention runs one of these, so that the modules on the stack show what ran."""


def _remove(mode: TorchDispatchMode) -> None:
    """Take a mode off the stack, also if somebody else pushed one on top of it meanwhile."""
    depth = torch._C._len_torch_dispatch_stack()
    stack = [torch._C._get_dispatch_stack_at(n) for n in range(depth)]
    if mode not in stack:
        return
    above = [_pop_mode() for _ in range(depth - 1 - stack.index(mode))]
    kept = {name: getattr(_python_dispatch, name) for name in _FLAGS.values()} if above else {}
    for flags in _FLAGS if above else ():
        # What the next mode will restore when it leaves is what we would have restored.
        getattr(above[-1], flags)[-1] = getattr(mode, flags)[-1]
    try:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    finally:
        for name, value in kept.items():
            setattr(_python_dispatch, name, value)
        for other in reversed(above):
            _push_mode(other)


_FLAGS = {
    "old_dispatch_mode_flags": "_is_in_torch_dispatch_mode",
    "old_non_infra_dispatch_mode_flags": "_is_in_non_infra_torch_dispatch_mode",
    "old_without_ignore_compile_internals_dispatch_mode_flags": (
        "_is_in_any_mode_without_ignore_compile_internals"
    ),
}


class _Stances:
    """Asks torch.compile to step aside while a window wants it; the last one restores it.

    The setting is one per process, hence the count: monitors close in the order in which they
    opened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: list[Receiver] = []
        self._stance: Any = None

    def enter(self, window: Receiver) -> None:
        """Nothing happens as long as nothing can have been compiled."""
        if "torch._dynamo" not in sys.modules:
            return
        with self._lock:
            if not self._holders:
                self._stance = torch.compiler.set_stance("force_eager")
            self._holders.append(window)

    def leave(self, window: Receiver) -> None:
        """Undo `enter`; harmless without it."""
        with self._lock:
            if window in self._holders:
                self._holders.remove(window)
                if not self._holders:
                    self._stance.__exit__(None, None, None)
                    self._stance = None


def _watching() -> Hub | None:
    """The hub of this thread if it has open windows and no backward pass recomputes a forward."""
    held = hub()
    return held if held.windows and torch._C._current_graph_task_id() == -1 else None


_STANCES = _Stances()
_INTERFACE = InterfaceTap(_watching)
_LOCAL = threading.local()


def hub() -> Hub:
    """The hub of this thread: dispatch modes belong to threads."""
    held: Hub | None = getattr(_LOCAL, "hub", None)
    if held is None:
        held = _LOCAL.hub = Hub()
    return held
