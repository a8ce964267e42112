"""The README is true: its Python runs, its commands run, its table is the code's, its links exist.

Blocks share what a reader would have by then: a small model, its data, a recorded run. A command
that cannot run inside a test (it installs, serves, or takes minutes) must be on one of the lists.
"""

import contextlib
import importlib.util
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from entropy_monitor.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# What a reader runs but a test cannot: `make demo` and `make test` run in CI, the others serve or
# install. `entropy-monitor` commands and examples are always run.
NOT_RUN = ("make", "pip", "tensorboard", "apt-get", "git", "torchrun", "sbatch")
# Examples are run by tests/test_examples.py with small settings.
EXAMPLES = re.compile(r"python examples/(\w+)\.py")

pytestmark = [
    # Hosts warn about things that a README leaves out on purpose.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore:.*pin_memory"),
]


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every command line of the shell blocks, without comments."""
    lines = "".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A small model, data and a folder; what the quick starts call `model`, `data`, `batch`."""
    pl = pytest.importorskip("pytorch_lightning")
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    torch.manual_seed(0)

    class Tiny(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, x, index):
            return self(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    vectors = torch.randn(32, 12, 16)
    return {
        "folder": tmp_path_factory.mktemp("readme"),
        "lightning": {"model": Tiny(), "data": DataLoader(list(vectors), batch_size=4)},
        "plain": {"model": Tiny(), "batch": vectors[:4], "train": lambda model: None},
    }


def hugging_face():
    """The same for the Hugging Face quick start."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    tokens = torch.randint(32, (16, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    return {"model": GPT2LMHeadModel(config), "data": data}


@pytest.mark.parametrize("source", blocks("python"), ids=lambda s: s.strip().splitlines()[-1][:40])
def test_python_blocks_run(source, host, monkeypatch, capsys):
    folder = host["folder"]
    monkeypatch.chdir(folder)
    if "TrainingArguments" in source:
        pytest.importorskip("transformers")
        names = hugging_face()
    elif "pl.Trainer" in source:
        names = host["lightning"]
    else:
        names = host["plain"]
    exec(compile(source, "README.md", "exec"), dict(names))
    if "pl.Trainer" in source:
        assert list((folder / "lightning_logs").glob("version_*/entropy_monitor/record.jsonl"))
    if "TrainingArguments" in source:
        assert list(folder.glob("out/**/record.jsonl"))


@pytest.mark.parametrize("line", [c for c in commands() if c.startswith("entropy-monitor")])
def test_commands_are_understood(line):
    """Every command and option exists; the parser says so before anything runs."""
    words = shlex.split(line)[1:]
    if words == ["demo"]:
        return  # tests/demo runs it
    assert words[0] in COMMANDS
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as stop:
        main([words[0], "--help"])
    assert stop.value.code == 0
    for word in words[1:]:
        if word.startswith("--"):
            assert word.split("=")[0] in printed.getvalue(), word


@pytest.mark.parametrize("line", [c for c in commands() if c.startswith("entropy-monitor report")])
def test_reports_run_on_the_run_of_the_quick_start(line, host, monkeypatch, capsys):
    monkeypatch.chdir(host["folder"])
    if not Path("lightning_logs").exists():
        pytest.skip("the Lightning block did not run")
    words = shlex.split(line)[1:]
    if not Path(words[1]).exists():
        pytest.skip(f"{words[1]} is made by another section")
    assert main(words) == 0
    assert "sink" in capsys.readouterr().out


def test_every_other_command_is_an_example_or_cannot_run_here():
    for line in commands():
        example = EXAMPLES.match(line)
        if example:
            name = f"{example[1]}.py"
            assert (ROOT / "examples" / name).is_file()
            tests = "".join(p.read_text() for p in (ROOT / "tests").rglob("test_*.py"))
            assert name in tests, f"no test runs {name}"
        else:
            assert line.split()[0] in (*NOT_RUN, "entropy-monitor"), line


def test_make_targets_exist():
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        if target not in ("makes",):
            assert re.search(rf"^{target}:", made, re.MULTILINE), target


def test_extras_exist():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for extras in re.findall(r"(?:'\.|entropy-monitor)\[([a-z,]+)\]", README):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_the_table_is_the_code_s():
    path = ROOT / "scripts" / "update_readme.py"
    spec = importlib.util.spec_from_file_location("update_readme", path)
    module = importlib.util.module_from_spec(spec)
    kept = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = kept
    assert module.updated(README) == README, "run python scripts/update_readme.py"


def test_links_and_pictures_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_no_part_is_missing():
    assert "<!-- part:" not in README


def test_commands_are_all_named():
    for name in COMMANDS:
        assert f"`entropy-monitor {name}" in README, name
