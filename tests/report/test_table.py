import re

from entropy_monitor.report import build_report
from entropy_monitor.report.table import number, sentence, table
from entropy_monitor.writers import RecordWriter


def test_text_says_what_is_asked_first(run):
    text = build_report(run).to_text()
    lines = text.splitlines()
    assert lines[0].endswith("run")
    assert (
        lines[1]
        == "2 layers, 5 heads, 4 steps recorded, sink first, rows 64, same rows at both steps"
    )
    said = lines[3]
    found = re.fullmatch(
        r"Steps 0 -> 30: mean entropy (\S+) nat = sink (\S+) \+ content (\S+) "
        r"\((\d+)% sink, (\d+)% content\)",
        said,
    )
    total, sink, content, *shares = map(float, found.groups())
    assert round(sink + content, 2) == total
    assert sum(shares) == 100
    for words in (
        "entropy H",
        "because of the sink",
        "± ",
        "Heads that moved most",
        "1 warn, 1 info",
    ):
        assert words in text
    assert "concentration. content fell" in text
    assert text.isascii() or set(re.findall(r"[^\x00-\x7f]", text)) == {"±"}
    assert max(map(len, lines)) < 160


def test_tables_add_up_as_printed(run):
    text = build_report(run).to_text()
    rows = re.findall(r"^  model\S+ .*$", text, flags=re.MULTILINE)
    assert len(rows) == 2 + 5
    for row in rows:
        total, sink, content = re.search(
            r"([+-]?\d\.\d+)  ± \S+ +([+-]?\d\.\d+) +([+-]?\d\.\d+)", row
        ).groups()
        assert round(float(sink) + float(content) - float(total), 6) == 0


def test_heads_are_ordered_by_how_much_they_moved(run):
    text = build_report(run).to_text(heads=2)
    heads = text.split("moved most:")[1].split("Alerts")[0].strip().splitlines()[1:]
    assert [line.split()[:2] for line in heads] == [
        ["model.layers.1.attn", "1"],
        ["model.layers.1.attn", "0"],
    ]


def test_only_the_layers_that_moved_most(run):
    text = build_report(run).to_text(layers=1, heads=0)
    assert "(1 of 2 layers: those that moved most)" in text
    assert "model.layers.1.attn" in text
    assert "model.layers.0.attn" not in text
    assert "model.layers.0.attn" in build_report(run).to_text(layers=None, heads=0)


def test_computed_changes_say_so(run):
    text = build_report(run, baseline=10).to_text()
    assert "rows not paired" in text
    assert "upper bounds" in text


def test_undefined_shares_are_said(run):
    assert "shares undefined" in sentence(build_report(run, baseline=10, last=10))


def test_checkpoints_and_problems(run):
    writer = RecordWriter(run)
    writer.checkpoint(0, "measured", name="step0")
    writer.checkpoint(20, "missing", "no such revision", name="step20")
    writer.close()
    with (run / "entropy_monitor" / "record.jsonl").open("a") as file:
        file.write("{broken\n")
    text = build_report(run).to_text()
    assert "Checkpoints: 1 measured, 1 missing." in text
    assert "  step20, missing: no such revision" in text
    assert re.search(r"not readable:\n  record.jsonl:\d+ is cut off", text)


def test_number_and_table():
    assert number(None) == "-"
    assert number(-0.0001, 2, sign=True) == "0.00"
    assert table(["a", "", "b"], [["x", "", "1"]]) == "  a  b\n  x  1"
