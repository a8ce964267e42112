"""The one-file report: what it holds, and that nothing in it can break out."""

import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from entropy_monitor.report import html
from entropy_monitor.tensorboard_plugin.plugin import static_files
from entropy_monitor.writers.record import RecordWriter
from entropy_monitor.writers.record_reader import read_run

HOSTILE = '</script><script>alert(1)</script><!--"'


@pytest.fixture(scope="module")
def synthetic():
    path = Path(__file__).parents[1] / "tensorboard_plugin" / "synthetic.py"
    spec = importlib.util.spec_from_file_location("tests_report_synthetic", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def record(tmp_path, synthetic):
    def make(name="run", layers=(("a", 2), ("b", 3)), steps=range(0, 101, 10), baseline=True):
        folder = tmp_path / name
        before = synthetic.head_means(layers, 0.0) if baseline else None
        writer = RecordWriter(folder)
        for step in steps:
            writer.write(synthetic.emission(layers, step, max(steps), baseline=before))
        writer.close()
        return read_run(folder)

    return make


class Page(HTMLParser):
    """Elements with their attributes and texts, as a browser sees them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_data(self, data):
        if self.elements:
            self.elements[-1][2].append(data)

    def scripts(self):
        return [(a, "".join(t)) for tag, a, t in self.elements if tag == "script"]


def test_one_file_with_one_script_and_no_address(record, tmp_path):
    path = html.write_html(record(), tmp_path / "out.html")
    text = path.read_text()
    page = Page(text)
    runnable = [attrs for attrs, _ in page.scripts() if attrs.get("type") in (None, "module")]
    assert len(runnable) == 1
    assert not [attrs for _, attrs, _ in page.elements if "src" in attrs or "href" in attrs]
    assert "default-src 'none'" in text


def test_numbers_in_the_file_are_those_of_the_record(record, tmp_path):
    run = record()
    page = Page(html.write_html(run, tmp_path / "out.html").read_text())
    blobs = {attrs["id"]: text for attrs, text in page.scripts() if "id" in attrs}
    import base64

    content = base64.b64decode(blobs["em-frames-0-content_evenness"])
    length = int.from_bytes(content[:4], "little")
    header = json.loads(content[4 : 4 + length])
    values = np.frombuffer(content, "<f4", offset=4 + length).reshape(header["blocks"][0]["shape"])
    assert header["steps"] == run.steps.tolist()
    np.testing.assert_array_equal(values, run.stat("content_evenness"))


def test_names_cannot_end_an_element(record, tmp_path):
    run = record(layers=((HOSTILE, 2),))
    path = html.write_html(run, tmp_path / "out.html", names=[HOSTILE])
    page = Page(path.read_text())
    assert len([1 for attrs, _ in page.scripts() if attrs.get("type") in (None, "module")]) == 1
    data = next(text for attrs, text in page.scripts() if attrs.get("id") == "em-data")
    assert json.loads(data)["runs"][0]["name"] == HOSTILE
    assert json.loads(data)["runs"][0]["layers"][0]["name"] == HOSTILE


def test_several_runs_keep_apart(record, tmp_path):
    runs = [record("a/same"), record("b/same")]
    text = html.write_html(runs, tmp_path / "out.html").read_text()
    data = next(t for attrs, t in Page(text).scripts() if attrs.get("id") == "em-data")
    assert [run["name"] for run in json.loads(data)["runs"]] == ["same", "same (2)"]
    assert 'id="em-frames-1-sink_mass"' in text


def test_a_large_run_keeps_to_the_size(record, tmp_path):
    run = record(layers=tuple((f"l{i}", 8) for i in range(4)), steps=range(300))
    small = html.write_html(run, tmp_path / "small.html", max_bytes=300_000)
    full = html.write_html(run, tmp_path / "full.html")
    front_end = sum(len(content) for content in static_files().values())
    assert small.stat().st_size < 300_000 + front_end + 31 * 12_000
    assert full.stat().st_size > 3 * small.stat().st_size
    data = next(t for a, t in Page(small.read_text()).scripts() if a.get("id") == "em-data")
    assert "of 300 recorded steps" in json.loads(data)["alerts"][0]["notices"][0]


def test_a_run_without_steps_or_no_run_is_refused(tmp_path):
    RecordWriter(tmp_path / "run").close()
    with pytest.raises(ValueError, match="no steps yet"):
        html.write_html(read_run(tmp_path / "run"), tmp_path / "out.html")
    with pytest.raises(ValueError, match="at least one"):
        html.write_html([], tmp_path / "out.html")


def test_names_must_fit(record, tmp_path):
    with pytest.raises(ValueError, match="must hold 1 names"):
        html.write_html(record(), tmp_path / "out.html", names=["a", "b"])


def modules():
    return {name: text.decode() for name, text in static_files().items() if name.endswith(".js")}


def test_bundling_is_sound():
    """No two modules use one name at their top level, imports are plain, nothing is left over."""
    names = {}
    for module, text in modules().items():
        if module == "index.js":
            continue
        found = re.findall(
            r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", text, re.M
        )
        for name in found:
            assert name not in names, f"{name} is in {module} and in {names[name]}"
            names[name] = module
        for line in re.findall(r"^import[^;]*;", text, re.M):
            assert " as " not in line, line
            assert html._IMPORT.match(line + "\n"), line
    script = html.bundle()
    assert not re.search(r"^\s*(import|export)\b", script, re.M)


def test_modules_have_no_cycles():
    needs = {
        module: {needed for _, needed in html._IMPORT.findall(text)}
        for module, text in modules().items()
    }
    while needs:
        free = [module for module, others in needs.items() if not others & needs.keys()]
        assert free, f"a cycle among {sorted(needs)}"
        for module in free:
            del needs[module]


def test_report_needs_neither_torch_nor_tensorboard():
    code = (
        "import sys\n"
        "sys.modules['tensorboard'] = None  # as if it were not installed\n"
        "import entropy_monitor.report.html as html\n"
        "assert html.bundle()\n"
        "assert not {'torch', 'matplotlib', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
