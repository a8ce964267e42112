import importlib.util
from pathlib import Path

import pytest


def load(name):
    """Load a helper next to this file; tests are not a package."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"tests_tensorboard_plugin_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def synthetic():
    return load("synthetic")


@pytest.fixture(scope="session")
def serving():
    return load("serving")


@pytest.fixture
def app():
    """Return a class: log folder -> client of the plugin's routes, on TensorBoard's provider."""
    from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer
    from tensorboard.plugins import base_plugin
    from werkzeug.test import Client

    from entropy_monitor.tensorboard_plugin.plugin import AttentionPlugin

    class Routes:
        def __init__(self, folder):
            self.multiplexer = plugin_event_multiplexer.EventMultiplexer(
                tensor_size_guidance={"entropy_monitor": 1000}
            )
            self.folder = str(folder)
            provider = data_provider.MultiplexerDataProvider(self.multiplexer, self.folder)
            self.plugin = AttentionPlugin(base_plugin.TBContext(data_provider=provider))
            self.apps = self.plugin.get_plugin_apps()
            self.reload()

        def reload(self):
            self.multiplexer.AddRunsFromDirectory(self.folder)
            self.multiplexer.Reload()

        def get(self, route, method="GET", **params):
            client = Client(self.apps[f"/{route}"])
            return client.open(f"/{route}", method=method, query_string=params)

    return Routes
