"""Reading weights without running code, and their hash.

Formats: safetensors, sharded indexes, ``.bin`` / ``.pt``, Lightning's ``.ckpt``.
Pickles are read with ``weights_only=True``: a file that needs more is reported, never executed.
"""

import hashlib
import json
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_monitor.replay.errors import CheckpointError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_PREFERRED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler", "random_states")


def find_weights(path: Path) -> Path | None:
    """Return the weight file of a checkpoint, or the index of a sharded one, or None."""
    if path.is_file():
        return path if path.suffix in WEIGHT_SUFFIXES else None
    if not path.is_dir():
        return None
    for name in _PREFERRED:
        if (path / name).is_file():
            return path / name
    for suffix in WEIGHT_SUFFIXES:
        files = [f for f in sorted(path.glob(f"*{suffix}")) if not f.name.startswith(_NOT_WEIGHTS)]
        if len(files) == 1:
            return files[0]
    return None


def weight_files(path: Path) -> list[Path]:
    """Return every file that holds weights of a checkpoint; shards in order of name.

    Raises:
        CheckpointError: If there are none, an index cannot be read, or a shard is missing.
    """
    found = find_weights(path)
    if found is None:
        there = (
            "no such path"
            if not path.exists()
            else "no weights (model.safetensors, pytorch_model.bin, *.ckpt)"
        )
        raise CheckpointError("missing", f"{there} in {path.name}")
    if not found.name.endswith(".index.json"):
        return [found]
    try:
        names = sorted(set(json.loads(found.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            "corrupt", f"{found.name} is not an index of shards ({type(error).__name__})"
        ) from None
    if any(Path(name).name != name for name in names):
        raise CheckpointError("corrupt", f"{found.name} points outside its folder")
    files = [found.parent / name for name in names]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise CheckpointError(
            "missing", f"{len(missing)} of {len(files)} shards, first {missing[0]}"
        )
    return files


def weights_size(path: Path) -> int | None:
    """Return the bytes of the weight files, None if they are not all there."""
    try:
        return sum(f.stat().st_size for f in weight_files(path))
    except (CheckpointError, OSError):
        return None


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint to the CPU, as stored.

    Raises:
        CheckpointError: ``missing``, or ``corrupt`` with what is wrong (truncated, not a weight
            file, needs code to load).
    """
    state: dict[str, Tensor] = {}
    for file in weight_files(path):
        state.update(
            _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickled(file)
        )
    if not state:
        raise CheckpointError("corrupt", f"{path.name} holds no tensors")
    return state


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    check_safetensors(file)
    try:
        return dict(load_file(file))
    except Exception as error:
        raise CheckpointError("corrupt", f"{file.name}: {error}") from error


def check_safetensors(file: Path) -> None:
    """Compare a file's length with what its header promises.

    The library's own message names no sizes.

    Raises:
        CheckpointError: If the header is no header, or the file is shorter or longer than it says.
    """
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if 8 + length > size and length < 100_000_000 and handle.read(1) == b"{":
            reason = f"{file.name} is truncated: {size} bytes, its header alone has {8 + length}"
            raise CheckpointError("corrupt", reason)
        if not 2 <= length <= min(size, 100_000_000):
            raise CheckpointError(
                "corrupt", f"{file.name} is not a safetensors file ({size} bytes)"
            )
        try:
            header = json.loads(handle.read(length))
            ends = [
                entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CheckpointError("corrupt", f"{file.name} has a broken header") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        word = "truncated" if size < expected else "too long"
        raise CheckpointError("corrupt", f"{file.name} is {word}: {size} of {expected} bytes")


def _read_pickled(file: Path) -> dict[str, Tensor]:
    content = _load_pickled(file)
    state = content
    if isinstance(content, Mapping):
        for key in ("state_dict", "model_state_dict", "model", "module"):
            if isinstance(content.get(key), Mapping):
                state = content[key]
                break
    if not isinstance(state, Mapping):
        raise CheckpointError(
            "corrupt", f"{file.name} holds a {type(state).__name__}, not a state dict"
        )
    return {str(name): value for name, value in state.items() if isinstance(value, Tensor)}


def _load_pickled(file: Path) -> Any:
    try:
        # mmap: the optimiser state of a Lightning checkpoint is twice the weights and is not read
        # then
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise CheckpointError("corrupt", f"{file.name}: {_first_sentence(error)}") from error
        try:  # written before torch 1.6: not a zip archive, cannot be mapped
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as second:
            raise CheckpointError("corrupt", f"{file.name}: {_first_sentence(second)}") from second
    except pickle.UnpicklingError as error:
        text = str(error)
        if "GLOBAL" in text or "Unsupported" in text:
            what = (
                text.split("GLOBAL", 1)[-1].split(" was ", 1)[0].strip()
                if "GLOBAL" in text
                else "objects"
            )
            reason = (
                f"{file.name} needs code to load ({what}); save its state dict alone, "
                "pickled code is never run"
            )
            raise CheckpointError("corrupt", reason) from error
        raise CheckpointError("corrupt", f"{file.name}: {_first_sentence(error)}") from error
    except Exception as error:
        raise CheckpointError("corrupt", f"{file.name}: {_first_sentence(error)}") from error


def _first_sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text.split(". ", 1)[0][:200]


def peek_step(file: Path) -> int | None:
    """Return ``global_step`` of a Lightning checkpoint, None if it cannot be read."""
    try:
        content = _load_pickled(file)
        return int(content["global_step"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None


def hash_weights(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values, whatever file format they came in.

    Example:
        >>> import torch
        >>> a, b = torch.zeros(2), torch.ones(2)
        >>> hash_weights({"a": a, "b": b}) == hash_weights({"b": b, "a": a})
        True
        >>> hash_weights({"a": a, "b": b}) == hash_weights({"a": b, "b": a})
        False
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
