"""Names, steps, order, and which checkpoints are chosen."""

from itertools import pairwise

import pytest

from entropy_monitor.replay import ReplayError
from entropy_monitor.replay.checkpoints import Checkpoint, choose, in_order, natural_key, parse_step

PYTHIA = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *range(1000, 144_000, 1000)]


def series(steps):
    return [Checkpoint(name=f"step{s}", step=s, where=f"step{s}") for s in steps]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step0", 0),
        ("step143000", 143000),
        ("checkpoint-500", 500),
        ("epoch=3-step=400.ckpt", 400),
        ("epoch=3-step=400-v1.ckpt", 400),
        ("step=400-epoch=3.ckpt", 400),
        ("global_step1200", 1200),
        ("stage1-step1000-tokens3B", 1000),
        ("iter_0001000", 1000),
        ("checkpoint-2-step400", 400),
        ("step-10k", 10_000),
        ("step2m", 2_000_000),
        ("000250.safetensors", 250),
        ("model_7.bin", 7),
        ("last.ckpt", None),
        ("main", None),
        ("footstep", None),
    ],
)
def test_step_in_a_name(name, step):
    assert parse_step(name) == step


def test_natural_order():
    names = ["step10", "step9", "step100", "step1", "step10-v2"]
    assert sorted(names, key=natural_key) == ["step1", "step9", "step10", "step10-v2", "step100"]


def test_second_checkpoint_of_a_step_is_named_and_not_measured():
    a = Checkpoint(name="epoch=1-step=5.ckpt", step=5, where="a")
    b = Checkpoint(name="epoch=1-step=5-v1.ckpt", step=5, where="b")
    first, second = in_order([b, a])
    assert first.problem is None
    assert "same step as " + first.name in str(second.problem)


def test_all_of_pythia():
    assert len(choose(series(PYTHIA), "all")) == 154


def test_log_at_least_doubles_and_keeps_the_ends():
    steps = [c.step for c in choose(series(PYTHIA), "log")]
    assert steps[:4] == [0, 1, 2, 4]
    assert steps[-1] == 143_000
    inner = steps[1:-1]
    assert all(later >= 2 * earlier for earlier, later in pairwise(inner))


@pytest.mark.parametrize("count", [1, 2, 5, 20, 153, 500])
def test_a_number_of_them(count):
    chosen = [c.step for c in choose(series(PYTHIA), str(count))]
    assert len(chosen) == len(set(chosen)) == min(count, 154)
    assert chosen == sorted(chosen)
    assert chosen[-1] == 143_000
    assert count == 1 or chosen[0] == 0


def test_names_and_steps_in_any_order_with_a_missing_one():
    chosen = choose(series(PYTHIA), "step512, 1000,step3,step0")
    assert [c.name for c in chosen] == ["step0", "step3", "step512", "step1000"]
    assert [c.problem for c in chosen] == [None, "no such revision", None, None]


@pytest.mark.parametrize(
    ("which", "words"), [("step3", "no revision"), ("0", "at least 1"), ("step3,x", "from step0")]
)
def test_nothing_that_exists_is_an_error(which, words):
    steps = [4, 8] if which == "0" else PYTHIA
    with pytest.raises(ReplayError, match=words):
        choose(series(steps), which)


def test_empty_series_is_an_error():
    with pytest.raises(ReplayError, match="holds no checkpoint"):
        choose([], "all")
