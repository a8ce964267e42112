"""What TensorBoard touches at every start, with or without our data."""

import argparse
import subprocess
import sys

import pytest
from tensorboard.plugins import base_plugin

from entropy_monitor.tensorboard_plugin import EntropyMonitorLoader


def test_starting_and_serving_imports_no_torch():
    code = """
import sys
from entropy_monitor.tensorboard_plugin import EntropyMonitorLoader
assert "numpy" not in sys.modules or "tensorboard" in sys.modules
from tensorboard.plugins import base_plugin
plugin = EntropyMonitorLoader().load(base_plugin.TBContext())
assert plugin is not None
assert "/index.js" in plugin.get_plugin_apps()
heavy = {"torch", "lightning", "pytorch_lightning", "transformers", "matplotlib", "pandas"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("error", [ImportError("no"), SyntaxError("no"), RuntimeError("no")])
def test_a_broken_plugin_is_left_out(monkeypatch, error, caplog):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "entropy_monitor.tensorboard_plugin.plugin":
                raise error
            return

    monkeypatch.delitem(sys.modules, "entropy_monitor.tensorboard_plugin.plugin", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert EntropyMonitorLoader().load(base_plugin.TBContext()) is None
    assert "left out" in caplog.text


def test_number_of_steps_kept_respects_the_user():
    flags = argparse.Namespace(samples_per_plugin={"scalars": 5})
    EntropyMonitorLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"scalars": 5, "entropy_monitor": 1000}
    flags = argparse.Namespace(samples_per_plugin={"entropy_monitor": 7})
    EntropyMonitorLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"entropy_monitor": 7}
    EntropyMonitorLoader().fix_flags(argparse.Namespace())
