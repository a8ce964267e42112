"""Being there for one call of one method of one object, and gone before the call begins.

Hosts offer hooks around a training step but not around its forward pass. A method is therefore
wrapped on the instance (never on the class) right before a monitored step; the wrapper takes itself
off when it is called, so that nothing is left behind by an exception, Ctrl-C or an optimiser that
calls the method again (L-BFGS).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

Around = Callable[..., AbstractContextManager[Any]]
"""Called with the arguments of the wrapped call, gives what is to surround it."""


class _OneShot:
    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.around: list[Around] = []
        self.had_own = name in vars(owner)
        self.original = getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.remove()
        with ExitStack() as stack:
            for around in self.around:
                stack.enter_context(around(*args, **kwargs))
            return self.original(*args, **kwargs)

    def remove(self) -> None:
        if vars(self.owner).get(self.name) is not self:
            return  # somebody wrapped the method again after us; we are inert by then
        if self.had_own:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


def arm(owner: Any, name: str, around: Around) -> None:
    """Surround the next call of ``owner.name``; several monitors share one wrapper.

    Args:
        owner: The object whose method is called.
        name: Name of the method.
        around: Makes the context manager; called with the arguments of the call.
    """
    armed = vars(owner).get(name)
    if not isinstance(armed, _OneShot):
        armed = _OneShot(owner, name)
        setattr(owner, name, armed)
    armed.around.append(around)


def disarm(owner: Any, name: str, around: Around) -> None:
    """Undo `arm` if the call did not come; harmless otherwise."""
    armed = vars(owner).get(name)
    if isinstance(armed, _OneShot):
        armed.around = [kept for kept in armed.around if kept != around]
        if not armed.around:
            armed.remove()
