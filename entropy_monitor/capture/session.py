"""`CaptureSession`: what is known about the attention of one model, and the windows opened on it.

The first window is *discovery*: compiled code steps aside
(`torch.compiler.set_stance("force_eager")`), so that every attention is seen with its owner, and
modules that look like attention are noted when they run. Later windows leave compiled code alone.
Where compiled code hides attention, or where names would be ambiguous, monitored steps run
uncompiled or leave these layers out, as the user chose.
"""

import fnmatch
import re
import sys
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from entropy_monitor.capture.owners import Owners
from entropy_monitor.capture.plan import COMPILED_UNSURE, Plan
from entropy_monitor.capture.tap import recompiles_in_modes, require_torch
from entropy_monitor.capture.window import OnCall, Window

_LOOKS_LIKE_ATTENTION = re.compile(r"attention|attn|mha(?![a-z])", re.IGNORECASE)

_NOT_COMPUTED = (
    "it ran, but no fused attention kernel was called in it, nor a softmax of q.k scores whose "
    "result multiplied values; attention of another form, or hidden in a single operation"
)
_UNCOMPILED = (
    "Compiled code hides attention or mixes its order ({}): "
    "monitored steps run uncompiled from now on."
)
_RECOMPILES = (
    "torch 2.9 would compile the model anew in every monitored step, so these run uncompiled; "
    "torch 2.10 and newer leave it as it is."
)
_ABSENT = (
    "seen in an earlier window, but not in this one: compiled code hides it, or it did not run"
)

_WIDE = (
    "{} did not show as fused kernels, as they did before: "
    "later windows look for every form of attention."
)
_LOOK_AROUND = 8
_REDISCOVERIES = 3
"""How often missing layers make a window learn anew, before they count as resting at times."""


