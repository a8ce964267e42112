"""Snapshots of several processes: the numbers of one process on all batches, and nobody waits in
vain."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from entropy_monitor import AttentionMonitor, distributed
from entropy_monitor.alerts import Alert
from entropy_monitor.pipeline import Pipeline
from entropy_monitor.snapshot import HeadSums, Snapshot
from tests.distributed.ranks import make_ids, make_model, run_ranks

pytestmark = pytest.mark.distributed


def measured(ids=None, step=0, **options):
    """A monitor that has observed a batch, or none."""
    monitor = AttentionMonitor(make_model(), **{"rows": None, "on_error": "raise", **options})
    if ids is not None:
        with monitor.observe(step):
            monitor.model(ids)
    return monitor


def numbers(snapshot):
    """Everything in a snapshot, as plain arrays."""
    return {name: (sums.packed().numpy(), sums.slots) for name, sums in snapshot.sums.items()}


def assert_equal(parts, whole, *, groups=True):
    assert list(parts) == list(whole)
    for name, (lines, slots) in whole.items():
        mine, width = parts[name][0], HeadSums(1).sums.shape[1]
        assert parts[name][1] == slots
        columns = slice(None) if groups else [*range(width), -1]
        torch.testing.assert_close(
            torch.tensor(mine[:, columns]), torch.tensor(lines[:, columns]), rtol=1e-12, atol=1e-12
        )


def reduced(rank, batches, options):
    ids = batches[rank]
    return numbers(measured(ids, **options).reduced_snapshot(0))


def same(answers):
    """The answer of all ranks, which must be the same bit for bit."""
    for other in answers[1:]:
        assert list(other) == list(answers[0])
        for name, (lines, slots) in answers[0].items():
            assert (other[name][0] == lines).all()
            assert other[name][1] == slots
    return answers[0]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("rows", [None, 4])
def test_equals_one_process_on_the_union(world, rows):
    """Also the groups for standard errors and which rows are drawn: sequences are dealt out in
    turn."""
    ids = make_ids(batch=4 * world, length=40)
    parts = same(
        run_ranks(reduced, world, [ids[rank::world] for rank in range(world)], {"rows": rows})
    )
    assert_equal(parts, numbers(measured(ids, rows=rows).snapshot()))


def test_uneven_batches():
    ids = make_ids(batch=7)
    parts = same(run_ranks(reduced, 3, [ids[:1], ids[1:3], ids[3:]], {}))
    assert_equal(parts, numbers(measured(ids).snapshot()), groups=False)


def test_a_rank_without_a_batch():
    ids = make_ids()
    parts = same(run_ranks(reduced, 2, [None, ids], {}))
    assert_equal(parts, numbers(measured(ids).snapshot()), groups=False)
    assert same(run_ranks(reduced, 2, [None, None], {})) == {}


def different_layers(rank, names):
    return numbers(measured(make_ids(), layers=names[rank]).reduced_snapshot())


def test_ranks_with_different_layers():
    """Pipeline stages: the union, in the order of rank 0, on all ranks."""
    both = same(run_ranks(different_layers, 2, ["blocks.1", "blocks.0"]))
    assert list(both) == ["blocks.1", "blocks.0"]
    whole = numbers(measured(make_ids()).snapshot())
    assert_equal(both, {name: whole[name] for name in both}, groups=False)
    some = same(run_ranks(different_layers, 2, ["blocks.*", "blocks.0"]))
    assert some["blocks.0"][1] == 2 * some["blocks.1"][1] == 8


def alerts(rank):
    heard = []

    def together(alert: Alert):
        heard.append(alert)

    together.all_ranks = True
    pipeline = Pipeline(on_alert=[together], on_error="raise")
    ranks = distributed.Ranks()
    for step in range(3):
        monitor = measured()
        if step == 2 and rank == 1:
            with torch.no_grad():
                monitor.model.blocks[1].q.weight.fill_(torch.nan)
        with monitor.observe(step):
            monitor.model(make_ids(seed=rank))
        snapshot = ranks.reduce(monitor.snapshot())
        emission = pipeline.emit(snapshot, write=rank == 0, agree=ranks.agree)
    return [alert.to_dict() for alert in emission.alerts], [alert.to_dict() for alert in heard]


def test_alerts_are_the_same_on_all_ranks():
    first, second = run_ranks(alerts, 2)
    assert first == second
    decided, acted_on = first
    assert any(a["kind"] == "nonfinite" and a["layer"] == "blocks.1" for a in decided)
    assert decided == acted_on


def lonely_alert(rank):
    """One rank cannot judge: no rank may stop on its own."""
    heard = []

    def stop(alert: Alert):
        heard.append(alert.step)

    stop.all_ranks = True
    pipeline, ranks = Pipeline(on_alert=[stop]), distributed.Ranks()
    if rank == 1:
        pipeline._engine = None
    for step in range(3):
        monitor = measured()
        with torch.no_grad():
            monitor.model.blocks[1].q.weight.fill_(torch.nan)
        with monitor.observe(step):
            monitor.model(make_ids())
        pipeline.emit(ranks.reduce(monitor.snapshot()), write=rank == 0, agree=ranks.agree)
    return heard


def test_what_all_ranks_do_is_decided_by_one():
    first, second = run_ranks(lonely_alert, 2)
    assert first == second
    assert first


def disagreement(rank, what):
    ranks = distributed.Ranks()
    if what == "steps":
        monitor = measured(make_ids(), step=rank)
        snapshot = monitor.snapshot()
    else:
        snapshot = Snapshot(step=0, sums={"layer": HeadSums(2 + rank)})
    with pytest.raises(
        ValueError, match="all ranks must measure" if what == "steps" else "same heads"
    ):
        ranks.reduce(snapshot)
    with pytest.raises(RuntimeError, match="no longer"):
        ranks.reduce(snapshot)


@pytest.mark.parametrize("what", ["steps", "heads"])
def test_ranks_that_disagree_all_say_so(what):
    run_ranks(disagreement, 2, what)


def one_leaves(rank):
    monitor, other = measured(make_ids()), measured(make_ids())
    monitor.reduced_snapshot()
    if rank == 1:
        monitor.ranks.leave()
        monitor.ranks.leave()
    else:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 switched its monitor off"):
            monitor.reduced_snapshot()
        assert time.monotonic() - start < 60
    other.reduced_snapshot()  # monitors do not share the line
    total = torch.ones(1)
    dist.all_reduce(total)  # the host's own group is none the worse
    return total.item()


def test_a_rank_that_leaves_keeps_nobody_waiting():
    assert run_ranks(one_leaves, 2) == [2, 2]


def one_leaves_unheard(rank):
    ranks = distributed.Ranks()
    ranks.prepare()
    if rank == 1:
        ranks.leave()
    dist.barrier()


def test_leaving_unheard_does_not_keep_a_process_from_ending():
    run_ranks(one_leaves_unheard, 2, limit=60)


def never_comes(rank):
    distributed.PATIENCE = timedelta(seconds=3)
    monitor = measured(make_ids())
    monitor.ranks.prepare()
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError):
            monitor.reduced_snapshot()
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_a_rank_that_never_comes_costs_the_time_limit_and_the_monitor_only():
    assert run_ranks(never_comes, 2) == [2, 2]


def parts(rank):
    found = []
    for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]):
        handles = [dist.new_group(group) for group in groups]
        mine = next(h for h, group in zip(handles, groups, strict=True) if rank in group)
        part = distributed.head_part(make_model(), mine)
        found.append((part.index, part.count, part.replica, part.replicas))
    return found


def test_head_groups_in_any_order_of_ranks():
    adjacent, strided, irregular = zip(*run_ranks(parts, 4), strict=True)
    assert adjacent == ((0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2))
    assert strided == ((0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2))
    assert irregular == ((0, 2, 0, 4), (0, 2, 1, 4), (1, 2, 1, 4), (1, 2, 0, 4))


def outside(rank):
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(ValueError, match="`head_group` must contain rank 1"):
            distributed.head_part(make_model(), group)
        with pytest.raises(ValueError, match="`head_group` must contain rank 1"):
            measured(make_ids(), head_group=group)


def test_a_rank_outside_its_head_group_is_told():
    run_ranks(outside, 3)
