"""The support table says no more than the tests showed."""

from pathlib import Path

import pytest

from tests.support_table import insert, read, table

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
<testcase classname="tests.capture.test_model_modes" name="test_bf16[llama-sdpa]">
  <skipped/></testcase>
<testcase classname="tests.capture.test_model_matrix"
  name="test_flex_attention_has_no_backward_on_a_cpu_but_right_numbers[llama]"/>
<testcase classname="tests.capture.test_inputs" name="test_one"/>
</testsuite></testsuites>"""


@pytest.fixture
def junit(tmp_path: Path) -> Path:
    path = tmp_path / "junit.xml"
    path.write_text(JUNIT)
    return path


def test_marks_follow_the_outcomes(junit: Path) -> None:
    lines = table(read([junit])).splitlines()
    assert lines[2] == "| Llama (GQA) | flex | yes |  |  |  |  |"
    assert lines[3] == "| Llama (GQA) | sdpa | yes | **no** | yes (1) |  |  |"
    assert lines[4] == "| Falcon (ALiBi) | sdpa | yes (2) |  |  |  |  |"
    assert lines[-1].endswith("| 1 | 0 | 0 |")


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
