import math

import numpy as np
import pytest

from entropy_monitor.writers import ConsoleWriter, MemoryWriter, Writer
from entropy_monitor.writers.base import as_grid, clean_tag, clean_tags


def test_shapes_are_checked(make):
    for name, lines in (("change", 4), ("change_se", 4), ("cov", 10)):
        with pytest.raises(
            ValueError, match=rf"`{name}` must have shape \({lines}, 7\).* got \({lines}, 6\)"
        ):
            make(1, **{name: np.zeros((lines, 6))})
    with pytest.raises(ValueError, match="`stats` must have shape"):
        make(1, stat_names=("sink_mass",))


def test_grid_of_layers_without_heads():
    assert as_grid(np.zeros((2, 0)), ()).shape == (2, 0, 0)
    grid = as_grid(np.ones((1, 2)), (("a", 0), ("b", 2)))
    assert np.isnan(grid[0, 0]).all()
    assert (grid[0, 1] == 1).all()


@pytest.mark.parametrize(
    ("tag", "clean"),
    [
        ("attention/sink_mass/h.0", "attention/sink_mass/h.0"),
        ("attention/sink_mass/attn#1", "attention/sink_mass/attn_1"),
        ("attention/x/<script> é", "attention/x/_script___"),
    ],
)
def test_tags_hold_only_what_every_backend_takes(tag, clean):
    assert clean_tag(tag) == clean


def test_tags_that_become_equal_stay_apart_and_undefined_values_are_left_out():
    values = {"a#1": 1.0, "a_1": 2.0, "b": math.nan, "c": math.inf, "d": np.float32(3)}
    assert clean_tags(values) == {"a_1": 1.0, "a_1-2": 2.0, "d": 3.0}


def test_a_tag_does_not_depend_on_whether_another_is_defined():
    assert clean_tags({"a#1": math.nan, "a_1": 2.0}) == {"a_1-2": 2.0}


def test_memory_writer(make):
    writer = MemoryWriter()
    assert isinstance(writer, Writer)
    writer.write(make(1))
    writer.write(make(2, model={"attention/sink_mass": 0.5}))
    writer.close()
    assert writer.steps == [1, 2]
    assert writer.series("attention/sink_mass") == [0.25, 0.5]
    assert math.isnan(writer.series("attention/total_entropy")[1])
    assert writer.grid("support")[0].shape == (3, 4)
    assert writer.closed


def test_console_writer(make, make_alert, capsys):
    writer = ConsoleWriter()
    writer.write(make(10, alerts=[make_alert()]))
    writer.write(make(20, attributed=False, model={}))
    writer.close()
    assert capsys.readouterr().err.splitlines() == [
        "attention, step 10: H 1.50 nat, sink mass 0.250, "
        "since step 0: -1.00 = sink -0.75 + content -0.25",
        "attention, step 10: WARN content entropy fell",
        "attention, step 20: nothing measured",
    ]
