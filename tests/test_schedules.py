import pickle

import pytest

from entropy_monitor.schedules import any_of, every, log_spaced


def steps(schedule, end):
    return [step for step in range(end) if schedule(step)]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
def test_per_decade_are_the_rounded_powers_of_ten(count):
    expected = {0} | {round(10 ** (k / count)) for k in range(4 * count + 1)}
    assert steps(log_spaced(per_decade=count), 10_001) == sorted(expected)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_per_doubling_are_the_rounded_powers_of_two(count):
    expected = {0} | {round(2 ** (k / count)) for k in range(16 * count + 1)}
    assert steps(log_spaced(per_doubling=count), 2**16 + 1) == sorted(expected)


def test_large_exact_powers_are_seen():
    assert all(log_spaced(per_doubling=1)(2**k) for k in range(40))
    assert not any(log_spaced(per_doubling=1)(2**k + 1) for k in range(2, 40))
    assert all(log_spaced(per_decade=1)(10**k) for k in range(12))


def test_every_and_any_of():
    assert steps(every(3), 10) == [0, 3, 6, 9]
    assert steps(any_of(every(6), log_spaced(per_doubling=1)), 13) == [0, 1, 2, 4, 6, 8, 12]
    assert not any_of()(0)


def test_negative_steps_are_never_looked_at():
    assert not log_spaced(per_decade=1)(-1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: every(0), "`n` must be a positive number of steps, got 0"),
        (lambda: log_spaced(), "Exactly one"),
        (lambda: log_spaced(per_decade=1, per_doubling=1), "Exactly one"),
        (lambda: log_spaced(per_decade=0), "positive number, got 0"),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_schedules_are_values():
    schedule = any_of(every(2), log_spaced(per_decade=2))
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert repr(every(2)) == "every(n=2)"
