"""A real Chromium on a real TensorBoard, on a run of a Trainer and on runs made of arithmetic."""

import importlib.util
import os
import shutil
import warnings
from pathlib import Path

import pytest

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HELPERS = Path(__file__).parents[1] / "tensorboard_plugin"
LAYERS = tuple((f"model.layers.{i}.self_attn", 4) for i in range(6))
LAST = 200


def load(name):
    spec = importlib.util.spec_from_file_location(f"tests_browser_{name}", HELPERS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def synthetic():
    return load("synthetic")


@pytest.fixture(scope="session")
def serving():
    return load("serving")


@pytest.fixture(scope="session")
def chromium():
    """Chromium under playwright; skips where one of them is missing."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on this machine (apt-get install chromium, or set CHROMIUM)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class Tab:
    """A page with the tab in it, and everything that went wrong on it."""

    def __init__(self, page, origin):
        self.page, self.origin = page, origin
        self.errors, self.foreign = [], []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._console)
        page.on("request", self._request)
        self.frame = page

    def _console(self, message):
        if message.type == "error":
            self.errors.append(message.text)

    def _request(self, request):
        if not request.url.startswith((self.origin, "data:", "blob:")):
            self.foreign.append(request.url)

    def shell(self, hash_="", dark=False):
        """Open TensorBoard itself and go to the tab."""
        self.page.goto(f"{self.origin}/?darkMode={str(dark).lower()}#entropy_monitor{hash_}")
        self.page.wait_for_selector("iframe", timeout=60_000)
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('iframe')].some("
            "f => f.contentDocument?.querySelector('#em-root'))",
            timeout=60_000,
        )
        self.frame = next(f for f in self.page.frames if "plugin_entry" in f.url)
        return self.ready()

    def alone(self, hash_="", state="ready"):
        """Open the tab's own page without TensorBoard around it, which is much faster."""
        # Browsers ask for an icon of a page of its own; TensorBoard has none at that address.
        self.page.route("**/favicon.ico", lambda route: route.fulfill(status=204))
        self.page.goto(f"{self.origin}/data/plugin_entry.html?name=entropy_monitor#{hash_}")
        self.frame = self.page
        return self.ready(state)

    def ready(self, state="ready"):
        self.frame.wait_for_selector(f"#em-root[data-state={state}]", timeout=60_000)
        return self

    def text(self, selector):
        return self.frame.locator(selector).first.inner_text()

    def hash(self):
        """The address's hash, which the page writes a moment after the last change."""
        self.page.wait_for_timeout(250)
        return self.page.evaluate("() => location.hash")

    def assert_clean(self):
        assert self.errors == []
        assert self.foreign == []


@pytest.fixture
def open_tab(chromium):
    """Return a function: server (or origin), width, height -> Tab in a fresh profile."""
    contexts = []

    def make(server, width=1600, height=1000, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(30_000)
        contexts.append(context)
        return Tab(context.new_page(), getattr(server, "url", server))

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def made_log(tmp_path_factory, synthetic):
    """Two runs to compare, a ragged one, one with too many alerts, a hostile one."""
    from entropy_monitor.alerts.alert import Alert

    root = tmp_path_factory.mktemp("made")
    steps = range(0, LAST + 1, 10)
    synthetic.write_run(root / "fast", LAYERS, steps, baseline_at=20)
    synthetic.write_run(root / "slow", LAYERS[:5], steps, drift=0.4, alerts=[])
    ragged = (
        ("encoder.0.self", 6),
        ("decoder.0.self", 3),
        ("decoder.0.cross", 2),
        ("decoder.0.cross#1", 2),
    )
    synthetic.write_run(root / "ragged", ragged, [0, 10, 20])
    many = [
        Alert(
            kind="concentration",
            severity="warn",
            level="head",
            step=10,
            layer=LAYERS[1][0],
            head=i % 4,
            message=f"Number {i}.",
        )
        for i in range(640)
    ]
    synthetic.write_run(root / "many", LAYERS, [0, 10, 20], alerts=many)
    markup = "<img src=x onerror=\"document.title='owned'\">"
    bad = Alert(
        kind="dilution", severity="warn", level="layer", step=0, layer=markup, message=markup
    )
    synthetic.write_run(
        root / markup.replace("/", ""), ((markup, 2), ("b", 1)), [0, 10], alerts=[bad]
    )
    return root


@pytest.fixture(scope="session")
def made(made_log, serving, tmp_path_factory):
    """TensorBoard on `made_log`."""
    with serving.tensorboard(
        made_log,
        tmp_path_factory.mktemp("server"),
        ready=lambda one: len(one.runs()) == 5 and serving.has_step("fast", LAST)(one),
    ) as server:
        yield server


@pytest.fixture(scope="session")
def trained_log(tmp_path_factory):
    """A log folder written by Trainer.fit, with a head whose logits grow from step 160 on."""
    pl = pytest.importorskip("pytorch_lightning", reason="Lightning is not installed")
    import torch
    from pytorch_lightning.loggers import TensorBoardLogger
    from torch import nn
    from torch.nn import functional as F

    from entropy_monitor import EntropyMonitor

    class Attention(nn.Module):
        def __init__(self, width=32, heads=4):
            super().__init__()
            self.heads = heads
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

        def forward(self, x):
            q, k, v = (
                t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.out(y.transpose(1, 2).flatten(-2))

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(13, 32)
            self.layers = nn.ModuleList([Attention(), Attention(), Attention()])
            self.head = nn.Linear(32, 13)

        def training_step(self, batch, batch_idx):
            (ids,) = batch
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(x)
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

        def on_train_batch_end(self, *args):
            if self.global_step >= 160:
                with torch.no_grad():
                    self.layers[2].qkv.weight[:40].mul_(1.07)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    root = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    ids = torch.randint(13, (4 * 261, 24), generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=4)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=TensorBoardLogger(root, name="gpt", version="one"),
        callbacks=[EntropyMonitor(every_n_steps=5, rows=None)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=10,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # alerts are also warnings, and two are wanted here
        trainer.fit(Model(), loader)
    return root
