"""Asking torch.compile to step aside while a window is open."""

import sys
import threading
from typing import Any

import torch


class Stances:
    """Sets the stance "force_eager" for the first window that wants it, restores it after the last.

    The setting is one per process, hence the count: monitors close in opening order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: list[object] = []
        self._stance: Any = None

    def enter(self, window: object) -> None:
        """Nothing happens as long as nothing can have been compiled."""
        if "torch._dynamo" not in sys.modules:
            return
        with self._lock:
            if not self._holders:
                self._stance = torch.compiler.set_stance("force_eager")
            self._holders.append(window)

    def leave(self, window: object) -> None:
        """Undo `enter`; harmless without it."""
        with self._lock:
            if window in self._holders:
                self._holders.remove(window)
                if not self._holders:
                    self._stance.__exit__(None, None, None)
                    self._stance = None
