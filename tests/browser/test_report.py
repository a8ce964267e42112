"""The one-file report opened from disk, as it would be from a mail."""

import re

import pytest

from entropy_monitor.notebook import change_sentence
from entropy_monitor.report.html import write_html
from entropy_monitor.writers.record import RecordWriter
from entropy_monitor.writers.record_reader import read_run

pytestmark = pytest.mark.browser

LAYERS = tuple((f"model.layers.{i}.self_attn", 4) for i in range(6))
MARKUP = "<img src=x onerror=\"document.title='owned'\">"


def record(synthetic, folder, layers=LAYERS, drift=1.0):
    before = synthetic.head_means(layers, 0.0, drift=drift)
    writer = RecordWriter(folder)
    alerts = synthetic.sample_alerts(layers, 200)
    for step in range(0, 201, 10):
        due = [alert for alert in alerts if alert.step == step]
        writer.write(
            synthetic.emission(layers, step, 200, baseline=before, drift=drift, alerts=due)
        )
    writer.close()
    return read_run(folder)


@pytest.fixture
def report(tmp_path, synthetic):
    runs = [
        record(synthetic, tmp_path / "fast"),
        record(synthetic, tmp_path / "slow", drift=0.4),
        record(synthetic, tmp_path / "odd", ((MARKUP, 2), ("b", 1))),
    ]
    names = ["fast", "slow", MARKUP]
    return write_html(runs, tmp_path / "report.html", names=names), runs


def open_report(open_tab, path, width=1600, hash_=""):
    tab = open_tab(path.as_uri(), width)
    tab.page.goto(f"{path.as_uri()}{hash_}")
    return tab.ready()


def test_it_opens_without_network_and_says_the_sentence(report, open_tab):
    path, (run, *_) = report
    tab = open_report(open_tab, path)
    change = run.change[-1].mean(axis=1, dtype="float64")
    total, sink, content, support = map(float, change)
    said = " ".join(tab.text(".sentence").split())
    assert said == change_sentence(
        total=total, sink=sink, content=content, support=support, before="0", after="200"
    )
    assert tab.frame.get_attribute(".map", "data-cells") == "24"
    assert tab.frame.locator(".alerts-card tbody tr").count() == 4
    tab.frame.get_by_role("button", name="4, head 1").click()
    assert "model.layers.4.self_attn, head 1" in tab.text("#em-cell")
    assert "→ 160" in tab.text(".sentence")
    for view in ("terms of H", "statistic"):
        tab.frame.get_by_role("button", name=view).click()
        assert tab.frame.locator(".chart path.line").count() > 0
    tab.assert_clean()


def test_runs_compare_and_links_work(report, open_tab):
    path, _ = report
    tab = open_report(open_tab, path, hash_="#em.run=fast&em.vs=slow&em.compare=diff&em.step=100")
    assert tab.frame.locator(".line .sentence:visible").count() == 2
    assert "run 1 − run 2" in tab.text(".map-card h2")
    tab.assert_clean()


def test_markup_stays_text(report, open_tab):
    path, _ = report
    tab = open_report(open_tab, path)
    tab.frame.locator("#em-run").select_option(MARKUP)
    tab.frame.locator(".map").press("PageUp")
    tab.frame.wait_for_function(
        "() => document.querySelector('#em-cell').textContent.includes('onerror')"
    )
    assert tab.frame.locator("img").count() == 0
    assert tab.page.title() != "owned"
    tab.assert_clean()


def test_narrow_dark_and_accessible(report, open_tab):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed"
    )
    path, _ = report
    tab = open_report(open_tab, path, 420)
    tab.frame.get_by_role("button", name="Light or dark").click()
    assert tab.frame.get_attribute("html", "data-theme") == "dark"
    assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= 420
    assert axe.Axe().run(tab.page).response["violations"] == []
    tab.assert_clean()


def test_a_single_step_tells_the_terms_of_its_entropy(tmp_path, synthetic, open_tab):
    before = synthetic.head_means(LAYERS, 0.0)
    writer = RecordWriter(tmp_path / "run")
    one = synthetic.emission(LAYERS, 0, 200, baseline=before)
    writer.write(one)
    writer.close()
    path = write_html(read_run(tmp_path / "run"), tmp_path / "report.html")
    tab = open_report(open_tab, path)
    said = " ".join(tab.text(".sentence").split())
    assert said.startswith("Step 0: mean entropy ")
    total, sink, content = (float(n) for n in re.findall(r"\d+\.\d+", said))
    assert sink + content == pytest.approx(total, abs=1e-9)
    assert total == pytest.approx(one.stat("total_entropy").mean(), abs=0.005)
    tab.assert_clean()
