"""The Attention tab in a real browser, inside a real TensorBoard."""

import json
import re

import numpy as np
import pytest

from entropy_monitor.attribution import split_means
from entropy_monitor.names import STAT_NAMES
from entropy_monitor.notebook import change_sentence

pytestmark = pytest.mark.browser

RUN = "gpt/one"
LAYERS = tuple((f"model.layers.{i}.self_attn", 4) for i in range(6))


def printed(text):
    text = text.split(":", 1)[1].split("(")[0]
    return [float(n.replace("−", "-")) for n in re.findall(r"[−+]?\d+\.\d+", text.replace("+", ""))]


def sentence(tab):
    return " ".join(tab.text(".line .sentence").split())


@pytest.fixture(scope="module", params=["rust", "python"])
def trained(request, trained_log, serving, tmp_path_factory):
    with serving.tensorboard(
        trained_log,
        tmp_path_factory.mktemp("server"),
        request.param,
        ready=serving.has_step(RUN, 260),
    ) as server:
        yield server


def test_a_trained_run_inside_tensorboard(trained, trained_log, open_tab):
    """The issue's list on one page: tab, sentence, counts, no error, no foreign request."""
    from entropy_monitor.writers import read_run

    tab = open_tab(trained).shell()
    assert "ATTENTION" in tab.page.inner_text("body").upper()
    run = read_run(trained_log)
    change = {
        name: float(np.nanmean(run.change[-1, k].astype(np.float64)))
        for k, name in enumerate(("total", "sink", "content", "support"))
    }
    expected = change_sentence(
        **change, before=f"{run.baseline_step():,}", after=f"{run.steps[-1]:,}"
    )
    said = sentence(tab)
    assert said == expected
    total, *parts = printed(said)
    assert sum(parts) == pytest.approx(total, abs=1e-9)
    assert tab.frame.get_attribute(".map", "data-cells") == "12"
    assert tab.frame.locator(".bars .row").count() == 3
    assert tab.frame.locator(".bars .bar").count() == 9
    assert tab.frame.locator(".alerts-card tbody tr").count() == len(run.alerts)
    # Which alerts a small run raises is the policy's business; the broken layer must be in one.
    where = next(alert for alert in reversed(run.alerts) if alert.layer == "layers.2")
    place = "2" if where.head is None else f"2, head {where.head}"
    tab.frame.get_by_role("button", name=place, exact=True).first.click()
    assert f"layers.2, head {where.head or 0}" in tab.text("#em-cell")
    assert where.kind.replace("_", " ") in tab.text("#em-cell")
    assert tab.text(".sentence").startswith(f"Steps 0 → {where.step}")
    tab.assert_clean()


def test_tensorboards_reload_brings_new_steps(trained_log, serving, synthetic, tmp_path, open_tab):
    log = tmp_path / "log"
    layers = (("a", 2), ("b", 3))
    synthetic.write_run(log / "run", layers, [0, 10], alerts=[])
    with serving.tensorboard(log, tmp_path, ready=serving.has_step("run", 10)) as server:
        tab = open_tab(server).shell("&em.run=run&em.layer=1&em.head=2&em.stat=total_entropy")
        assert "→ 10" in sentence(tab)
        more = synthetic.EventLog(log / "run")
        more.summary(synthetic.heads_summary(synthetic.emission(layers, 20, 20)), step=20)
        more.close()
        server.wait(serving.has_step("run", 20))
        tab.page.locator(".reload-button").click()  # TensorBoard's own
        tab.frame.wait_for_function(
            "() => document.querySelector('.sentence').textContent.includes('→ 20')", timeout=8000
        )
        # The selection survives, and the slider follows the last step.
        assert "b, head 2" in tab.text("#em-cell")
        assert "em.stat=total_entropy" in tab.hash()
        assert "em.step=last" in tab.hash()
        tab.assert_clean()


