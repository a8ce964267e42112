"""The dispatch mode: sees every operation that really runs, below autograd and autocast."""

import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from entropy_monitor.capture.quiet import recording
from entropy_monitor.capture.seen import Found

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Found | None]

_UNKNOWN: Any = object()


@runtime_checkable
class Listener(Protocol):
    """What a tap tells about."""

    def handler(self, op: Any) -> Handler | None:
        """What to call after an operation of this kind."""

    def recorded(self, op: Any) -> Found | None:
        """What to say of an operation that goes into a CUDA graph."""

    def tell(self, found: Found, frame: FrameType | None) -> None:
        """Take one attention."""

    def note(self, op: Any, frame: FrameType | None) -> None:
        """Take an operation that was none."""

    def failed(self, error: Exception) -> None:
        """Take an error of a handler."""


class Tap(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation as it is and calls its handler afterwards.

    Args:
        listener: What is told.
        handlers: Handlers per operation, completed as operations are met.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Stay out of compilation, see what compiled code runs."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The usual way wraps `__torch_dispatch__`, which loads torch._dynamo and costs 2.5 us per
        # operation; `_hide_from_dynamo` does the same once.
        return False

    def __init__(self, listener: Listener, handlers: dict[Any, Handler | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.handlers = handlers
        self._listener = listener
        self._thread = threading.get_ident()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and _is_composite(func):
            # Without autograd, operations made of others arrive whole: take them apart as it would.
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        handler = self.handlers.get(func, _UNKNOWN)
        if handler is not None:
            self._handle(handler, func, args, kwargs, out)
        return out

    def _handle(
        self, handler: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        listener = self._listener
        try:
            if handler is _UNKNOWN:
                handler = self.handlers[func] = listener.handler(func)
                if handler is None:
                    return
            # Within a backward pass only activation checkpointing computes attention, again.
            if torch._C._current_graph_task_id() != -1 or threading.get_ident() != self._thread:
                return
            found = listener.recorded(func) if recording() else handler(func, args, kwargs, out)
            if found is None:
                listener.note(func, sys._getframe(2))
            else:
                listener.tell(found, sys._getframe(2))
        except Exception as error:
            listener.failed(error)


class GuardedTap(Tap):  # type: ignore[no-untyped-call]
    """The same for a torch that cannot hide a function from torch._dynamo."""

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
        return super().__torch_dispatch__(func, types, args, kwargs)


def require_torch() -> None:
    """Refuse a torch whose dispatch modes turn compiled models into eager ones and break flex."""
    if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        raise RuntimeError(
            "entropy_monitor needs torch 2.9 or newer to see attention in a model without changing "
            f"what is compiled; this is torch {torch.__version__}. `row_statistics`, "
            "`attribute_change`, reports and the dashboard work with it."
        )


def recompiles_in_modes() -> bool:
    """Whether the guards of compiled code never hold under a dispatch mode: seen in torch 2.9."""
    return torch.__version__ < "2.10"  # not a plain string: it compares versions


def make_tap(listener: Listener, handlers: dict[Any, Handler | None]) -> Tap:
    """A tap that torch._dynamo will not try to compile, should it be loaded."""
    if "torch._dynamo" not in sys.modules or _hide_from_dynamo():
        return Tap(listener, handlers)
    return GuardedTap(listener, handlers)


def _hide_from_dynamo() -> bool:
    """Let dynamo run the tap and all it calls as they are, between the parts of a broken graph."""
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )

        skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        set_code_exec_strategy(Tap.__torch_dispatch__.__code__, skip)
    except (ImportError, AttributeError, TypeError):
        return False
    return True


@functools.cache
def _is_composite(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name: str = func.name()  # type: ignore[no-untyped-call]
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


_FLAGS = {
    "old_dispatch_mode_flags": "_is_in_torch_dispatch_mode",
    "old_non_infra_dispatch_mode_flags": "_is_in_non_infra_torch_dispatch_mode",
    "old_without_ignore_compile_internals_dispatch_mode_flags": (
        "_is_in_any_mode_without_ignore_compile_internals"
    ),
}
"""What a mode saves when it is pushed, and the module variable it saves."""


def remove(mode: TorchDispatchMode) -> None:
    """Take a mode off the stack, also if somebody else pushed one on top of it meanwhile."""
    depth = torch._C._len_torch_dispatch_stack()
    stack = [torch._C._get_dispatch_stack_at(n) for n in range(depth)]
    if mode not in stack:
        return
    above = [_pop_mode() for _ in range(depth - 1 - stack.index(mode))]
    flags = {s: g for s, g in _FLAGS.items() if above and hasattr(mode, s)}
    kept = {name: getattr(_python_dispatch, name) for name in flags.values()}
    for saved in flags:
        # What the next mode will restore when it leaves is what we would have restored.
        getattr(above[-1], saved)[-1] = getattr(mode, saved)[-1]
    try:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    finally:
        for name, value in kept.items():
            setattr(_python_dispatch, name, value)
        for other in reversed(above):
            _push_mode(other)
