"""Sums of all ranks become one snapshot, the same on every rank.

Called once per emission, outside the forward pass, by every rank: a rank that saw no attention or
had no batch takes part with nothing. Layouts are exchanged first (a few names), then one sum and
one maximum over a tensor of the union of the layers, so that the order of ranks does not matter and
ranks with different layers do not hang.
"""

import torch
import torch.distributed as dist

from entropy_monitor.snapshot import HeadSums, Snapshot


def world() -> tuple[int, int]:
    """Rank and number of processes; ``(0, 1)`` outside a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def reduce_snapshot(snapshot: Snapshot) -> Snapshot:
    """Add up the snapshots of all ranks.

    Args:
        snapshot: This rank's part, possibly without any layer.

    Returns:
        The snapshot of all ranks together, equal on every rank; the argument itself outside a
        process group. Per-row values stay those of this rank.

    Raises:
        ValueError: If ranks disagree on the number of heads of a layer.
    """
    _, size = world()
    if size == 1:
        return snapshot
    layouts: list[list[tuple[str, int, int]]] = [[] for _ in range(size)]
    mine = [(name, sums.heads, sums.slots) for name, sums in snapshot.sums.items()]
    dist.all_gather_object(layouts, mine)
    heads: dict[str, int] = {}
    slots: dict[str, int] = {}
    for layout in layouts:  # rank 0's order first: the same on all ranks
        for name, count, seen in layout:
            if heads.setdefault(name, count) != count:
                raise ValueError(
                    f"layer {name} must have the same heads on all ranks; "
                    f"got {heads[name]} and {count}."
                )
            slots[name] = slots.get(name, 0) + seen
    if not heads:
        return snapshot
    parts = [
        (snapshot.sums[name] if name in snapshot.sums else HeadSums(count)).packed()
        for name, count in heads.items()
    ]
    packed = torch.cat(parts).to(_device())
    sums, largest = packed[:, :-1].contiguous(), packed[:, -1].contiguous()
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    packed = torch.cat([sums, largest[:, None]], dim=1).cpu()
    merged: dict[str, HeadSums] = {}
    start = 0
    for name, count in heads.items():
        merged[name] = HeadSums.unpack(packed[start : start + count], slots[name])
        start += count
    return Snapshot(step=snapshot.step, sums=merged, rows=snapshot.rows)


def _device() -> torch.device:
    backend = str(dist.get_backend())
    return (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in backend
        else torch.device("cpu")
    )
