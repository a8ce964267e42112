"""The support table says no more than the tests showed."""

from pathlib import Path

import pytest

from tests.models import FAMILIES
from tests.support_table import OTHERS, TITLES, WAYS, insert, read, table
from tests.versions import TRANSFORMERS_5

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.capture.test_model_matrix"
  name="test_statistics_equal_those_of_the_eager_weights[llama-sdpa]"/>
<testcase classname="tests.capture.test_model_matrix"
  name="test_statistics_equal_those_of_the_eager_weights[falcon_alibi-sdpa]">
  <properties><property name="unlike eager" value="why"/></properties></testcase>
<testcase classname="tests.capture.test_model_matrix"
  name="test_training_is_the_same_bit_for_bit[llama-sdpa]"><failure/></testcase>
<testcase classname="tests.capture.test_model_modes" name="test_compiled[llama-sdpa]">
  <properties><property name="steps" value="uncompiled"/></properties></testcase>
<testcase classname="tests.capture.test_model_modes" name="test_compiled[llama-eager]"/>
<testcase classname="tests.capture.test_model_modes" name="test_bf16[llama-sdpa]">
  <skipped/></testcase>
<testcase classname="tests.capture.test_model_matrix"
  name="test_flex_attention_has_no_backward_on_a_cpu_but_right_numbers[llama]"/>
<testcase classname="tests.capture.test_inputs" name="test_one"/>
<testcase classname="tests.capture.test_inputs" name="test_other"><skipped/></testcase>
<testcase classname="tests.faults.test_long_run" name="test_one"/>
<testcase classname="tests.faults.test_long_run" name="test_other"><error/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def junit(tmp_path: Path) -> Path:
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT)
    return path


def test_marks_follow_the_outcomes(junit: Path) -> None:
    lines = table(read([junit])).splitlines()
    assert lines[0].startswith("| model | eager | sdpa | flex | same training | compiled |")
    assert lines[2] == "| Llama (GQA) |  | yes | yes | **no** | eager yes, sdpa yes (1) |  |  |"
    assert lines[3] == "| Falcon (ALiBi) |  | yes (2) |  |  |  |  |  |"
    assert lines[-2:] == [
        "| padding, packing, windows, short sequences, caches | yes |",
        "| 200 steps with faults at random, one process and two | **no** |",
    ]


def test_the_table_is_put_between_its_marks(junit: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- support -->\nold\n<!-- /support -->\nb\n")
    for _ in range(2):
        insert(readme, table(read([junit])))
        text = readme.read_text()
        assert text.startswith("a\n<!-- support -->\n| model |")
        assert text.endswith("<!-- /support -->\nb\n")
        assert "old" not in text
    readme.write_text("nothing")
    with pytest.raises(SystemExit, match="has no place"):
        insert(readme, "x")


@pytest.mark.skipif(not TRANSFORMERS_5, reason="the table is that of transformers 5")
def test_the_readme_shows_the_models_that_are_tested() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("<!-- support -->")[2].partition("<!-- /support -->")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in shown.partition("| also tested")[0].splitlines()
        if line.startswith("|")
    ]
    models = {row[0]: row[1:] for row in rows[2:]}
    assert list(models) == [TITLES[name] for name in FAMILIES]
    for name, family in FAMILIES.items():
        offered = [way in family.ways for way in WAYS]
        assert [bool(cell) for cell in models[TITLES[name]][:3]] == offered, name
        same, compiled, _, bf16 = models[TITLES[name]][3:]
        assert all((same, compiled, bf16)), name
    assert "**no**" not in shown
    paths = Path(__file__).parent.glob("*/test_*.py")
    files = {f"{path.parent.name}.{path.stem}" for path in paths}
    assert set(OTHERS) <= files
    assert all(title in shown for title in OTHERS.values())
