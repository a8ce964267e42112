// Change by layer: one stacked bar per layer on the rows of the heat map. The axis covers all steps of the run, so
// that it stands still while the step moves.

import { h, replace, svg, tooltip } from "./dom.js";
import { signed, tickText, ticks } from "./format.js";

export const CHANNELS = ["sink", "content", "support"];

export function makeBars(onPick) {
  const figure = svg("svg", { class: "bars", role: "img" });
  const element = h("div", { class: "bars-box" }, figure);
  const legend = h("div", { class: "bars-legend" });
  const tip = tooltip();
  let size = null;
  let data = null;
  let selected = 0;
  let rows = [];
  let built = "";
  let axisKey = "";

  function x(value) {
    const { low, high } = data.extent;
    return 6 + ((value - low) / (high - low)) * (size.width - 12);
  }

  function build() {
    const key = JSON.stringify([size, data.layers.length, data.runs.length]);
    if (key === built) return;
    built = key;
    axisKey = "";
    rows = data.layers.map((layer, i) => {
      const bars = data.runs.map(() => CHANNELS.map((name) => svg("rect", { class: `bar ${name}` })));
      const totals = data.runs.map(() => svg("rect", { class: "bar-total" }));
      const hit = svg("rect", { class: "hit", x: 0, y: size.top + i * size.rowHeight, width: size.width, height: size.rowHeight });
      const group = svg("g", { class: "row", "data-layer": i, on: {
        click: () => onPick(i),
        pointermove: (event) => tip.show(event.clientX, event.clientY, ...describe(i)),
        pointerleave: tip.hide,
      } }, hit, bars, totals);
      return { group, bars, totals, hit };
    });
    replace(figure, svg("g", { class: "axis" }), rows.map((row) => row.group), svg("line", { class: "zero" }));
    figure.setAttribute("width", size.width);
    figure.setAttribute("height", size.top + size.rowHeight * size.count + 2);
  }

  function drawAxis(marks, bottom, zero) {
    axisKey = JSON.stringify([data.extent, data.factor, data.title, data.support, size]);
    replace(figure.querySelector(".axis"), marks.map((value) => [
      svg("line", { class: "grid", x1: x(value / data.factor), x2: x(value / data.factor), y1: size.top, y2: bottom }),
      svg("text", { x: Math.min(size.width - 12, Math.max(12, x(value / data.factor))), y: size.top - 6, "text-anchor": "middle" }, tickText(value, marks)),
    ]));
    const line = figure.querySelector(".zero");
    for (const [name, value] of Object.entries({ x1: zero, x2: zero, y1: size.top - 3, y2: bottom })) line.setAttribute(name, value);
    replace(legend,
      h("span", { class: "legend-title" }, `${data.title}, ${data.unit}`),
      h("span", { class: "key sink" }, `sink ${data.word}`), h("span", { class: "key content" }, `content ${data.word}`),
      data.support ? h("span", { class: "key support" }, "support part") : null,
      h("span", { class: "key total" }, "total"));
  }

  function describe(i) {
    return [data.layers[i].name, ...data.runs.map((run, r) => {
      const parts = CHANNELS.filter((name) => name !== "support" || run.some((layer) => Math.abs(layer.support) >= 0.005));
      const values = parts.map((name) => `${name} ${signed(run[i][name] * data.factor, 3)}`).join(", ");
      return `${data.runs.length > 1 ? `run ${r + 1}: ` : ""}total ${signed(run[i].total * data.factor, 3)} = ${values}`;
    })];
  }

  function draw() {
    if (!size || !data) return;
    build();
    const { low, high } = data.extent;
    const zero = x(0);
    const marks = ticks(low * data.factor, high * data.factor, size.width > 180 ? 4 : 2);
    const bottom = size.top + size.rowHeight * size.count;
    if (axisKey !== JSON.stringify([data.extent, data.factor, data.title, data.support, size])) drawAxis(marks, bottom, zero);
    rows.forEach((row, i) => {
      row.group.classList.toggle("selected", i === selected);
      const pad = size.rowHeight >= 10 ? 2 : size.rowHeight >= 6 ? 1 : 0.5;
      const height = (size.rowHeight - 2 * pad) / data.runs.length;
      data.runs.forEach((run, r) => {
        const y = size.top + i * size.rowHeight + pad + r * height;
        let left = 0;
        let right = 0;
        CHANNELS.forEach((name, k) => {
          const value = Number.isFinite(run[i]?.[name]) ? run[i][name] : 0;
          const from = value < 0 ? left + value : right;
          if (value < 0) left += value;
          else right += value;
          place(row.bars[r][k], x(from), y, x(from + Math.abs(value)) - x(from), Math.max(1, height - (r < data.runs.length - 1 ? 1 : 0)));
          row.bars[r][k].classList.toggle("second", r === 1);
        });
        const total = run[i]?.total;
        const shown = Number.isFinite(total);
        place(row.totals[r], x(shown ? total : 0) - 1, y - 1, shown && size.rowHeight >= 6 ? 2 : 0, Math.max(2, height + 1));
      });
    });
    figure.setAttribute("aria-label", summary());
  }

  function summary() {
    const ranked = data.layers.map((layer, i) => ({ name: layer.name, total: data.runs[0][i]?.total ?? NaN })).filter((one) => Number.isFinite(one.total));
    ranked.sort((a, b) => Math.abs(b.total) - Math.abs(a.total));
    const most = ranked.slice(0, 3).map((one) => `${one.name} ${signed(one.total * data.factor, 2)}`).join(", ");
    return `${data.title} in ${data.unit}. Largest: ${most || "none"}.`;
  }

  function place(rect, left, top, width, height) {
    rect.setAttribute("x", left.toFixed(2));
    rect.setAttribute("y", top.toFixed(2));
    rect.setAttribute("width", Math.max(0, width).toFixed(2));
    rect.setAttribute("height", height.toFixed(2));
  }

  return {
    element,
    legend,
    draw,
    layout(next) {
      size = next;
    },
    // data: {layers, runs: [[{total, sink, content, support} per layer]], extent: {low, high}, factor, unit, title, word, support}
    update(next, layer) {
      data = next;
      selected = layer;
    },
  };
}
