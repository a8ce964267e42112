import numpy as np
import pytest

from entropy_monitor.attribution import split_means
from entropy_monitor.names import CHANGE_NAMES, CHANGE_STAT_NAMES, STAT_NAMES
from entropy_monitor.tensorboard_plugin.history import SPLIT_NAMES, HistoryError, build_history
from entropy_monitor.tensorboard_plugin.layout import Layer, Layout

LAYERS = (("a", 2), ("b", 3))
LAYOUT = Layout(
    stats=(*STAT_NAMES, *CHANGE_STAT_NAMES),
    layers=tuple(Layer(name=name, heads=heads) for name, heads in LAYERS),
)


@pytest.fixture
def tensors(synthetic):
    def make(steps=range(0, 101, 10), baseline_at=None):
        from entropy_monitor.writers.base import as_grid

        baseline = None if baseline_at is None else synthetic.head_means(LAYERS, baseline_at / 100)
        found = []
        for step in steps:
            one = synthetic.emission(
                LAYERS,
                step,
                100,
                baseline=baseline if baseline_at is not None and step >= baseline_at else None,
            )
            change = np.full((4, 5), np.nan, np.float32) if one.change is None else one.change
            found.append((step, as_grid(np.concatenate([one.stats, change]), LAYERS)))
        return found

    return make


def test_steps_are_ordered_and_the_later_of_two_wins(tensors):
    frames = tensors()
    again = frames[3][1] + 1.0
    history = build_history("r", LAYOUT, [*reversed(frames), (30, again)])
    assert history.steps.tolist() == list(range(0, 101, 10))
    np.testing.assert_array_equal(history.frames[3], again[:, LAYOUT.mask])


def test_heads_come_out_in_layer_order(tensors):
    history = build_history("r", LAYOUT, tensors())
    grid = tensors()[4][1]
    np.testing.assert_array_equal(history.stat("sink_mass")[4], [*grid[0, 0, :2], *grid[0, 1, :3]])


def test_change_between_any_two_steps_is_the_attribution(tensors):
    history = build_history("r", LAYOUT, tensors(baseline_at=20))
    means = {name: history.stat(name) for name in SPLIT_NAMES}
    expected = split_means(
        {name: values[3] for name, values in means.items()},
        {name: values[8] for name, values in means.items()},
    )
    for k, name in enumerate(CHANGE_NAMES):
        np.testing.assert_allclose(history.changes(30)[8, k], expected[name], atol=1e-6)


def test_change_closes_for_every_head_and_step(tensors):
    changes = build_history("r", LAYOUT, tensors()).changes(0)
    np.testing.assert_allclose(changes[:, 0], changes[:, 1:].sum(axis=1), atol=2e-6)


def test_without_a_step_the_recorded_change_is_shown(tensors):
    frames = tensors(baseline_at=20)
    # Paired rows give other numbers than the two means: mark them to see where they come from.
    frames = [(step, np.where(np.isfinite(grid), grid, grid)) for step, grid in frames]
    frames[5][1][LAYOUT.stats.index("change_sink")] += 7.0
    history = build_history("r", LAYOUT, frames)
    assert history.baseline == 20
    assert np.isnan(history.changes(None)[0]).all()
    assert (history.changes(None)[5, 1] > 5).all()
    assert (np.abs(history.changes(20)[5, 1]) < 5).all()


def test_the_baseline_is_known_where_its_own_step_was_dropped(tensors):
    layout = Layout(stats=(*LAYOUT.stats, "change_since"), layers=LAYOUT.layers)
    frames = [
        (step, np.concatenate([grid, np.full((1, 2, 3), 20.0, np.float32)]))
        for step, grid in tensors(baseline_at=20)
    ]
    assert build_history("r", layout, frames[5:]).baseline == 20


def test_without_a_recorded_change_the_first_step_counts(tensors):
    history = build_history("r", LAYOUT, tensors())
    assert history.baseline is None
    np.testing.assert_array_equal(history.changes(None), history.changes(0))


def test_a_head_without_counted_rows_has_no_change(tensors):
    frames = tensors()
    frames[4][1][:, 1, 2] = np.nan
    history = build_history("r", LAYOUT, frames)
    assert np.isnan(history.changes(0)[4, :, 4]).all()
    assert np.isfinite(history.changes(0)[4, :, :4]).all()
    assert np.isnan(history.changes(40)[:, :, 4]).all()


def test_what_does_not_fit_is_left_out_and_said(tensors):
    strange = [
        (110, np.zeros((3, 3), np.float32)),
        (115, np.zeros((LAYOUT.shape[0], 4, 3), np.float32)),
        (120, np.zeros(LAYOUT.shape, np.int64)),
        (130, np.array(b"text")),
    ]
    history = build_history("r", LAYOUT, [*tensors(), *strange], notices=("before",))
    assert history.steps[-1] == 100
    assert len(history.notices) == 3
    assert "shape changed in mid-run: steps up to 115" in history.notices[1]
    assert "2 tensors" in history.notices[2]


def test_double_precision_and_infinity_are_taken(tensors):
    frames = [(0, tensors()[0][1].astype(np.float64))]
    frames[0][1][0] = 1e300
    history = build_history("r", LAYOUT, frames)
    assert np.isinf(history.stat("sink_mass")).all()


def test_nothing_at_all():
    history = build_history("r", LAYOUT, [])
    assert len(history.steps) == 0
    assert history.baseline is None


@pytest.mark.parametrize("step", [-1, 5, 10**12])
def test_a_step_that_was_not_recorded(tensors, step):
    with pytest.raises(HistoryError, match="not among"):
        build_history("r", LAYOUT, tensors()).changes(step)


def test_a_change_needs_its_means():
    layout = Layout(stats=("sink_mass",), layers=(Layer(name="a", heads=1),))
    history = build_history("r", layout, [(0, np.zeros((1, 1, 1), np.float32))])
    with pytest.raises(HistoryError, match="was not recorded"):
        history.changes(None)
