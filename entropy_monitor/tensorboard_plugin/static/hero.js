// The first glance: the sentence, its split bar, what the model's attention looks like now, and the step slider.

import { h, replace, svg } from "./dom.js";
import { changeSentence, momentSentence, plain, printedChange, stepText } from "./format.js";
import { CHANNELS } from "./bars.js";

export function makeHero(actions) {
  const sentences = h("div", { class: "sentences", role: "status", "aria-live": "polite" });
  const tiles = h("dl", { class: "tiles" });
  const slider = h("input", { type: "range", id: "em-step", min: "0", max: "0", step: "1", on: {
    input: () => actions.position(Number(slider.value)),
  } });
  const output = h("output", { for: "em-step", class: "step-now" });
  const marks = svg("svg", { class: "step-marks", "aria-hidden": "true" });
  const back = h("button", { type: "button", class: "icon", "aria-label": "Previous step", title: "Previous step ( , )", on: { click: () => actions.move(-1) } }, "\u2039");
  const forward = h("button", { type: "button", class: "icon", "aria-label": "Next step", title: "Next step ( . )", on: { click: () => actions.move(1) } }, "\u203a");
  const element = h("section", { class: "card hero", "aria-label": "Change of entropy" },
    h("div", { class: "hero-main" }, sentences, tiles),
    h("div", { class: "step-row" }, h("label", { for: "em-step" }, h("span", { class: "wide" }, "Step "), "B"), back, h("div", { class: "slider-box" }, marks, slider), forward, output));
  let markKey = "";

  // One run's sentence and bar; elements are kept so that moving the slider only changes texts and widths.
  function makeLine() {
    const badge = h("span", { class: "badge" });
    const text = h("p", { class: "sentence" });
    const segments = Object.fromEntries(CHANNELS.map((name) => [name, h("div", { class: `segment ${name}` }, h("span", {}))]));
    const zero = h("div", { class: "zero" });
    const bar = h("div", { class: "split", role: "img" }, Object.values(segments), zero);
    return { box: h("div", { class: "line" }, badge, h("div", { class: "line-body" }, text, bar)), badge, text, bar, segments, zero };
  }
  const lines = [makeLine(), makeLine()];
  sentences.append(lines[0].box, lines[1].box);

  function drawBar(line, { change, moment }, extent, view) {
    const span = extent.high - extent.low || 1;
    const zero = (-extent.low / span) * 100;
    const printed = printedChange(change, view.factor);
    const texts = new Map(printed ? printed.parts.map((part) => [part.name, part.text]) : []);
    let left = 0;
    let right = 0;
    // Falling parts are stacked from zero to the left, last one first, so that the bar reads like the sentence.
    const falling = CHANNELS.filter((name) => change[name] < 0).reverse();
    for (const name of [...falling, ...CHANNELS.filter((one) => !falling.includes(one))]) {
      const value = Number.isFinite(change[name]) ? change[name] : 0;
      const from = value < 0 ? left + value : right;
      if (value < 0) left += value;
      else right += value;
      const width = (Math.abs(value) / span) * 100;
      const segment = line.segments[name];
      segment.style.left = `${zero + (from / span) * 100}%`;
      segment.style.width = `${width}%`;
      segment.firstChild.textContent = width > 14 && texts.has(name) ? `${name} ${moment ? `term ${texts.get(name).slice(1)}` : texts.get(name)}` : "";
    }
    line.zero.style.left = `${zero}%`;
    line.bar.setAttribute("aria-label", [...texts].map(([name, text]) => `${name} ${moment ? "term" : "part"} ${text} ${view.unit}`).join(", ") || "not known");
  }

  return {
    element,
    slider,
    // view: {steps, position, step, unit, factor, runs: [{change, before, after, name, note}], extent, tiles, marks}
    update(view) {
      lines.forEach((line, i) => {
        const run = view.runs[i];
        line.box.hidden = !run;
        if (!run) return;
        line.badge.hidden = view.runs.length < 2;
        line.badge.textContent = String(i + 1);
        line.badge.title = run.name;
        if (run.note) {
          replace(line.text, run.note);
          line.bar.hidden = true;
          return;
        }
        line.bar.hidden = false;
        const pieces = run.moment ? momentSentence(run.change, run.after, view.unit) : changeSentence(run.change, run.before, run.after, view.unit);
        replace(line.text, pieces.map((piece) =>
          h("span", { class: piece.channel ? `number ${piece.channel}` : piece.aside ? "aside" : null }, piece.text)));
        drawBar(line, run, view.extent, view);
      });
      replace(tiles, view.tiles.map((tile) => h("div", { class: "tile", title: tile.title },
        h("dt", {}, tile.label),
        h("dd", {}, h("strong", {}, plain(tile.after)), tile.unit ? h("span", { class: "unit" }, ` ${tile.unit}`) : null,
          h("span", { class: "from" }, Number.isFinite(tile.before) ? `from ${plain(tile.before)}` : ""),
          tile.second === undefined ? null : h("span", { class: "from" }, `run 2: ${plain(tile.second)}`)))));
      slider.max = String(Math.max(0, view.steps.length - 1));
      slider.value = String(view.position);
      slider.disabled = view.steps.length < 2;
      slider.setAttribute("aria-valuetext", `step ${stepText(view.step)}`);
      output.textContent = `${stepText(view.step)} of ${stepText(view.steps.at(-1))}`;
      back.disabled = view.position <= 0;
      forward.disabled = view.position >= view.steps.length - 1;
      const key = JSON.stringify([view.marks, view.steps.length, view.start]);
      if (key !== markKey) {
        markKey = key;
        const last = Math.max(1, view.steps.length - 1);
        replace(marks, view.marks.map((mark) => svg("rect", { class: `mark ${mark.severity}`, x: `${(100 * mark.position) / last}%`, y: 0, width: 3, height: 7 })),
          svg("text", { x: `${(100 * view.start) / last}%`, y: 7, "text-anchor": "middle" }, "A"));
      }
    },
  };
}
