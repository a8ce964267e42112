import csv
import json
import shutil

import numpy as np
import pytest

from entropy_monitor.names import CHANGE_NAMES, STAT_NAMES
from entropy_monitor.report import build_report
from entropy_monitor.writers import RecordError, RecordWriter, read_run


def test_the_recorded_change_is_taken_for_the_records_own_baseline(run):
    report = build_report(run)
    recorded = read_run(run)
    assert (report.baseline_step, report.last_step) == (0, 30)
    assert report.change.recorded
    assert report.change.paired
    np.testing.assert_array_equal(report.change.values, recorded.frame(30, "change"))
    np.testing.assert_array_equal(report.change.errors, recorded.frame(30, "change_se"))
    assert report.to_dict()["ordered"]["sink_first"] == {"sink": -0.25, "content": -0.75}


def test_between_other_steps_it_is_computed_from_the_means(run, at):
    report = build_report(run, baseline=10, last=20)
    assert not report.change.recorded
    (one, _), (two, _) = at(10), at(20)
    # The formulas of the design, by hand: H = A + c h with A the binary entropy.
    a = two["binary_entropy"] - one["binary_entropy"]
    h1, h2 = one["content_entropy"], two["content_entropy"]
    c1, c2 = one["content_mass"], two["content_mass"]
    sink = a + (c2 - c1) * (h1 + h2) / 2
    content = (c1 + c2) / 2 * (h2 - h1)
    np.testing.assert_allclose(report.change.values[1], sink, atol=2e-6)
    np.testing.assert_allclose(report.change.values[2], content, atol=2e-6)
    np.testing.assert_allclose(
        report.change.values[0], two["total_entropy"] - one["total_entropy"], atol=2e-6
    )
    assert (report.change.values[3] == 0).all()
    found = report.to_dict()
    assert found["change"]["sink"] == pytest.approx(sink.mean(), abs=2e-6)
    assert found["layers"]["model.layers.1.attn"]["content"] == pytest.approx(
        content[3:].mean(), abs=2e-6
    )
    first = found["ordered"]["sink_first"]
    assert first["sink"] == pytest.approx((a + (c2 - c1) * h1).mean(), abs=2e-6)
    assert first["sink"] + first["content"] == pytest.approx(found["change"]["total"], abs=1e-12)
    assert found["sink_share"] == pytest.approx(sink.mean() / (sink + content).mean(), abs=1e-5)
    # variance of dH: two moments, Var(A) + Var(cH) each
    np.testing.assert_allclose(report.change.errors[0], np.sqrt(4e-6), rtol=1e-4)


def test_json_has_exactly_the_promised_keys(run):
    found = json.loads(build_report(run).to_json())
    assert list(found) == [
        "baseline_step",
        "last_step",
        "change",
        "sink_share",
        "ordered",
        "layers",
        "alerts",
        "checkpoints",
    ]
    assert list(found["change"]) == ["total", "sink", "content", "support", "se"]
    assert set(found["change"]["se"]) == set(CHANGE_NAMES)
    parts = sum(found["change"][name] for name in ("sink", "content", "support"))
    assert found["change"]["total"] == pytest.approx(parts, abs=1e-6)
    assert [alert["kind"] for alert in found["alerts"]] == ["sink_growth", "concentration"]
    assert found["checkpoints"] == []


def test_share_is_null_where_it_is_not_defined(run):
    assert json.loads(build_report(run, last=0).to_json())["sink_share"] is None
    found = build_report(run, baseline=10, last=10).to_dict()
    assert found["change"]["total"] == 0
    assert found["sink_share"] is None


def test_alerts_after_the_last_step_are_left_out(run):
    assert build_report(run, last=10).alerts == ()


def test_a_record_without_a_change_counts_from_its_first_step(tmp_path, emission):
    writer = RecordWriter(tmp_path)
    writer.write(emission(5, recorded=False))
    writer.write(emission(10, recorded=False))
    writer.close()
    report = build_report(tmp_path)
    assert (report.baseline_step, report.last_step) == (5, 10)
    assert report.to_dict()["change"]["total"] < 0


