"""A real TensorBoard on a free port, as a user starts it."""

import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOADERS = {"rust": "true", "python": "false"}


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def entry_point(folder):
    """Return a path that registers the plugin where the package is not installed, else None."""
    found = importlib.metadata.entry_points(group="tensorboard_plugins")
    if any(entry.name == "entropy_monitor" for entry in found):
        return None
    info = Path(folder) / "entropy_monitor_entry-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: entropy-monitor-entry\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[tensorboard_plugins]\n"
        "entropy_monitor = entropy_monitor.tensorboard_plugin:EntropyMonitorLoader\n"
    )
    return str(folder)


class Server:
    def __init__(self, process, port, log):
        self.process, self.url, self.log = process, f"http://127.0.0.1:{port}", log

    def get(self, route, plugin=True, method="GET"):
        """Return status, body and content type of a route of our plugin (or of TensorBoard)."""
        prefix = "/data/plugin/entropy_monitor/" if plugin else "/"
        request = urllib.request.Request(self.url + prefix + route, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read(), answer.headers.get("Content-Type", "")
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers.get("Content-Type", "")

    def runs(self):
        return {run["name"]: run for run in json.loads(self.get("runs")[1])["runs"]}

    def wait(self, ready, seconds=60):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"TensorBoard ended: {self.log.read_text()[-2000:]}")
            with contextlib.suppress(OSError, ValueError, KeyError):
                if ready(self):
                    return self
            time.sleep(0.1)
        raise TimeoutError(self.log.read_text()[-2000:])


@contextlib.contextmanager
def tensorboard(logdir, tmp, loader="rust", ready=None, path=(), seconds=60):
    """Start TensorBoard and wait until it answers.

    Args:
        ready: What to wait for, a function of the server; by default that it answers at all.
        path: Folders to put in front of PYTHONPATH.
        seconds: How long to wait for `ready`.
    """
    port, log = free_port(), Path(tmp) / f"tensorboard-{loader}.log"
    extra = entry_point(Path(tmp) / "entry")
    paths = [*map(str, path), *([extra] if extra else []), str(ROOT)]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--reload_interval", "1"]
    command += [f"--load_fast={LOADERS[loader]}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=tmp,  # -m puts the current folder in front of PYTHONPATH
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
    try:
        server = Server(process, port, log)
        server.wait(lambda one: one.get("data/plugins_listing", plugin=False)[0] == 200)
        if ready is not None:
            server.wait(ready, seconds)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def has_step(run, step):
    """Return a condition: the run is listed and its last step is there."""

    def ready(server):
        return server.runs()[run]["version"][0] >= step

    return ready
