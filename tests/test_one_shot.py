"""There for one call, gone before it begins."""

from contextlib import contextmanager

import pytest

from entropy_monitor.one_shot import arm, disarm


class Host:
    def step(self, x):
        self.installed = "step" in vars(self)
        return x + 1


def around(log, name):
    @contextmanager
    def surround(*args, **kwargs):
        log.append((name, args))
        yield
        log.append(name)

    return surround


def test_surrounds_the_next_call_alone():
    host, log = Host(), []
    arm(host, "step", around(log, "a"))
    assert host.step(1) == 2
    assert host.installed is False
    assert host.step(2) == 3
    assert log == [("a", (1,)), "a"]


def test_several_share_one_wrapper_and_can_leave_in_any_order():
    host, log = Host(), []
    first, second = around(log, "a"), around(log, "b")
    arm(host, "step", first)
    arm(host, "step", second)
    disarm(host, "step", first)
    host.step(1)
    assert log == [("b", (1,)), "b"]
    arm(host, "step", first)
    disarm(host, "step", first)
    assert "step" not in vars(host)
    disarm(host, "step", first)


def test_an_exception_leaves_nothing():
    class Broken:
        def step(self):
            raise KeyboardInterrupt

    host, log = Broken(), []
    arm(host, "step", around(log, "a"))
    with pytest.raises(KeyboardInterrupt):
        host.step()
    assert vars(host) == {}


def test_a_users_own_patch_is_put_back():
    host, log = Host(), []
    patch = lambda x: x * 10  # noqa: E731
    host.step = patch
    arm(host, "step", around(log, "a"))
    assert host.step(2) == 20
    assert host.step is patch


def test_a_patch_on_top_of_ours_is_left_alone():
    host, log = Host(), []
    arm(host, "step", around(log, "a"))
    ours = host.step
    patch = lambda x: ours(x) * 10  # noqa: E731
    host.step = patch
    assert host.step(1) == 20
    assert host.step is patch
