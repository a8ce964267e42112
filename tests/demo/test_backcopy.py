"""The task: what it draws is checked by counting."""

import json
from pathlib import Path

import numpy as np
import pytest

from entropy_monitor.demo import backcopy
from entropy_monitor.demo.backcopy import Backcopy, Bigrams, load_bigrams


def test_the_bigrams_are_those_of_a_named_public_domain_text():
    bigrams = load_bigrams()
    assert "public domain" in bigrams.source
    assert len(set(bigrams.characters)) == 64
    assert bigrams.counts.shape == (64, 64)
    assert set("ten") <= set(bigrams.characters)
    # The sample is a part of the same novel: its own most common pair must be common there too.
    sample = (Path(backcopy.__file__).parent / "data" / "sample.txt").read_text(encoding="utf-8")
    assert "universally acknowledged" in sample
    t, h = bigrams.characters.index("t"), bigrams.characters.index("h")
    expected = sample.count("th") / sample.count("t")
    assert bigrams.successors[t, h] == pytest.approx(expected, rel=0.1)


def test_probabilities_sum_to_one():
    bigrams = load_bigrams()
    np.testing.assert_allclose(bigrams.successors.sum(axis=1), 1, rtol=1e-12)
    assert bigrams.frequencies.sum() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("bos", [True, False])
def test_a_trigger_copies_and_everything_else_follows_the_bigrams(bos):
    task = Backcopy(bos=bos)
    tokens = task.draw(4000, seed=1)
    start = int(bos)
    assert tokens.shape == (4000, 64)
    assert (tokens[:, 0] == task.bos_token).all() == bos
    assert (tokens[:, start:] < 64).all()

    rows = task.trigger_rows(tokens)
    assert not rows[:, : start + 1].any()
    queries = np.argwhere(rows[:, :-1])
    assert len(queries) > 20_000
    np.testing.assert_array_equal(
        tokens[queries[:, 0], queries[:, 1] + 1], tokens[queries[:, 0], queries[:, 1] - 1]
    )
    # After a space, which is no trigger, characters have the text's frequencies: compare the counts
    # with their binomial error.
    space = task.table.characters.index(" ")
    sequence, position = np.nonzero(tokens[:, start:-1] == space)
    drawn = np.bincount(tokens[sequence, position + start + 1], minlength=64)
    expected = task.table.successors[space]
    error = np.sqrt(len(sequence) * expected * (1 - expected)) + 1
    assert (np.abs(drawn - len(sequence) * expected) < 5 * error).all()


def test_the_first_character_has_the_text_s_frequencies():
    task = Backcopy(bos=True)
    first = np.bincount(task.draw(20_000, seed=2)[:, 1], minlength=64) / 20_000
    np.testing.assert_allclose(first, task.table.frequencies, atol=0.01)


def test_equal_seeds_draw_equal_sequences_and_leave_the_global_state_alone():
    task = Backcopy(bos=True, length=16)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    np.testing.assert_array_equal(task.draw(5, seed=3), task.draw(5, seed=3))
    assert (task.draw(5, seed=3) != task.draw(5, seed=4)).any()
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_own_bigrams_are_used():
    # b always follows a and a follows b; with trigger b the copy gives a as well.
    pairs = Bigrams(characters="ab", counts=np.array([[0, 1], [1, 0]]), source="two letters")
    task = Backcopy(bos=False, length=6, triggers="b", bigrams=pairs)
    assert {task.text(row) for row in task.draw(50, seed=0)} == {"ababab", "bababa"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 3}, "`length` must be at least 4"),
        ({"triggers": "é"}, "`triggers` must be out of"),
    ],
)
def test_bad_tasks_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Backcopy(bos=True, **change)


def test_bad_bigrams_are_refused():
    with pytest.raises(ValueError, match=r"`counts` must be 2 x 2"):
        Bigrams(characters="ab", counts=np.ones((3, 3), dtype=np.int64), source="")
    with pytest.raises(ValueError, match="nothing follows 'b'"):
        Bigrams(characters="ab", counts=np.array([[1, 1], [0, 0]]), source="")


def test_the_data_file_says_how_it_is_made():
    data = json.loads((Path(backcopy.__file__).parent / backcopy.DATA).read_text(encoding="utf-8"))
    assert (Path(__file__).parents[2] / data["made_by"]).is_file()
