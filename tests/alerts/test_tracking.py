import json

import numpy as np
import pytest

from entropy_monitor.alerts.tracking import Average, Latch, Noise, pack, unpack


@pytest.mark.parametrize("array", [np.array([1.5, np.nan, -0.0]), np.array([[True, False]]), None])
def test_pack_is_exact_and_plain(array):
    again = unpack(json.loads(json.dumps(pack(array))))
    if array is None:
        assert again is None
    else:
        assert again.dtype == array.dtype
        assert again.tobytes() == array.tobytes()


def test_average_does_not_depend_on_the_cadence():
    """A step response, recorded every 2 and every 10 steps, agrees at common steps."""

    def respond(every):
        average, seen = Average(30.0), {}
        for step in range(0, 401, every):
            seen[step] = average.update(np.array([float(step >= 200)]), float(step))[0]
        return seen

    fine, coarse = respond(2), respond(10)
    for step in (190, 220, 260, 400):
        assert coarse[step] == pytest.approx(fine[step], abs=0.12)
    assert coarse[400] == pytest.approx(1.0, abs=0.01)


def test_average_is_the_plain_mean_at_first():
    average = Average(1e6)
    for step, value in enumerate((1.0, 2.0, 6.0)):
        average.update(np.array([value]), float(step))
    assert average.value[0] == pytest.approx(3.0)


def test_average_leaves_absent_elements_alone():
    whole, gappy = Average(20.0), Average(20.0)
    for step in range(10):
        values = np.array([np.sin(step), np.cos(step)])
        whole.update(values, float(step))
        gappy.update(np.where([True, step not in (3, 4)], values, np.nan), float(step))
    assert gappy.value[0] == pytest.approx(whole.value[0])  # the neighbour's gap does not touch it
    assert np.isfinite(gappy.value[1])


def test_frozen_average_stands_still():
    average = Average(10.0)
    average.update(np.array([1.0]), 0.0)
    average.update(np.array([5.0]), 10.0, frozen=True)
    assert average.value[0] == 1.0


def test_noise_is_that_of_records_whatever_the_trend():
    rng = np.random.default_rng(0)
    noise = Noise(cap=10.0)
    for step in range(400):
        noise.update(np.array([0.05 * rng.standard_normal() + 0.3 * step]))
    assert noise.before((1,))[0] == pytest.approx(0.05, rel=0.4)


def test_a_jump_does_not_hide_itself():
    rng = np.random.default_rng(0)
    noise = Noise(cap=10.0)
    for _ in range(50):
        noise.update(np.array([0.01 * rng.standard_normal()]))
    quiet = noise.before((1,))[0]
    noise.update(np.array([1.0]))
    assert noise.before((1,))[0] < 2.5 * quiet


def test_latch_persists_and_clears_in_steps():
    latch, on_at = Latch(), {}
    for step in range(0, 400, 10):
        on = np.array([100 <= step < 200])
        on_at[step] = latch.update(on, on, float(step), persist=20.0, clear=50.0)[0]
    assert not on_at[100]  # held for the 10 steps since the last record only
    assert on_at[110]
    assert on_at[230]
    assert not on_at[240]


def test_latch_takes_one_record_where_records_are_far_apart():
    latch = Latch()
    latch.update(np.array([False]), np.array([False]), 0.0, persist=20.0, clear=50.0)
    assert latch.update(np.array([True]), np.array([True]), 100.0, persist=20.0, clear=50.0)[0]


def test_latch_forgets_a_condition_that_flickers():
    latch = Latch()
    for step in range(0, 200, 10):
        on = np.array([step % 20 == 0])
        active = latch.update(on, on, float(step), persist=20.0, clear=50.0)
    assert not active[0]
