"""Parts of all ranks become one snapshot, the same on every rank.

Called once per emission, outside the forward pass, by every rank: a rank that saw no attention or
had no batch takes part with nothing. Layouts are exchanged first (a few names), then one sum over
the union of the layers, so that the order of ranks does not matter and ranks with different layers
do not hang.

All of it goes through a process group of its own, gloo on the CPU: it cannot be mixed up with what
the host sends, needs no device, and has a time limit. A rank that does not come costs the others
`PATIENCE` and then their monitor, never the run.

Where ranks share the heads of a layer (tensor parallel), each measures its own heads on the same
sequences. Adding them up would be wrong: they are set one after the other, in the order of ranks.
"""

import pickle
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from entropy_monitor.snapshot import HeadSums, Snapshot

PATIENCE = timedelta(minutes=5)
"""How long a rank waits for the others; below the limit after which the host gives up (10 min)."""

T = TypeVar("T")

_LEFT = -1


def world() -> tuple[int, int]:
    """Rank and number of processes; ``(0, 1)`` outside a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@dataclass(frozen=True, kw_only=True)
class HeadPart:
    """Which heads of a layer this rank measures, and of which sequences.

    Attributes:
        index: The rank's heads are part `index` of the layer's heads ...
        count: ... out of `count` equal parts; 1 where every rank sees all heads.
        replica: The rank's sequences are batch number `replica` ...
        replicas: ... out of `replicas` that are measured at the same time.
    """

    index: int = 0
    count: int = 1
    replica: int = 0
    replicas: int = 1

    def slot(self, sequence: int) -> int:
        """Number over all ranks of a sequence that is number `sequence` on this one."""
        return sequence * self.replicas + self.replica


def head_part(module: nn.Module, group: Any = "auto") -> HeadPart:
    """Find out which heads of a layer this rank measures.

    Args:
        module: The module that computes the attention, while it runs.
        group: The ranks that share the heads, in the order of their heads: a process group or a
            one-dimensional device mesh; None if every rank sees all heads; ``"auto"`` looks for
            parameters of the module that are sharded over a device mesh (`DTensor`), as
            ``parallelize_module`` leaves them. What FSDP shards is whole while the module runs.

    Returns:
        This rank's part.

    Raises:
        ValueError: If this rank is not one of the group.
    """
    rank, size = world()
    ranks = _sharing_ranks(module) if group == "auto" else _ranks(group)
    if size == 1 or len(ranks) < 2:
        return HeadPart(replica=rank, replicas=size)
    count, stride = len(ranks), ranks[1] - ranks[0]
    block = abs(stride) * count
    regular = ranks == list(range(ranks[0], ranks[0] + block, abs(stride)))
    if regular and ranks[0] % block < stride and size % block == 0:  # one axis of a mesh
        replica, replicas = rank // block * stride + rank % stride, size // count
    else:
        replica, replicas = min(ranks), size  # numbers with gaps do as well
    return HeadPart(index=ranks.index(rank), count=count, replica=replica, replicas=replicas)


class Ranks:
    """The line of one monitor to its like on the other ranks.

    Every rank must use it in the same order. After an error it stays closed, so that ranks cannot
    talk past each other; monitors have one each, so that one that fails does not end the others.
    """

    def __init__(self) -> None:
        self._line: _Line | None = None
        self._closed = False

    def prepare(self) -> None:
        """Open the line; every rank must call it. Otherwise the first use does."""
        if world()[1] > 1 and self._line is None:
            self._line = _Line()

    def leave(self) -> None:
        """Tell the other ranks that this one takes no part any more, without waiting for them.

        Their next use raises at once, instead of waiting for a rank that never comes.
        """
        if world()[1] == 1 or self._closed:
            return
        line = self._ready()
        self._closed = True
        line.gather(torch.tensor([_LEFT], dtype=torch.int64, device=line.device), wait=False)

    def agree(self, value: T) -> T:
        """Rank 0's value, on every rank.

        Raises:
            RuntimeError: If a rank left or did not come in time.
        """
        rank, size = world()
        if size == 1:
            return value
        with self._closing() as line:
            said: T = pickle.loads(line.exchange(pickle.dumps(value if rank == 0 else None))[0])
        return said

    def reduce(self, snapshot: Snapshot, parts: Mapping[str, HeadPart] | None = None) -> Snapshot:
        """Put the snapshots of all ranks together.

        Args:
            snapshot: This rank's part, possibly without any layer.
            parts: Which heads of a layer the rank measured, by layer; all of them where not said.

        Returns:
            The snapshot of all ranks together, equal on every rank; the argument itself outside a
            process group. Per-row values stay those of this rank, and are left out where ranks
            share heads.

        Raises:
            ValueError: If ranks disagree on the heads of a layer or on the step.
            RuntimeError: If a rank left or did not come in time, or after such an error.
        """
        if world()[1] == 1:
            return snapshot
        mine = pickle.dumps((snapshot.step, _layout(snapshot, parts or {})))
        with self._closing() as line:
            said = [pickle.loads(answer) for answer in line.exchange(mine)]
            steps = sorted({step for step, _ in said if step is not None})
            if len(steps) > 1:
                raise ValueError(
                    "all ranks must measure the same step, a schedule may depend on nothing else; "
                    f"got steps {', '.join(map(str, steps))}."
                )
            layers = _union([layout for _, layout in said])
            sums = _own_sums(snapshot, layers, parts or {})
            if len(sums):
                sums = line.add(sums)
        merged: dict[str, HeadSums] = {}
        start = 0
        for name, layer in layers.items():
            lines = torch.cat([sums[start : start + layer.total], layer.largest()[:, None]], dim=1)
            merged[name] = HeadSums.unpack(lines, layer.slots)
            start += layer.total
        shared = any(len(layer.heads) > 1 for layer in layers.values())
        return Snapshot(step=snapshot.step, sums=merged, rows={} if shared else snapshot.rows)

    @contextmanager
    def _closing(self) -> Iterator["_Line"]:
        """The line, which closes at an error: what the other ranks would answer is unknown then."""
        line = self._ready()
        try:
            yield line
        except Exception:
            self._closed = True
            raise

    def _ready(self) -> "_Line":
        if self._line is not None and self._line.world() is not dist.group.WORLD:
            self._line, self._closed = None, False  # of an earlier process group
        if self._closed:
            raise RuntimeError("the ranks no longer add up what they measure")
        self.prepare()
        assert self._line is not None
        return self._line


@dataclass(frozen=True)
class _Said:
    """What a rank says of one layer."""

    name: str
    part: int
    parts: int
    slots: int
    largest: list[float]


class _Layer:
    """What all ranks together know of one layer."""

    def __init__(self, name: str, parts: int) -> None:
        self.name = name
        self.heads: list[int | None] = [None] * parts
        self._slots = [0] * parts
        self._largest: list[Any] = [None] * parts

    def add(self, said: _Said) -> None:
        count, known = len(said.largest), self.heads[said.part % len(self.heads)]
        if said.parts != len(self.heads) or known not in (None, count):
            raise ValueError(
                f"layer {self.name} must have the same heads on all ranks; got {known} and {count} "
                f"heads in {len(self.heads)} and {said.parts} parts."
            )
        self.heads[said.part] = count
        self._slots[said.part] += said.slots
        largest = self._largest[said.part]
        values = np.array(said.largest)
        self._largest[said.part] = values if largest is None else np.maximum(largest, values)

    @property
    def slots(self) -> int:
        return max(self._slots)

    @property
    def sizes(self) -> list[int]:
        # A part that no rank measured has the size of the others: parts are equal.
        most = max(heads for heads in self.heads if heads is not None)
        return [most if heads is None else heads for heads in self.heads]

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def largest(self) -> Tensor:
        parts = [
            np.full(size, -np.inf) if part is None else part
            for size, part in zip(self.sizes, self._largest, strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts))


def _layout(snapshot: Snapshot, parts: Mapping[str, HeadPart]) -> list[_Said]:
    said = []
    for name, sums in snapshot.sums.items():
        part = parts.get(name, HeadPart())
        largest = sums.largest.double().tolist()
        said.append(_Said(name, part.index, part.count, sums.slots, largest))
    return said


def _union(layouts: list[list[_Said]]) -> dict[str, _Layer]:
    layers: dict[str, _Layer] = {}
    for layout in layouts:  # rank 0's order first: the same on all ranks
        for said in layout:
            layers.setdefault(said.name, _Layer(said.name, said.parts)).add(said)
    return layers


def _own_sums(
    snapshot: Snapshot, layers: Mapping[str, _Layer], parts: Mapping[str, HeadPart]
) -> Tensor:
    """``(heads of all layers, columns)`` float64: this rank's sums in their place, zeros around."""
    width = HeadSums(1).packed().shape[1] - 1
    sums = torch.zeros(sum(layer.total for layer in layers.values()), width, dtype=torch.float64)
    start = 0
    for name, layer in layers.items():
        if name in snapshot.sums:
            own = snapshot.sums[name].packed()[:, :-1]
            first = start + sum(layer.sizes[: parts.get(name, HeadPart()).index])
            sums[first : first + len(own)] = own
        start += layer.total
    return sums


