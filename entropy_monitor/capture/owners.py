"""Whose attention it is: the innermost module of the model on the stack that owns parameters.

Nothing is installed on the model. When a kernel runs, the Python frames above it are walked up to
the first call of such a module; helpers without parameters (dropout, a bare softmax module) are
passed over. Names are those of `named_modules`, without what wrappers add (`torch.compile`, DDP,
FSDP, activation checkpointing). Only frames of module calls and of methods of the model's classes
are looked into: reading the locals of a frame keeps them alive until it ends (before Python 3.13),
which would hold the graph of a whole step if a training loop were among them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_CALL = nn.Module._wrapped_call_impl.__code__

_COMPILED_FILES = re.compile(
    r"<eval_with_key>|torch[/\\]_inductor|torch[/\\]_functorch[/\\]_aot|torchinductor_"
)

_WRAPPED = (
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_forward_module",
    "module",
)
"""Attributes under which wrappers keep the module they wrap."""

_WRAPPER = re.compile(r"DataParallel|^DDP|FullySharded|AveragedModel|DeepSpeed|_FabricModule")
"""Classes whose child `module` is the wrapped module; elsewhere `module` is an ordinary name."""

_HEAD_COUNTS = (
    "num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "nheads", "num_head",
    "heads", "h",
)  # fmt: skip

_CROSS = re.compile(
    r"cross|enc_?dec|encoder_attn|encoder_attention|src_attn|context_attn", re.IGNORECASE
)
_OTHER_SEQUENCE = (
    "key_value_states",
    "encoder_hidden_states",
    "context",
    "memory",
    "cross_attention_states",
)
"""Arguments by which attention modules are given the sequence their keys come from."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A module of the model on the stack.

    Attributes:
        name: Qualified name; the class name for the model itself.
        module: The module.
        args: Positional arguments of its call.
        kwargs: Keyword arguments of its call.
        compiled: Compiled code lies between the kernel and the module: the true owner is below it.
        forward: Identity of the outermost call into the model on the stack: its keyword arguments,
            kept alive, so that two forwards never look the same; for a method a tuple.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    compiled: bool
    forward: Any

    def continues(self, forward: Any) -> bool:
        """Whether this is still the forward pass of that identity."""
        if isinstance(forward, tuple):
            return bool(forward == self.forward)
        return forward is self.forward

    @property
    def heads(self) -> int | None:
        """Number of attention heads the module or its configuration states."""
        return head_count(self.module)

    @property
    def cross(self) -> bool | None:
        """Whether it is cross-attention, as far as its arguments, its flags or its name tell."""
        if any(isinstance(self.kwargs.get(name), Tensor) for name in _OTHER_SEQUENCE):
            return True
        stated = getattr(self.module, "is_cross_attention", None)
        if isinstance(stated, bool):
            return stated
        tensors = (*self.args[:3], *(self.kwargs.get(name) for name in ("query", "key", "value")))
        given = [value for value in tensors if isinstance(value, Tensor)]
        if len(given) == 3 and given[1] is given[2]:
            return given[0] is not given[1]
        return (
            True if _CROSS.search(self.name) or _CROSS.search(type(self.module).__name__) else None
        )

    def batch(self, queries: int, keys: int) -> int | None:
        """Number of sequences the module was given, read from its first input."""
        values = (*self.args, *self.kwargs.values())
        shape = next((value.shape for value in values if isinstance(value, Tensor)), None)
        if shape is None:
            return None
        if len(shape) == 2:
            return 1
        if len(shape) != 3:
            return shape[0] if len(shape) == 4 else None
        batch_first = getattr(self.module, "batch_first", None)
        if isinstance(batch_first, bool):
            return shape[0] if batch_first else shape[1]
        if shape[0] == queries != shape[1] != keys:
            return shape[1]
        return shape[0]

    def lengths(self, batch: int | None) -> tuple[int, ...]:
        """Tokens of each input (batch, tokens, width), the first first; empty for an image."""
        values = (*self.args, *self.kwargs.values())
        given = [value for value in values if isinstance(value, Tensor)]
        if batch is None or not given or given[0].ndim not in (2, 3):
            return ()
        if given[0].ndim == 2:
            return (given[0].shape[0],) if given[0].is_floating_point() else ()
        shapes = [value.shape for value in given if value.ndim == 3]
        return tuple(shape[1] if shape[0] == batch else shape[0] for shape in shapes)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A module that owns parameters and is not part of the model: an EMA copy, a teacher."""

    kind: str


class Owners:
    """Names of the modules of one model that own parameters."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.names: dict[int, str] = {}
        self.modules: dict[str, nn.Module] = {}
        self._listed: list[int] = []
        self._codes: dict[int, tuple[CodeType, str]] = {}
        self._outside: dict[int, tuple[nn.Module, Foreign | None]] = {}
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        # Names go by identity, which no copy and no other process shares.
        return {"root": self.root}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["root"])  # type: ignore[misc]

    def refresh(self) -> bool:
        """Read the modules again; returns whether they changed since the last time."""
        self._outside.clear()
        listed = [id(module) for module in self.root.modules()]
        if listed == self._listed:
            return False
        self._listed = listed
        names, modules = {}, {}
        for name, module in named_modules(self.root):
            names[id(module)] = name
            modules[name] = module  # of a wrapper and what it wraps, the wrapped one
        if names == self.names:
            return False
        self.names, self.modules = names, modules
        self._codes = {id(_CALL): (_CALL, "call")}
        for kind in {type(module) for module in modules.values()}:
            for code in _method_codes(kind):
                self._codes[id(code)] = (code, "method")
        return True

    def find(self, frame: FrameType | None) -> Owner | Foreign | None:
        """Walk up from `frame` to the innermost owner; None if the model is not on the stack."""
        inner: str | None = None
        given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        forward: Any = None
        compiled = False
        while frame is not None:
            code = frame.f_code
            known = self._codes.get(id(code))
            kind = known[1] if known is not None else self._classify(code)
            if kind == "compiled":
                compiled = compiled or inner is None
            elif kind:
                held = frame.f_locals
                module = held.get(code.co_varnames[0])
                name = self._name(module)
                if isinstance(name, Foreign):
                    if inner is None:
                        return name
                elif name is not None:
                    if inner is None:
                        inner = name
                    if kind == "call":
                        forward = held["kwargs"]
                        if given is None and inner == name:
                            given = held["args"], held["kwargs"]
                    else:
                        forward = (id(frame), code)
                del held
            frame = frame.f_back
        if inner is None:
            return None
        args, kwargs = given or ((), {})
        return Owner(
            name=inner,
            module=self.modules[inner],
            args=args,
            kwargs=kwargs,
            compiled=compiled,
            forward=forward,
        )

    def running(self, frame: FrameType | None) -> Iterator[str]:
        """Names of all modules of the model whose calls are on the stack."""
        while frame is not None:
            if frame.f_code is _CALL:
                name = self.names.get(id(frame.f_locals.get("self")))
                if name is not None:
                    yield name
            frame = frame.f_back

    def _classify(self, code: CodeType) -> str:
        kind = "compiled" if _COMPILED_FILES.search(code.co_filename) else ""
        if len(self._codes) < 100_000:
            self._codes[id(code)] = (code, kind)
        return kind

    def _name(self, module: Any) -> str | Foreign | None:
        """Name of a module of the model or of what it wraps; Foreign if it is neither."""
        name = self.names.get(id(module))
        if name is not None or not isinstance(module, nn.Module):
            return name
        inside = module
        while (wrapped := _unwrapped(inside)) is not None:
            inside = wrapped
            if id(inside) in self.names:
                return self.names[id(inside)]
        seen = self._outside.get(id(module))
        if seen is None:
            owns = next(module.parameters(), None) is not None
            contains = owns and any(part is self.root for part in module.modules())
            graph = isinstance(module, torch.fx.GraphModule)
            verdict = (
                Foreign(type(module).__name__) if owns and not contains and not graph else None
            )
            seen = self._outside[id(module)] = (module, verdict)
        return seen[1]