def test_deep_link_and_dark_mode(made, open_tab):
    link = "&em.run=fast&em.step=120&em.layer=3&em.head=2&em.stat=content_evenness&em.unit=bit"
    tab = open_tab(made).shell(link + "&em.since=40&em.view=terms", dark=True)
    assert "Steps 40 → 120" in sentence(tab)
    assert " bit = " in sentence(tab)
    assert tab.text(".map-card h2").startswith("Content evenness")
    assert "head 2" in tab.text("#em-cell")
    assert tab.frame.get_attribute("html", "data-theme") == "dark"
    assert (
        tab.frame.locator('.segmented [data-value="terms"]').get_attribute("aria-pressed") == "true"
    )
    # What TensorBoard keeps in the address stays, and the page writes the same link.
    assert tab.hash().startswith("#entropy_monitor&")
    for part in ("em.step=120", "em.layer=3", "em.head=2", "em.since=40", "em.unit=bit"):
        assert part in tab.hash()
    # TensorBoard's own switch is followed.
    tab.page.evaluate("() => document.body.classList.remove('dark-mode')")
    tab.frame.wait_for_selector("html[data-theme=light]")
    tab.assert_clean()


def test_sentence_follows_the_slider_and_equals_the_function(made, synthetic, open_tab):
    tab = open_tab(made).alone("em.run=fast&em.since=40")
    tab.frame.locator("#em-step").focus()
    tab.page.keyboard.press("Home")
    for _ in range(9):
        tab.page.keyboard.press("ArrowRight")
    means = [
        dict(zip(STAT_NAMES, synthetic.head_means(LAYERS, step / 200), strict=True))
        for step in (40, 90)
    ]
    change = {name: float(value.mean()) for name, value in split_means(*means).items()}
    assert sentence(tab) == change_sentence(**change, before="40", after="90")
    tab.assert_clean()


def test_alert_leads_to_its_head_and_step(made, open_tab):
    tab = open_tab(made).alone("em.run=fast&em.layer=0&em.head=0")
    tab.frame.get_by_role("button", name="4, head 1").click()
    assert "model.layers.4.self_attn, head 1" in tab.text("#em-cell")
    assert "warn: concentration" in tab.text("#em-cell")
    assert "Layer 4, head 1" in tab.text(".curves-card h2")
    assert "em.step=160" in tab.hash()
    assert "→ 160" in sentence(tab)
    # Newest first; those after the chosen step are set apart.
    assert tab.frame.locator("tr.future").count() == 2
    tab.frame.locator(".alerts-card select").select_option("error")
    assert tab.frame.locator(".alerts-card tbody tr").count() == 1
    tab.assert_clean()


def test_keys(made, open_tab):
    tab = open_tab(made).alone("em.run=fast&em.layer=2&em.head=1")
    tab.frame.locator(".map").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft"):
        tab.page.keyboard.press(key)
    assert "model.layers.4.self_attn, head 1" in tab.text("#em-cell")
    tab.page.keyboard.press("End")
    tab.page.keyboard.press("PageUp")
    assert "model.layers.0.self_attn, head 3" in tab.text("#em-cell")
    tab.page.keyboard.press(",")
    assert "em.step=190" in tab.hash()
    tab.page.keyboard.press("3")
    assert "em.stat=content_evenness" in tab.hash()
    tab.page.keyboard.press("b")
    assert " bit = " in sentence(tab)
    tab.page.keyboard.press("a")
    assert "em.step=last" in tab.hash()
    tab.page.keyboard.press("?")
    assert tab.frame.locator("dialog").is_visible()
    tab.page.keyboard.press("Escape")
    tab.assert_clean()


def test_clicking_a_cell_chooses_its_head(made, open_tab):
    tab = open_tab(made).alone("em.run=fast&em.layer=0&em.head=0")
    box = tab.frame.locator(".map canvas").bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] - 10, box["y"] + box["height"] - 10)
    assert "head 3" in tab.text(".tooltip:not([hidden])")
    tab.page.mouse.click(box["x"] + box["width"] - 10, box["y"] + box["height"] - 10)
    assert "model.layers.5.self_attn, head 3" in tab.text("#em-cell")