class _Line:
    """A process group and what travels on it."""

    def __init__(self) -> None:
        self.world = weakref.ref(dist.group.WORLD)
        self.device = torch.device("cpu")
        self.group = dist.group.WORLD
        if dist.is_gloo_available():
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
        elif "nccl" in str(dist.get_backend()):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._unanswered: list[Any] = []

    def gather(self, own: Tensor, *, wait: bool = True) -> list[Tensor]:
        """The tensors of all ranks, of equal shape."""
        answers = [torch.empty_like(own) for _ in range(world()[1])]
        work = dist.all_gather(answers, own, group=self.group, async_op=not wait)
        if not wait:
            self._unanswered.append((work, answers, own))
        return answers

    def exchange(self, own: bytes) -> list[bytes]:
        """The messages of all ranks."""
        sizes = [int(size) for size in self.gather(torch.tensor([len(own)], device=self.device))]
        if _LEFT in sizes:
            raise RuntimeError(f"rank {sizes.index(_LEFT)} switched its monitor off")
        message = torch.zeros(max(sizes), dtype=torch.uint8)
        message[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        answers = self.gather(message.to(self.device))
        return [
            answer[:size].cpu().numpy().tobytes()
            for answer, size in zip(answers, sizes, strict=True)
        ]

    def add(self, own: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each."""
        total = own.to(self.device)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.group)
        return total.cpu()


def _ranks(group: Any) -> list[int]:
    if group is None or not dist.is_available() or not dist.is_initialized():
        return []
    if hasattr(group, "get_group"):  # a device mesh
        group = group.get_group()
    ranks = [] if isinstance(group, int) else list(dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:  # `new_group` gives a number to those who are outside
        raise ValueError(f"`head_group` must contain rank {dist.get_rank()}; got {ranks or group}.")
    return ranks


def _sharing_ranks(module: nn.Module) -> list[int]:
    """Ranks over which parameters of the module are sharded now; empty if they are whole."""
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None:
        return []
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    # Inside a running module, a child that FSDP wraps on its own has been sharded again already.
    resting = {
        id(parameter)
        for child in module.modules()
        if child is not module and isinstance(child, fsdp)
        for parameter in child.parameters()
    }
    for parameter in module.parameters():
        if id(parameter) in resting or not isinstance(parameter, tensors.DTensor):
            continue
        for axis, placement in enumerate(parameter.placements):
            if placement.is_shard() and parameter.device_mesh.size(axis) > 1:
                return _ranks(parameter.device_mesh.get_group(axis))
    return []