def named_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own parameters, by names without wrappers; the model by its class name."""
    stripped = _strippable(root)
    for name, module in root.named_modules():
        if next(module.parameters(), None) is not None:
            parts = []
            prefix = ""
            for part in name.split(".") if name else ():
                prefix = f"{prefix}.{part}" if prefix else part
                if prefix not in stripped:
                    parts.append(part)
            yield ".".join(parts) or type(_innermost(root)).__name__, module


def head_count(module: nn.Module) -> int | None:
    """Number of attention heads a module or its configuration states, None if it does not."""
    for holder in (module, getattr(module, "config", None)):
        for attribute in _HEAD_COUNTS:
            value = getattr(holder, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _strippable(root: nn.Module) -> set[str]:
    names = set()
    for name, module in root.named_modules():
        if (wrapped := _unwrapped(module)) is not None:
            for child, part in module.named_children():
                if part is wrapped:
                    names.add(f"{name}.{child}" if name else child)
    return names


def _innermost(module: nn.Module) -> nn.Module:
    while (wrapped := _unwrapped(module)) is not None:
        module = wrapped
    return module


def _unwrapped(module: nn.Module) -> nn.Module | None:
    children = module._modules
    for attribute in _WRAPPED:
        # Scripted modules keep their children in a mapping without `get`.
        wrapped = children[attribute] if attribute in children else None  # noqa: SIM401
        if wrapped is not None and (
            attribute != "module" or _WRAPPER.search(type(module).__name__)
        ):
            return wrapped
    return None


def _method_codes(kind: type) -> Iterator[CodeType]:
    """Code of the methods that a module's classes define below nn.Module, decorators undone."""
    for base in kind.__mro__:
        if base in (nn.Module, object):
            continue
        for value in vars(base).values():
            while isinstance(value, FunctionType):
                if value.__code__.co_varnames[:1] == ("self",):
                    yield value.__code__
                value = getattr(value, "__wrapped__", None)