def test_every_statistic_is_drawn(made, open_tab):
    tab = open_tab(made).alone("em.run=fast")
    seen = set()
    for name in ("s", "H(π)", "evenness", "H", "max logit", "ΔH", "Δ sink", "Δ content"):
        tab.frame.get_by_role("button", name=name, exact=True).click()
        tab.frame.wait_for_function(
            "() => !document.querySelector('#em-cell').textContent.includes('no row')"
        )
        seen.add((tab.text(".map-card h2"), tab.text(".legend")))
    assert len({title for title, _ in seen}) == 8
    tab.frame.get_by_label("More statistics").select_option("logit_spread")
    assert "Logit spread" in tab.text(".map-card h2")
    tab.assert_clean()


def test_two_runs_side_by_side(made, open_tab):
    tab = open_tab(made).alone("em.run=fast&em.vs=slow&em.compare=diff&em.layer=3")
    tab.frame.wait_for_function(
        "() => document.querySelectorAll('.chart path.line.second').length > 0"
    )
    assert tab.frame.locator(".line .sentence:visible").count() == 2
    assert tab.frame.locator(".bars .bar").count() == 2 * 3 * 6
    assert "1 layers exist in only one" in tab.text(".notices")
    assert "run 1 − run 2" in tab.text(".map-card h2")
    tab.frame.get_by_role("button", name="run 2", exact=True).click()
    assert tab.frame.get_attribute(".map", "data-cells") == "20"
    tab.assert_clean()


def test_ragged_models_cross_attention_and_second_calls(made, open_tab):
    tab = open_tab(made).alone("em.run=ragged&em.layer=3&em.head=1")
    assert tab.frame.get_attribute(".map", "data-cells") == "13"
    assert "decoder.0.cross#1, head 1" in tab.text("#em-cell")
    tab.frame.locator(".map").focus()
    tab.page.keyboard.press("PageUp")
    tab.page.keyboard.press("End")
    assert "encoder.0.self, head 5" in tab.text("#em-cell")
    tab.page.keyboard.press("PageDown")
    assert "decoder.0.cross#1, head 1" in tab.text("#em-cell")
    tab.assert_clean()


def test_more_than_five_hundred_alerts(made, open_tab):
    tab = open_tab(made).alone("em.run=many")
    assert tab.frame.locator(".alerts-card tbody tr").count() == 500
    assert "640" in tab.text(".alerts-card .count")
    assert "the log keeps the latest 500" in tab.text(".alerts-card .note")
    tab.assert_clean()


def test_hostile_names_stay_text(made, open_tab):
    run = next(name for name in made.runs() if "onerror" in name)
    tab = open_tab(made).alone()
    tab.frame.locator("#em-run").select_option(run)
    tab.frame.wait_for_function(
        "() => document.querySelector('#em-cell').textContent.includes('onerror')"
    )
    tab.frame.get_by_role("button", name="<img").first.click()
    assert tab.frame.locator("img").count() == 0
    assert tab.page.title() != "owned"
    tab.assert_clean()


@pytest.mark.parametrize("width", [420, 768, 1024, 1600, 2560])
def test_no_overflow(made, open_tab, width):
    tab = open_tab(made, width, 900).alone("em.run=fast&em.vs=slow")
    wide = tab.page.evaluate(
        "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide[0] <= wide[1]
    outside = tab.page.evaluate(
        "() => [...document.querySelectorAll('.card')]"
        ".filter(c => c.scrollWidth > c.clientWidth + 1).map(c => c.className)"
    )
    assert outside == []
    tab.assert_clean()


def test_first_glance_is_above_the_fold(made, open_tab):
    tab = open_tab(made, 1600, 936).alone("em.run=fast")
    for selector in (".sentence", ".split", ".map canvas", ".bars", ".chart", ".alerts-card"):
        box = tab.frame.locator(selector).first.bounding_box()
        assert box["y"] + box["height"] <= 936, selector


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(made, open_tab, theme):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed"
    )
    for width, link in ((1600, "em.run=fast&em.vs=slow"), (420, "em.run=fast&em.view=terms")):
        tab = open_tab(made, width, 900, color_scheme=theme).alone(link)
        assert tab.frame.get_attribute("html", "data-theme") == theme
        result = axe.Axe().run(tab.page)
        found = [
            (v["id"], [n["html"][:120] for n in v["nodes"]]) for v in result.response["violations"]
        ]
        assert found == []
        tab.frame.get_by_role("button", name="How to read this page").click()
        assert [v["id"] for v in axe.Axe().run(tab.page).response["violations"]] == []


