"""`Window`: one stretch of a model's run that is looked at, from opening the taps to the report."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from entropy_monitor.calls import AttentionCall
from entropy_monitor.capture.hub import Hub, hub
from entropy_monitor.capture.layout import arranged, misread
from entropy_monitor.capture.owners import Foreign, Owner
from entropy_monitor.capture.plan import Naming, Planned, Signature
from entropy_monitor.capture.quiet import quiet
from entropy_monitor.capture.report import CaptureReport
from entropy_monitor.capture.seen import Found, Lost, Seen

if TYPE_CHECKING:
    from entropy_monitor.capture.session import CaptureSession

OnCall = Callable[[AttentionCall], None]

_PLAIN = (Tensor, torch.nn.Parameter)


class Window:
    """Context manager made by `CaptureSession.window`; gives a `CaptureReport`.

    `open` and `close` may be called instead where opening and closing are two hooks of a host.
    """

    def __init__(self, session: "CaptureSession", on_call: OnCall) -> None:
        self.report = CaptureReport()
        self.discovering = False
        self.fused_only = False
        self.mode = (True, True)
        self.ran_modules: set[str] = set()
        self.order: list[Planned] = []
        self.needs_interface = False
        self._session = session
        self._on_call = on_call
        self._hub: Hub | None = None
        self._uncompiled = False
        self._naming: Naming | None = None
        self._forward: Any = None
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> CaptureReport:
        """Open and give the report, which is complete when the window closes."""
        self.open()
        return self.report

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close; raises an error of ours only if asked to and if nothing else is being raised."""
        self.close()
        if error is None and self._session.on_error == "raise" and self.report.errors:
            raise self.report.errors[0]

    def open(self) -> None:
        """Open the taps. An error of ours leaves the window closed and stands in the report."""
        try:
            self._uncompiled, interface = self._session.begin(self)
            self._hub = hub()
            self._hub.open(self, force_eager=self._uncompiled, interface=interface)
        except Exception as error:
            self.failed(error)
            self._remove()

    def close(self) -> None:
        """Remove everything and complete the report. Harmless when repeated."""
        if self._hub is None:
            return
        self._remove()
        try:
            self._next_forward(None)
            self._session.end(self)
        except Exception as error:
            self.failed(error)

    def _remove(self) -> None:
        held, self._hub = self._hub, None
        try:
            if held is not None:
                held.close(self)
        except Exception as error:
            self.failed(error)

    # What the hub tells ---------------------------------------------------------------------------

    def receive(self, found: Found, frame: FrameType | None) -> None:
        """Give one attention an owner and hand it over; errors go to the report."""
        try:
            owner = self._session.owners.find(frame)
            if isinstance(owner, Foreign):
                self.report.foreign[owner.kind] = self.report.foreign.get(owner.kind, 0) + 1
            elif owner is not None:
                self._receive(found, owner)
        except Exception as error:
            self.failed(error)

    def ran(self, frame: FrameType | None) -> None:
        """Note the modules on the stack."""
        self.ran_modules.update(self._session.owners.running(frame))

    def failed(self, error: Exception) -> None:
        """Keep an error for the report."""
        self.report.errors.append(error)

    # Naming and handing over
    # ------------------------------------------------------------------------

    def _receive(self, found: Found, owner: Owner) -> None:
        if not owner.continues(self._forward):
            self._next_forward(owner.forward)
        if isinstance(found, Seen) and found.part:
            owner = replace(owner, name=f"{owner.name}.{found.part}")
        if isinstance(found, Lost):
            (self.report.opaque if found.opaque else self.report.lost)[owner.name] = found.reason
            return
        material = _material(found, owner)
        if material is None:
            return
        if isinstance(material, Lost):
            self.report.lost[owner.name] = material.reason
            return
        heads = _heads(material)
        if self._is_decoding(owner, material, heads):
            self.report.skipped[owner.name] = self.report.skipped.get(owner.name, 0) + 1
            return
        name, index = self._name(owner, _signature(material, heads))
        if index < 0:
            return
        try:
            call = AttentionCall(**material, owner=name, index=index, cross=owner.cross)
        except ValueError as error:
            self.report.lost[name] = str(error).rstrip(".")
            return
        self.needs_interface = self.needs_interface or found.interface
        self._hand_over(call, found.way)

    def _hand_over(self, call: AttentionCall, way: str) -> None:
        if self.report.errors:
            return  # a receiver that failed once is not called again in this window
        with quiet(call.device.type):
            self._on_call(call)
        self.report.seen[call.name] = self.report.seen.get(call.name, 0) + 1
        self.report.way[call.name] = way

    def _next_forward(self, forward: Any) -> None:
        if self._naming is not None and not self._naming.complete:
            self.report.reliable = False
        self._forward = forward
        self._naming = None
        self._counts.clear()

    def _name(self, owner: Owner, signature: Signature) -> tuple[str, int]:
        """Name and index of a call; index -1 if it has no certain name."""
        # Where the model runs uncompiled, only a kernel of its own (flex) can be compiled.
        if owner.compiled and not self._uncompiled:
            if self._naming is None:
                self._naming = Naming(self._session.plan, self._session.root_name)
            planned = self._naming.take(owner.name, signature)
            if isinstance(planned, str):
                self.report.lost[owner.name] = planned
                return owner.name, -1
            return planned.owner, planned.index
        index = self._counts[owner.name]
        self._counts[owner.name] += 1
        if self.discovering:
            self.order.append(Planned(owner.name, index, signature))
        return owner.name, index

    def _is_decoding(self, owner: Owner, material: dict[str, Any], heads: int) -> bool:
        """A single query of a decoding loop: no gradient, and the owner is known to do more.

        transformers packs the query heads of a group into the axis of the queries while decoding.
        """
        known = self._session.plan.heads
        queries, keys = _lengths(material)
        if not self._session.decode and not torch.is_grad_enabled() and keys > 1:
            stated = known.get(owner.name) or owner.heads
            packed = stated is not None and heads < stated == heads * queries
            if packed or (queries == 1 and owner.name in known):
                return True
        if queries > 1:
            known[owner.name] = heads
        return False


