// The curves of the chosen head: its change since A by channel, the two terms its entropy is made of, or the
// statistic that the heat map shows.

import { h, replace, segmented } from "./dom.js";
import { plain, signed } from "./format.js";
import { makeChart } from "./chart.js";
import { isChange } from "./stats.js";
import { positionOf } from "./library.js";

export const VIEWS = ["change", "terms", "stat"];

export function makeCurves(actions) {
  const title = h("h2", {});
  const views = segmented("Curves", [
    { value: "change", label: "change since A", title: "Total, sink part and content part of the change" },
    { value: "terms", label: "terms of H", title: "What the entropy is made of: sink term + content term" },
    { value: "stat", label: "statistic", title: "The statistic of the heat map" },
  ], actions.view);
  const note = h("p", { class: "note" });
  const chart = makeChart(actions.step);
  const element = h("section", { class: "card curves-card", "aria-label": "Curves of the chosen head" },
    h("div", { class: "card-head" }, title, views.element), note, chart.element);

  function row(answer, block, name) {
    const names = block === "changes" ? answer.changes : answer.stats;
    const at = names.indexOf(name);
    const count = answer.steps.length;
    return at < 0 ? null : Array.from(answer.arrays[block].subarray(at * count, (at + 1) * count));
  }

  function changeLines(answer, factor, second) {
    const tail = second ? " (run 2)" : "";
    const lines = [];
    for (const [name, label] of [["total", "total"], ["sink", "sink part"], ["content", "content part"], ["support", "support part"]]) {
      const values = row(answer, "changes", name);
      if (!values || (name === "support" && !values.some((value) => Math.abs(value) >= 0.0005))) continue;
      lines.push({ name: label + tail, label: second ? null : label, channel: name, steps: answer.steps, values: values.map((value) => value * factor), second });
    }
    return lines;
  }

  function termLines(answer, factor, second) {
    const total = row(answer, "values", "total_entropy");
    const content = row(answer, "values", "content_mass_entropy");
    if (!total || !content) return [];
    const tail = second ? " (run 2)" : "";
    const scaled = (values) => values.map((value) => value * factor);
    const line = { name: `H${tail}`, label: null, channel: "total", steps: answer.steps, values: scaled(total), second };
    if (second) return [line];
    return [
      { name: "content term (1\u2212s)\u00b7H(\u03c0)", label: "content term", channel: "content", steps: answer.steps, values: scaled(content), base: content.map(() => 0) },
      { name: "sink term Hb(s)", label: "sink term", channel: "sink", steps: answer.steps, values: scaled(total), base: scaled(content) },
      line,
    ];
  }

  function statLines(answer, view, second) {
    const change = isChange(view.stat);
    const values = row(answer, change ? "changes" : "values", change ? view.stat.slice(7) : view.stat);
    if (!values) return [];
    return [{ name: view.statTitle + (second ? " (run 2)" : ""), label: null, channel: "total", steps: answer.steps, values: values.map((value) => value * view.statFactor), second }];
  }

  function noteOf(view) {
    const answer = view.answer;
    const at = positionOf(answer.steps, view.step);
    const read = (block, name) => (row(answer, block, name) || [])[at];
    const factor = view.factor;
    if (view.view === "change") {
      const [total, sink, content] = ["total", "sink", "content"].map((name) => read("changes", name) * factor);
      if (!Number.isFinite(total)) return "No change is known here yet.";
      return `${view.since} \u2192 step ${view.stepText}: ${signed(total, 3)} ${view.unit} = sink part ${signed(sink, 3)} + content part ${signed(content, 3)}`;
    }
    if (view.view === "terms") {
      const total = read("values", "total_entropy") * factor;
      const content = read("values", "content_mass_entropy") * factor;
      return `Step ${view.stepText}: H ${plain(total)} ${view.unit} = sink term ${plain(total - content)} + content term ${plain(content)}`;
    }
    const value = read(isChange(view.stat) ? "changes" : "values", isChange(view.stat) ? view.stat.slice(7) : view.stat);
    return `${view.statTitle} at step ${view.stepText}: ${plain(value * view.statFactor)}${view.statUnit ? ` ${view.statUnit}` : ""}`;
  }

  return {
    element,
    draw: chart.draw,
    // view: {key, view, answer, second, layerName, head, factor, unit, step, stepText, since, sinceStep, stat, statTitle,
    //        statFactor, statUnit, marks, error}
    update(view) {
      views.update(view.view);
      replace(title, h("span", { class: "where", title: `${view.layerName}, head ${view.head}` }, `${view.short}, head ${view.head}`));
      if (!view.answer) {
        note.textContent = view.error || "Loading\u2026";
        chart.update({ key: `empty ${view.error}`, lines: [], zero: true, step: NaN, since: NaN, marks: [], summary: "No curve yet" });
        return;
      }
      note.textContent = noteOf(view);
      const build = { change: (answer, second) => changeLines(answer, view.factor, second), terms: (answer, second) => termLines(answer, view.factor, second), stat: (answer, second) => statLines(answer, view, second) }[view.view];
      const lines = [...build(view.answer, false), ...(view.second ? build(view.second, true) : [])];
      chart.update({
        key: view.key,
        lines,
        zero: view.view !== "stat" || isChange(view.stat),
        step: view.step,
        since: view.view === "terms" || (view.view === "stat" && !isChange(view.stat)) ? NaN : view.sinceStep,
        marks: view.marks,
        summary: `${view.layerName}, head ${view.head}. ${note.textContent}`,
      });
    },
  };
}
