"""Models whose parameters or heads lie on several processes: FSDP2 and tensor parallelism."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from entropy_monitor import AttentionMonitor
from entropy_monitor.pipeline import EntropyMonitorWarning
from entropy_monitor.probe import Probe
from tests.distributed.ranks import make_ids, make_model, run_ranks
from tests.distributed.test_reduce import assert_equal, measured, numbers, same

pytestmark = pytest.mark.distributed

PLAN = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "o": RowwiseParallel}


def watch(model, **options):
    return AttentionMonitor(model, **{"rows": None, "on_error": "raise", **options})


def shard(model, mesh, *, each=False):
    for block in model.blocks:
        for part in (block.q, block.k, block.v) if each else ():
            fully_shard(part, mesh=mesh)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def share(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {name: style() for name, style in PLAN.items()})
    return model


def sharded(rank, each):
    model = shard(make_model(), init_device_mesh("cpu", (2,)), each=each)
    monitor = watch(model)
    ids = make_ids(batch=6)[rank::2]
    with monitor.observe(0):
        loss = model(ids).square().mean()
    loss.backward()
    return numbers(monitor.reduced_snapshot())


@pytest.mark.parametrize("each", [False, True], ids=["block", "projections"])
def test_fsdp2(each):
    """Also where projections are wrapped one by one: they lie in parts again when attention
    runs."""
    found = same(run_ranks(sharded, 2, each))
    assert_equal(found, numbers(measured(make_ids(batch=6)).snapshot()))


def shared(rank, rows, options):
    model = share(make_model(), init_device_mesh("cpu", (2,)))
    if options == "group":
        options = {"head_group": dist.group.WORLD}
    elif options == "mesh":
        options = {"head_group": init_device_mesh("cpu", (2,))}
    monitor = watch(model, rows=rows, **options)
    with monitor.observe(0):
        model(make_ids(length=30))
    own = {name: sums.heads for name, sums in monitor.snapshot().sums.items()}
    assert own == {"blocks.0": 2, "blocks.1": 2}
    return numbers(monitor.reduced_snapshot())


@pytest.mark.parametrize("rows", [None, 4])
@pytest.mark.parametrize("options", [{}, "group", "mesh"], ids=str)
def test_tensor_parallel_heads_stand_one_after_the_other(rows, options):
    found = same(run_ranks(shared, 2, rows, options))
    assert_equal(found, numbers(measured(make_ids(length=30), rows=rows).snapshot()))


def in_two_dimensions(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = shard(share(make_model(), mesh["tp"]), mesh["dp"])
    monitor = watch(model, rows=4)
    with monitor.observe(0):
        model(make_ids(batch=6, length=30)[mesh["dp"].get_local_rank() :: 2])
    return numbers(monitor.reduced_snapshot())


def test_tensor_parallel_within_fsdp2():
    found = same(run_ranks(in_two_dimensions, 4))
    assert_equal(found, numbers(measured(make_ids(batch=6, length=30), rows=4).snapshot()))


def probed(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = share(make_model(), mesh["tp"])
    monitor = watch(model)
    Probe(make_ids()).run(model, monitor, 7)
    snapshot = monitor.probed_snapshot(7)
    assert snapshot.step == 7
    return numbers(snapshot)


def test_a_probe_of_shared_heads_counts_every_copy_once():
    found = same(run_ranks(probed, 4))
    assert_equal(found, numbers(measured(make_ids()).snapshot()), groups=False)


def by_hand(rank):
    """Heads shared without a trace in the parameters, as hand-written tensor-parallel code does."""
    model = make_model()
    for block in model.blocks:
        block.num_heads = 4
        for name in ("q", "k", "v"):
            whole = getattr(block, name)
            half = torch.nn.Linear(16, 8, dtype=torch.float64)
            half.load_state_dict(
                {key: value.chunk(2)[rank] for key, value in whole.state_dict().items()}
            )
            setattr(block, name, half)
        block.o = torch.nn.Linear(8, 16, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for group in ("auto", None, dist.group.WORLD):
            monitor = watch(model, head_group=group)
            with monitor.observe(0):
                model(make_ids())
    told = [str(w.message) for w in caught if w.category is EntropyMonitorWarning]
    first = numbers(monitor.reduced_snapshot())["blocks.0"]
    return told, first


def test_heads_shared_by_hand_are_noticed():
    (told, first), _ = run_ranks(by_hand, 2)
    assert len(told) == 2  # one per layer, with "auto" alone
    assert "blocks.0 states 4 heads, but 2 were seen on this process" in told[0]
    assert "head_group" in told[0]
    whole = numbers(measured(make_ids()).snapshot())["blocks.0"]
    assert_equal({"blocks.0": first}, {"blocks.0": whole})
