"""The one tap behind all open windows of a thread.

It is pushed while at least one window is open and removed with the last, so several monitors share
it and may close in any order.
"""

import threading
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch

from entropy_monitor.capture.flex import FlexWay
from entropy_monitor.capture.fused import FusedWay
from entropy_monitor.capture.interface import InterfaceTap
from entropy_monitor.capture.native import NativeWay
from entropy_monitor.capture.opaque import OpaqueWay
from entropy_monitor.capture.seen import RECORDED, Found
from entropy_monitor.capture.softmax import SoftmaxWay
from entropy_monitor.capture.stance import Stances
from entropy_monitor.capture.tap import Handler, Tap, make_tap, remove

aten = torch.ops.aten

_PROJECTIONS = frozenset(
    (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.linear.default,
        aten.convolution.default,
    )
)
"""Whatever computes attention runs one of these: the modules on the stack show what ran."""


@runtime_checkable
class Receiver(Protocol):
    """An open window.

    Attributes:
        discovering: It wants to know which modules run.
        fused_only: It expects no attention that is written out, so that nothing need be followed.
    """

    discovering: bool
    fused_only: bool

    def receive(self, found: Found, frame: FrameType | None) -> None:
        """Take one attention; must not raise."""

    def ran(self, frame: FrameType | None) -> None:
        """Note which modules are running."""

    def failed(self, error: Exception) -> None:
        """Take an error of the capture itself."""


def _nothing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Stands for operations that only show which modules run."""


class Hub:
    """Open windows of one thread and the tap that feeds them."""

    def __init__(self) -> None:
        self.windows: list[Receiver] = []
        self.told = 0
        self._written = SoftmaxWay()
        self._ways = (FusedWay(), self._written, FlexWay(), NativeWay(), OpaqueWay())
        self._handlers: dict[bool, dict[Any, Handler | None]] = {False: {}, True: {}}
        self._fused_only = False
        self._discovering = False
        self._tap: Tap | None = None

    def open(self, window: Receiver, *, force_eager: bool, interface: bool) -> None:
        """Start feeding a window; have compiled code step aside, wrap transformers' table."""
        if force_eager:
            _STANCES.enter(window)
        if interface:
            _INTERFACE.enter(window)
        self.windows.append(window)
        self._adapt()
        if self._tap is None:
            tap = make_tap(self, self._handlers[self._fused_only])
            tap.__enter__()  # type: ignore[no-untyped-call]
            self._tap = tap

    def close(self, window: Receiver) -> None:
        """Stop feeding a window, with the last one remove everything. Harmless when repeated."""
        if window in self.windows:
            self.windows.remove(window)
        try:
            if self.windows:
                self._adapt()
            elif self._tap is not None:
                tap, self._tap = self._tap, None
                remove(tap)
        finally:
            _INTERFACE.leave(window)
            _STANCES.leave(window)
            if not self.windows:
                for way in self._ways:
                    way.forget()

    def _adapt(self) -> None:
        """Watch no more than the open windows need."""
        self._discovering = any(window.discovering for window in self.windows)
        self._fused_only = all(window.fused_only for window in self.windows)
        if self._tap is not None:
            self._tap.handlers = self._handlers[self._fused_only]

    def handler(self, op: Any) -> Handler | None:
        """What to call after an operation of this kind."""
        for way in self._ways:
            if way is self._written and self._fused_only:
                continue
            handler = way.handler(op)
            if handler is not None:
                return handler
        return _nothing if op in _PROJECTIONS and not self._fused_only else None

    def recorded(self, op: Any) -> Found | None:
        """What to say of an operation that goes into a CUDA graph: lost if it may attend."""
        kernels = (way for way in self._ways if way is not self._written)
        attends = "softmax" in str(op) or any(way.handler(op) is not None for way in kernels)
        return RECORDED if attends else None

    def tell(self, found: Found, frame: FrameType | None) -> None:
        """Hand one attention to all windows."""
        self.told += 1
        for window in tuple(self.windows):
            window.receive(found, frame)

    def note(self, op: Any, frame: FrameType | None) -> None:
        """Let windows that still learn note which modules are running."""
        if self._discovering and op in _PROJECTIONS:
            for window in tuple(self.windows):
                if window.discovering:
                    window.ran(frame)

    def failed(self, error: Exception) -> None:
        """Hand an error of the capture to all windows."""
        for window in tuple(self.windows):
            window.failed(error)


def _watching() -> Hub | None:
    """The hub of this thread if it has open windows and no backward pass recomputes a forward."""
    held = hub()
    return held if held.windows and torch._C._current_graph_task_id() == -1 else None


_STANCES = Stances()
_INTERFACE = InterfaceTap(_watching)
_LOCAL = threading.local()


def hub() -> Hub:
    """The hub of this thread: dispatch modes belong to threads."""
    held: Hub | None = getattr(_LOCAL, "hub", None)
    if held is None:
        held = _LOCAL.hub = Hub()
    return held
