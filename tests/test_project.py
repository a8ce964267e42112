"""What the package promises as a whole: cheap imports, honest names, one direction of imports."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import entropy_monitor

ROOT = Path(__file__).resolve().parents[1]
HEAVY = (
    "torch",
    "pytorch_lightning",
    "lightning",
    "transformers",
    "tensorboard",
    "matplotlib",
    "pandas",
    "rich",
)


def modules_after(statement: str) -> set[str]:
    """The heavy modules a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import entropy_monitor",
        "import entropy_monitor; dir(entropy_monitor)",
        "import entropy_monitor.names",
        "import entropy_monitor.alerts",
        "import entropy_monitor.writers.record_reader",
        "import entropy_monitor.cli",
        "import entropy_monitor.demo",
    ],
)
def test_light_imports_stay_light(statement):
    assert modules_after(statement) == set()


def test_the_tensorboard_plugin_does_not_load_torch():
    loaded = modules_after("import entropy_monitor.tensorboard_plugin")
    assert not loaded & {"torch", "pytorch_lightning", "lightning", "transformers", "matplotlib"}


def test_the_core_does_not_load_a_host():
    loaded = modules_after("from entropy_monitor import AttentionMonitor, attribute_change")
    assert not loaded & {"pytorch_lightning", "lightning", "transformers", "tensorboard"}


@pytest.mark.parametrize("name", entropy_monitor.__all__)
def test_every_public_name_exists(name):
    assert getattr(entropy_monitor, name).__name__ == name


def test_all_is_what_the_front_door_offers():
    assert set(entropy_monitor.__all__) == set(entropy_monitor._HOME)
    assert set(entropy_monitor.__all__) <= set(dir(entropy_monitor))
    with pytest.raises(AttributeError, match="no attribute 'EntropyMonitr'"):
        entropy_monitor.EntropyMonitr  # noqa: B018


def public_modules() -> list[str]:
    names = []
    for path in sorted((ROOT / "entropy_monitor").rglob("*.py")):
        if "__all__" in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.mark.parametrize("name", public_modules())
def test_all_names_what_exists(name):
    module = importlib.import_module(name)
    missing = [entry for entry in module.__all__ if not hasattr(module, entry)]
    assert not missing


def test_the_version_is_said_once():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{entropy_monitor.__version__}"' in project


def test_constraints_meet_the_declared_ranges():
    """Every dependency with a pinned version lies in its range, and torch is the tested one."""
    from packaging.requirements import Requirement

    pins = dict(
        line.strip().split("==")
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if "==" in line and not line.startswith("#")
    )
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    assert pins["torch"] == "2.13.0"
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = project[project.index("dependencies = [") : project.index("[project.scripts]")]
    checked = 0
    for text in re.findall(r'"([a-zA-Z][^"]*)"', block):
        requirement = Requirement(text)
        pin = pins.get(requirement.name.lower().replace("_", "-"))
        if pin is not None:
            assert requirement.specifier.contains(pin), text
            checked += 1
    assert checked > 10


def test_withdrawn_lightning_versions_are_excluded():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "!=2.6.2,!=2.6.3" in project


def test_nothing_imports_upwards():
    """The layers of pyproject.toml, checked by import-linter itself where it is installed."""
    pytest.importorskip("importlinter", reason="import-linter is a part of the dev extra")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_postpones_its_annotations():
    """jaxtyping checks shapes at run time, which `from __future__ import annotations` hinders."""
    for path in (ROOT / "entropy_monitor").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            assert not (isinstance(node, ast.ImportFrom) and node.module == "__future__"), path


def test_the_text_names_no_machine():
    """Paths and hosts of somebody's machine do not belong into the repository."""
    listed = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".txt", ".js", ".html", ".css"}:
            text = path.read_text(encoding="utf-8", errors="replace")
            if re.search(r"/(root|home|Users|opt/[a-z]+|work)/[a-z_]+/", text):
                found.append(name)
    assert not found
