"""The committed series, tiny series in every layout, and a hub on this machine."""

import hashlib
import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

SERIES = Path(__file__).parents[2] / "examples" / "series"


@pytest.fixture(params=["with-bos", "without-bos"])
def twin(request: pytest.FixtureRequest) -> Path:
    """Each of the two committed series."""
    return SERIES / request.param


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A copy of four checkpoints of a committed series, to be damaged."""
    folder = tmp_path / "series"
    for step in (0, 64, 128, 320):
        shutil.copytree(SERIES / "with-bos" / f"step{step}", folder / f"step{step}")
    for name in ("config.json", "tokens.npy"):
        shutil.copy(SERIES / "with-bos" / name, folder / name)
    return folder


@dataclass
class FakeHub:
    """Serves folders as the revisions of one model, as huggingface_hub expects it.

    Attributes:
        repo: Name of the model.
        revisions: Revision to the folder with its files.
        breaks: (revision, file) to how many of the next downloads stop half-way.
        lies: (revision, file): served with other bytes than announced.
        refuse: How many of the next requests are answered with 503.
        requests: How often each path was asked for, by method and path.
    """

    repo: str
    revisions: dict[str, Path]
    hidden: set[str] = field(default_factory=set)
    breaks: Counter[tuple[str, str]] = field(default_factory=Counter)
    lies: set[tuple[str, str]] = field(default_factory=set)
    refuse: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def commit(self, revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    def find(self, revision: str) -> tuple[str, Path] | None:
        for name, folder in self.revisions.items():
            if revision in (name, self.commit(name)) and name not in self.hidden:
                return name, folder
        return None

    def downloads(self, name: str = "model.safetensors") -> int:
        return sum(
            n for path, n in self.requests.items() if path.startswith("GET") and path.endswith(name)
        )


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = unquote(urlparse(self.path).path)
            hub.requests[f"{self.command} {path}"] += 1
            if hub.refuse > 0:
                hub.refuse -= 1
                self.fail(503, "")
            elif path == f"/api/models/{hub.repo}/refs":
                branches = [
                    {"name": name, "ref": f"refs/heads/{name}", "targetCommit": hub.commit(name)}
                    for name in hub.revisions
                ]
                self.send_json({"branches": branches, "converts": [], "tags": []})
            elif path.startswith(f"/api/models/{hub.repo}/revision/"):
                self.info(path.rsplit("/", 1)[-1])
            elif path.startswith(f"/{hub.repo}/resolve/"):
                _, revision, name = path.rsplit("/", 2)
                self.file(revision, name, body=body)
            else:
                self.fail(404, "RepoNotFound")

        def info(self, revision: str) -> None:
            found = hub.find(revision)
            if found is None:
                self.fail(404, "RevisionNotFound")
                return
            siblings = []
            for file in sorted(found[1].iterdir()):
                data = file.read_bytes()
                entry: dict[str, object] = {
                    "rfilename": file.name,
                    "size": len(data),
                    "blobId": "0" * 40,
                }
                if file.suffix in (".safetensors", ".bin"):
                    sha = hashlib.sha256(data).hexdigest()
                    entry["lfs"] = {"sha256": sha, "size": len(data), "pointerSize": 134}
                siblings.append(entry)
            self.send_json(
                {
                    "id": hub.repo,
                    "modelId": hub.repo,
                    "sha": hub.commit(found[0]),
                    "siblings": siblings,
                }
            )

        def file(self, revision: str, name: str, *, body: bool) -> None:
            found = hub.find(revision)
            if found is None:
                self.fail(404, "RevisionNotFound")
                return
            path = found[1] / name
            if not path.is_file():
                self.fail(404, "EntryNotFound")
                return
            data = path.read_bytes()
            etag = hashlib.sha256(data).hexdigest()
            key = (found[0], name)
            if key in hub.lies:
                data = data[:-1] + bytes([data[-1] ^ 1])
            start = 0
            if body and (header := self.headers.get("Range")):
                start = int(header.removeprefix("bytes=").split("-")[0])
            self.send_response(206 if start else 200)
            self.send_header("X-Repo-Commit", hub.commit(found[0]))
            self.send_header("ETag", f'"{etag}"')
            self.send_header("Content-Length", str(len(data) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.end_headers()
            if not body:
                return
            if hub.breaks[key] > 0:
                hub.breaks[key] -= 1
                self.wfile.write(data[start : start + (len(data) - start) // 2])
                self.close_connection = True
                return
            self.wfile.write(data[start:])

        def send_json(self, content: object) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def fail(self, status: int, code: str) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


@pytest.fixture
def fake_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[dict[str, Path]], FakeHub]]:
    """Make a hub out of folders, and point huggingface_hub to it."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import disable_progress_bars

    servers = []

    def make(revisions: dict[str, Path], repo: str = "owner/tiny") -> FakeHub:
        hub = FakeHub(repo=repo, revisions=revisions)
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        # Older versions have copied it when they were imported.
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        disable_progress_bars()
        return hub

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub_folders(tmp_path: Path) -> dict[str, Path]:
    """Five revisions, each a whole model folder; step1 has the weights of step0."""
    made = {}
    for name, step in (
        ("step0", 0),
        ("step1", 0),
        ("step64", 64),
        ("step128", 128),
        ("step320", 320),
    ):
        folder = tmp_path / "hub" / name
        shutil.copytree(SERIES / "with-bos" / f"step{step}", folder)
        shutil.copy(SERIES / "with-bos" / "config.json", folder)
        made[name] = folder
    return made