def test_heads_that_do_not_count_are_left_out(tmp_path, emission, at):
    one, two = emission(0, recorded=False), emission(10, recorded=False)
    two.stats[STAT_NAMES.index("rows_valid"), 0] = 0
    two.stats[STAT_NAMES.index("total_entropy"), 0] = 99.0
    writer = RecordWriter(tmp_path)
    writer.write(one)
    writer.write(two)
    report = build_report(tmp_path)
    assert np.isnan(report.change.values[:, 0]).all()
    expected = (at(10)[0]["total_entropy"] - at(0)[0]["total_entropy"])[1:].mean()
    assert report.to_dict()["change"]["total"] == pytest.approx(expected, abs=2e-6)
    assert "moved most" in report.to_text()


def test_a_longer_batch_is_its_own_channel(tmp_path, emission):
    writer = RecordWriter(tmp_path)
    writer.write(emission(0, recorded=False))
    longer = emission(0, recorded=False)
    stats = longer.stats
    for name in ("log_support", "content_entropy"):
        stats[STAT_NAMES.index(name)] += np.log(2)
    for name in ("content_mass_log_support", "content_mass_entropy"):
        stats[STAT_NAMES.index(name)] += np.log(2) * stats[STAT_NAMES.index("content_mass")]
    fields = {name: getattr(longer, name) for name in ("layers", "cov")}
    writer.write(type(longer)(step=1, stats=stats, **fields))
    report = build_report(tmp_path)
    change = report.to_dict()["change"]
    mass = stats[STAT_NAMES.index("content_mass")].mean()
    assert change["support"] == pytest.approx(np.log(2) * mass, abs=1e-5)
    assert change["content"] == pytest.approx(0, abs=1e-5)
    assert "because of the length" in report.to_text()


def test_bad_steps_are_named(run, tmp_path):
    with pytest.raises(RecordError, match=r"Step 11 is not in .*nearest: 10, 20, 0"):
        build_report(run, baseline=11)
    with pytest.raises(RecordError, match="step 30, must not come after step 10"):
        build_report(run, baseline=30, last=10)
    RecordWriter(tmp_path / "new").close()
    with pytest.raises(RecordError, match="No step has been recorded yet"):
        build_report(tmp_path / "new")


def test_a_record_without_its_heads_says_what_is_damaged(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run, folder)
    next(folder.glob("**/heads.bin")).write_bytes(b"")
    with pytest.raises(RecordError, match=r"No step can be read in .*ends before its frame"):
        build_report(folder)
    with pytest.raises(RecordError, match="ends before its frame"):
        read_run(folder).stat("sink_mass")


def test_csv(run, tmp_path):
    report = build_report(run, baseline=10)
    report.to_csv(tmp_path / "heads.csv")
    with (tmp_path / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 5
    last = rows[-1]
    assert (last["step"], last["layer"], last["head"]) == ("30", "model.layers.1.attn", "1")
    assert float(last["change_sink"]) == pytest.approx(report.change.values[1, 4], rel=1e-6)
    assert float(last["change_sink_se"]) == pytest.approx(report.change.errors[1, 4], rel=1e-6)
    assert float(last["max_logit"]) == 35.0
    # The step before the baseline has its statistics and no change.
    assert rows[0]["sink_mass"] != ""
    assert rows[0]["change_total"] == ""


def test_parquet_is_the_same_table(run, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    report = build_report(run)
    report.to_csv(tmp_path / "heads.csv")
    report.to_parquet(tmp_path / "heads.parquet")
    one = pandas.read_csv(tmp_path / "heads.csv")
    two = parquet.read_table(tmp_path / "heads.parquet")
    assert two.schema.metadata[b"unit.total_entropy"] == b"nat"
    two = two.to_pandas()
    assert list(one.columns) == list(two.columns)
    assert one["layer"].tolist() == two["layer"].astype(str).tolist()
    numbers = one.columns.drop("layer")
    np.testing.assert_allclose(one[numbers], two[numbers], rtol=1e-6)


def test_tables_skip_layers_that_a_step_did_not_have(tmp_path, emission):
    writer = RecordWriter(tmp_path)
    writer.write(emission(0, recorded=False))
    full = emission(10, recorded=False)
    writer.write(
        type(full)(step=10, layers=full.layers[:1], stats=full.stats[:, :3], cov=full.cov[:, :3])
    )
    report = build_report(tmp_path)
    report.to_csv(tmp_path / "heads.csv")
    with (tmp_path / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows if row["step"] == "10"] == ["model.layers.0.attn"] * 3
    assert report.to_text()
