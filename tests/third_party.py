"""Loading libraries that want torchvision for image transforms only, which tests do not need."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest


class _AnythingType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _AnythingType(name, (cls,), {})
        setattr(cls, name, value)
        return value


class _Anything(metaclass=_AnythingType):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> "_Anything":
        return self


class _Stub(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnythingType(name, (_Anything,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def load(name: str, *, wants_torchvision: bool = False) -> Any:
    """Import a library or skip the test; a missing torchvision it wants is stood in for."""
    if importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    if name in sys.modules:
        return sys.modules[name]
    missing = wants_torchvision and importlib.util.find_spec("torchvision") is None
    finder = _Finder() if missing else None
    if finder is not None:
        sys.meta_path.append(finder)
    try:
        return importlib.import_module(name)
    finally:
        if finder is not None:
            sys.meta_path.remove(finder)
            for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
                del sys.modules[module]