def _material(found: Seen, owner: Owner) -> dict[str, Any] | Lost | None:
    """Arguments of the `AttentionCall`; None for tensors that hold no numbers."""
    tensors = [t for t in (found.query, found.key, found.logits, found.mask) if t is not None]
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            kind = type(tensor).__name__
            return None if kind == "FakeTensor" else Lost(f"its tensors are of type {kind}")
        if tensor.device.type == "meta":
            return None
    if found.logits is not None:
        logits = _arrange(found, owner)
        if isinstance(logits, Lost):
            return logits
        return {"logits": logits, "virtual_columns": found.virtual_columns}
    assert found.query is not None
    assert found.key is not None
    if found.query.ndim != 4 or found.key.ndim != 4:
        return Lost(f"its queries have {found.query.ndim} axes, not (batch, heads, tokens, width)")
    sizes = (*found.query.shape[:3], found.key.shape[2])
    batch = owner.batch(*sizes[2:])
    doubt = misread(sizes, owner.heads, batch, owner.lengths(batch))
    if doubt is not None:
        return Lost(doubt)
    return {
        "query": found.query,
        "key": found.key,
        "scale": found.scale,
        "mask": found.mask,
        "is_causal": found.is_causal,
        "softcap": found.softcap,
        "sink_logits": found.sink_logits,
        "window": found.window,
    }


def _arrange(found: Seen, owner: Owner) -> Tensor | Lost:
    assert found.logits is not None
    logits, axes = found.logits, found.axes
    queries, keys = (
        max((s for s, a in zip(logits.shape, axes, strict=True) if a == letter), default=1)
        for letter in "qk"
    )
    batch = owner.batch(queries, keys - found.virtual_columns)
    order = arranged(axes, logits.shape, owner.heads, batch, owner.lengths(batch))
    if isinstance(order, str):
        return Lost(order)
    shape = (order.batch, order.heads, -1, logits.shape[order.order[-1]])
    with quiet(logits.device.type):
        return logits.permute(order.order).reshape(shape)


def _heads(material: dict[str, Any]) -> int:
    source = material.get("logits")
    return int((source if source is not None else material["query"]).shape[1])


def _lengths(material: dict[str, Any]) -> tuple[int, int]:
    logits = material.get("logits")
    if logits is not None:
        return int(logits.shape[2]), int(logits.shape[3]) - int(material["virtual_columns"])
    return int(material["query"].shape[2]), int(material["key"].shape[2])


def _signature(material: dict[str, Any], heads: int) -> Signature:
    query = material.get("query")
    return heads, 0 if query is None else int(query.shape[3])
