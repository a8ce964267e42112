"""A place for our own computations in the middle of somebody else's forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode


def recording() -> bool:
    """Whether a CUDA graph is being recorded: whatever we compute or wait for would spoil it."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


@contextmanager
def quiet(device: str, *, function_modes: bool = False) -> Iterator[None]:
    """No gradient, no autocast on this kind of device, no dispatch or function mode of anybody.

    A flop counter of the user does not count what we compute, `torch.set_default_device` does not
    move it. The global random state is not touched here; receivers bring their own generator.
    """
    modes = [_pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
    try:
        functions = nullcontext() if function_modes else torch._C.DisableTorchFunction()
        with torch.no_grad(), functions:
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    yield
            else:
                yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