class CaptureSession:
    """Opens windows on the attention of one model.

    Args:
        model: The model; nothing is installed on it.
        candidates: Shell pattern of further class names that are attention modules. Only used to
            say
            what was not seen.
        compiled: What to do where compiled code hides attention: `"force_eager"` runs monitored
            steps
            uncompiled, `"skip"` reports and leaves the layers out.
        decode: Also hand over single queries of a decoding loop.
        on_error: `"warn"` collects errors in the report, `"raise"` raises the first one when the
            window
            closes. The model never sees them.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If an option is unknown.
        RuntimeError: If torch is older than 2.9.

    Examples:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
        >>> session = CaptureSession(layer)
        >>> shapes = []
        >>> with session.window(lambda call: shapes.append((call.name, call.shape))) as report:
        ...     out = layer(torch.zeros(3, 5, 16))
        >>> shapes, report.way
        ([('self_attn', (3, 2, 5, 5))], {'self_attn': 'sdpa'})
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        candidates: str | None = None,
        compiled: str = "force_eager",
        decode: bool = False,
        on_error: str = "warn",
    ) -> None:
        require_torch()
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
        if compiled not in ("force_eager", "skip"):
            raise ValueError(f"`compiled` must be 'force_eager' or 'skip', got {compiled!r}.")
        if on_error not in ("warn", "raise"):
            raise ValueError(f"`on_error` must be 'warn' or 'raise', got {on_error!r}.")
        self.model = model
        self.on_error = on_error
        self.decode = decode
        self.owners = Owners(model)
        self.plan = Plan()
        self._pattern = candidates
        self._compiled = compiled
        self._discovered = False
        self._uncompiled = recompiles_in_modes()
        self._interface = False
        self._missing: set[str] = set()
        self._rediscoveries = 0
        self._windows = 0
        self._narrowing = True
        self._fused_modes: set[tuple[bool, bool]] = set()

    @property
    def root_name(self) -> str:
        """Name of the model itself."""
        return self.owners.names.get(id(self.model), type(self.model).__name__)

    def window(self, on_call: OnCall) -> Window:
        """Open a window: a context manager that gives a `CaptureReport`, complete when it closes.

        `on_call` gets each `AttentionCall` at once, while the model waits: its tensors are valid
        only during the call. It runs without gradient and autocast, and unseen by the window.
        """
        return Window(self, on_call)

    # Called by the window
    # ---------------------------------------------------------------------------

    def begin(self, window: Window) -> tuple[bool, bool]:
        """Prepare for a window: must compiled code step aside, must transformers' table be wrapped.

        Where the table is needed, compiled code steps aside too: it would notice the wrapping and
        compile again.
        """
        if self.owners.refresh() and self._discovered:
            self._discovered = False  # layers were added or taken away
            self.plan = Plan()
        window.discovering = not self._discovered
        window.mode = self._mode
        window.fused_only = not window.discovering and self._expects_fused_only()
        interface = window.discovering or self._interface
        return interface or self._uncompiled, interface

    def end(self, window: Window) -> None:
        """Learn from a window and complete its report."""
        report = window.report
        report.candidates = len(self._candidates())
        if window.discovering:
            self._learn(window)
            self._narrow(window)
            if recompiles_in_modes() and _something_was_compiled():
                report.notes.append(_RECOMPILES)
        elif not self._unsure(window) and self._narrow(window) and not self._uncompiled:
            self._compare(window)
        report.unseen.update({n: r for n, r in self.plan.unseen.items() if n not in report.seen})
        report.idle = self.plan.idle
        for name in (*report.lost, *report.opaque):
            report.unseen.pop(name, None)

    def _learn(self, window: Window) -> None:
        report = window.report
        if report.errors and not report.seen:
            return
        hidden = sorted(self._missing & set(report.seen))
        if hidden:
            self._uncompiled = True
            report.notes.append(_UNCOMPILED.format(", ".join(hidden[:4])))
        self._missing.clear()
        self._interface = window.needs_interface
        self.plan.learn(window.order)
        ran = [name for name in self._candidates() if name in window.ran_modules]
        covered = {*report.seen, *report.lost, *report.opaque, *report.skipped, *self.plan.heads}
        if covered:
            ran = [name for name in ran if name != self.root_name]  # it contains what was seen
        unseen = [name for name in _innermost(ran) if not _covered(name, covered)]
        self.plan.unseen = dict.fromkeys(unseen, _NOT_COMPUTED)
        self.plan.idle = tuple(
            n for n in _innermost(self._candidates()) if n not in window.ran_modules
        )
        # A window in which the model did not run teaches nothing.
        self._discovered = bool(window.ran_modules or report.seen)

    def _unsure(self, window: Window) -> bool:
        """Whether calls inside compiled code got no certain names; then it must step aside."""
        report = window.report
        if report.reliable and not COMPILED_UNSURE & set(report.lost.values()):
            return False
        if self._compiled == "force_eager":
            self._uncompiled = True
            report.notes.append(_UNCOMPILED.format(", ".join(report.lost) or self.root_name))
        return True

    def _compare(self, window: Window) -> None:
        """Look for calls that discovery saw and a window that left compiled code alone did not."""
        report = window.report
        missing = self.plan.names - set(report.seen) - set(report.skipped)
        if not missing or not _something_was_compiled():
            return
        if self._compiled == "force_eager":
            if self._rediscoveries == _REDISCOVERIES:
                return
            self._rediscoveries += 1
            self._missing = missing
            self._discovered = False
        report.opaque.update(dict.fromkeys(sorted(missing), _ABSENT))

    def _expects_fused_only(self) -> bool:
        """Whether to look for fused kernels alone, which costs a third.

        Every so often a window looks for everything, should attention turn up that rested before.
        """
        self._windows += 1
        return self._mode in self._fused_modes and self._windows % _LOOK_AROUND != 0

    @property
    def _mode(self) -> tuple[bool, bool]:
        """What may change the kernel: dropout, and the inference fast path."""
        return self.model.training, torch.is_grad_enabled()

    def _narrow(self, window: Window) -> bool:
        """Learn whether windows in this mode need to look for fused kernels alone.

        Returns False if this window missed something for that reason; the next one will tell more.
        """
        report = window.report
        if window.fused_only:
            missing = self.plan.names - set(report.seen) - set(report.skipped) - set(report.lost)
            if not missing:
                return True
            self._fused_modes.clear()
            self._narrowing = False
            report.notes.append(_WIDE.format(", ".join(sorted(missing)[:4])))
            return False
        if self._narrowing and report.complete and not self.plan.idle:
            if set(report.way.values()) == {"sdpa"}:
                self._fused_modes.add(window.mode)
            else:
                self._fused_modes.clear()
                self._narrowing = False
        return True

    def _candidates(self) -> list[str]:
        """Names of modules that own parameters and whose class name looks like attention."""
        return [
            name
            for name, module in self.owners.modules.items()
            if _LOOKS_LIKE_ATTENTION.search(kind := type(module).__name__)
            or (self._pattern is not None and fnmatch.fnmatch(kind, self._pattern))
        ]


def _something_was_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["frames"]["total"] > 0


def _innermost(names: Iterable[str]) -> Iterator[str]:
    listed = list(names)
    for name in listed:
        if not any(other.startswith(f"{name}.") for other in listed):
            yield name


def _covered(name: str, seen: Iterable[str]) -> bool:
    """An attention module counts as seen if it, a part of it, or what it is a part of was seen."""
    owners = [other.split("#")[0] for other in seen]
    return any(
        owner == name or owner.startswith(f"{name}.") or name.startswith(f"{owner}.")
        for owner in owners
    )