def test_no_data_yet(tmp_path, serving, open_tab):
    (tmp_path / "empty").mkdir()
    with serving.tensorboard(tmp_path / "empty", tmp_path) as server:
        tab = open_tab(server).alone(state="empty")
        assert "EntropyMonitor()" in tab.text("pre")
        assert "EntropyMonitorCallback()" in tab.text("pre >> nth=1")
        axe = pytest.importorskip(
            "axe_playwright_python.sync_playwright", reason="axe is not installed"
        )
        assert axe.Axe().run(tab.page).response["violations"] == []
        tab.assert_clean()


def route_runs(tab, change):
    """Let the page see the list of runs changed by a function."""

    def handle(route):
        answer = route.fetch()
        route.fulfill(response=answer, body=json.dumps(change(answer.json())))

    tab.page.route("**/entropy_monitor/runs*", handle)


def test_a_run_that_vanished(made, open_tab):
    tab = open_tab(made).alone("em.run=fast")
    route_runs(
        tab, lambda body: {**body, "runs": [run for run in body["runs"] if run["name"] != "fast"]}
    )
    tab.frame.get_by_role("button", name="Reload").click()
    tab.ready("gone")
    assert "fast is no longer in the log folder" in tab.text("main")
    tab.frame.get_by_role("button", name="Show another run").click()
    tab.ready()


def test_a_server_that_stops_answering(made, open_tab):
    tab = open_tab(made).alone("em.run=fast")
    tab.page.route("**/entropy_monitor/runs*", lambda route: route.abort())
    tab.frame.get_by_role("button", name="Reload").click()
    tab.frame.wait_for_function(
        "() => document.querySelector('.notices').textContent.includes('does not answer')"
    )
    # What was loaded stays on the page.
    assert tab.frame.locator(".sentence").first.is_visible()
    tab.page.unroute("**/entropy_monitor/runs*")
    tab.frame.get_by_role("button", name="Reload").click()
    tab.frame.wait_for_function(
        "() => !document.querySelector('.notices').textContent.includes('answer')"
    )


def test_an_error_instead_of_data(made, open_tab):
    tab = open_tab(made)
    body = json.dumps({"error": "<b>unreadable</b>"})
    tab.page.route("**/attribution*", lambda route: route.fulfill(status=404, body=body))
    tab.alone("em.run=fast", "error")
    assert "<b>unreadable</b>" in tab.text("main")
    tab.page.unroute("**/attribution*")
    tab.frame.get_by_role("button", name="Try again").click()
    tab.ready()


def test_loading_is_said(made, open_tab):
    tab = open_tab(made)
    held = []
    tab.page.route("**/attribution*", lambda route: held.append(route))
    tab.alone("em.run=fast", "loading")
    assert "Loading" in tab.text("main")
    tab.frame.wait_for_function("() => true")
    for route in held:
        route.continue_()
    tab.ready()


def test_shape_that_changed_in_mid_run_is_said(tmp_path, serving, synthetic, open_tab):
    log = tmp_path / "log"
    synthetic.write_run(log / "run", (("a", 2),), [0, 10], alerts=[])
    other = synthetic.EventLog(log / "run")
    other.summary(
        synthetic.heads_summary(synthetic.emission((("a", 2), ("b", 5)), 20, 20)), step=20
    )
    other.close()
    with serving.tensorboard(log, tmp_path, ready=serving.has_step("run", 20)) as server:
        tab = open_tab(server).alone("em.run=run")
        tab.frame.wait_for_selector(".notices p")
        assert "shape changed in mid-run" in tab.text(".notices")
        assert "→ 10" in sentence(tab)
        tab.assert_clean()
