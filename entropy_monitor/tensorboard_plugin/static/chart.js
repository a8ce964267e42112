// A line chart in SVG: lines with dash patterns and labels at their ends, stacked areas, a cursor at the chosen step.

import { h, replace, svg, tooltip } from "./dom.js";
import { plain, stepText, tickText, ticks } from "./format.js";

const LEFT = 46;
const TOP = 10;
const BOTTOM = 22;

export function makeChart(onStep) {
  const figure = svg("svg", { class: "chart", role: "img" });
  const element = h("div", { class: "chart-box" }, figure);
  const tip = tooltip();
  let data = null;
  let size = null;
  let domain = null;

  const x = (step) => LEFT + ((step - domain.x[0]) / (domain.x[1] - domain.x[0] || 1)) * (size.width - LEFT - size.right);
  const y = (value) => TOP + (1 - (value - domain.y[0]) / (domain.y[1] - domain.y[0] || 1)) * (size.height - TOP - BOTTOM);

  function measure() {
    const width = Math.max(220, element.clientWidth);
    const longest = Math.max(0, ...data.lines.filter((line) => line.label).map((line) => line.label.length));
    size = { width, height: Math.max(140, element.clientHeight), right: Math.min(width * 0.3, 10 + longest * 6.4) };
    const steps = data.lines.flatMap((line) => [line.steps[0], line.steps.at(-1)]).filter(Number.isFinite);
    const values = data.lines.flatMap((line) => [...line.values, ...(line.base || [])]).filter(Number.isFinite);
    let low = Math.min(...values, data.zero ? 0 : Infinity);
    let high = Math.max(...values, data.zero ? 0 : -Infinity);
    if (!(low <= high)) [low, high] = [0, 1];
    if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
    const pad = 0.05 * (high - low);
    domain = {
      x: steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1],
      y: [data.zero && low === 0 ? 0 : low - pad, data.zero && high === 0 ? 0 : high + pad],
    };
  }

  function path(line, close) {
    const parts = [];
    let pen = false;
    line.values.forEach((value, i) => {
      if (!Number.isFinite(value)) {
        pen = false;
        return;
      }
      parts.push(`${pen ? "L" : "M"}${x(line.steps[i]).toFixed(1)} ${y(value).toFixed(1)}`);
      pen = true;
    });
    if (!close) return parts.join("");
    const back = [];
    for (let i = line.values.length - 1; i >= 0; i -= 1) {
      if (Number.isFinite(line.values[i])) back.push(`L${x(line.steps[i]).toFixed(1)} ${y(line.base[i]).toFixed(1)}`);
    }
    return parts.length ? `${parts.join("").replaceAll("M", (found, at) => (at ? "L" : "M"))}${back.join("")}Z` : "";
  }

  function axes() {
    const marksY = ticks(domain.y[0], domain.y[1], size.height > 200 ? 5 : 3);
    const marksX = ticks(domain.x[0], domain.x[1], Math.max(2, Math.floor((size.width - LEFT) / 90))).filter(Number.isInteger);
    const bottom = size.height - BOTTOM;
    return svg("g", { class: "axis" },
      marksY.map((value) => [
        svg("line", { class: value === 0 ? "zero" : "grid", x1: LEFT, x2: size.width - size.right, y1: y(value), y2: y(value) }),
        svg("text", { x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, tickText(value, marksY)),
      ]),
      marksX.map((value) => svg("text", { x: x(value), y: bottom + 15, "text-anchor": x(value) > size.width - 24 ? "end" : "middle" }, stepText(value))));
  }

  function labels() {
    const ends = data.lines.filter((line) => line.label).map((line) => {
      const last = line.values.findLastIndex(Number.isFinite);
      if (last < 0) return null;
      const value = line.base ? (line.values[last] + line.base[last]) / 2 : line.values[last];
      return { line, at: x(line.steps[last]) + 5, y: y(value) };
    }).filter(Boolean).sort((a, b) => a.y - b.y);
    // Push labels apart from top to bottom, then back up if the last one fell off the chart.
    ends.forEach((end, i) => {
      if (i > 0) end.y = Math.max(end.y, ends[i - 1].y + 13);
    });
    let limit = size.height - BOTTOM;
    for (let i = ends.length - 1; i >= 0; i -= 1) {
      ends[i].y = Math.min(ends[i].y, limit);
      limit = ends[i].y - 13;
    }
    return ends.map((end) => svg("text", { class: `end ${end.line.channel}`, x: end.at, y: end.y + 4 }, end.line.label));
  }

  function cursor() {
    const group = figure.querySelector(".cursor");
    if (!group) return;
    const inside = data.step >= domain.x[0] && data.step <= domain.x[1];
    const bottom = size.height - BOTTOM;
    replace(group,
      Number.isFinite(data.since) && data.since >= domain.x[0] ? svg("line", { class: "since", x1: x(data.since), x2: x(data.since), y1: TOP, y2: bottom }) : null,
      inside ? svg("line", { x1: x(data.step), x2: x(data.step), y1: TOP, y2: bottom }) : null);
  }

  function draw() {
    if (!data || !element.isConnected || !element.clientWidth) return;
    measure();
    const bottom = size.height - BOTTOM;
    figure.setAttribute("width", size.width);
    figure.setAttribute("height", size.height);
    replace(figure, axes(),
      data.lines.filter((line) => line.base).map((line) => svg("path", { class: `area ${line.channel}`, d: path(line, true) })),
      data.lines.map((line) => svg("path", { class: `line ${line.channel}${line.second ? " second" : ""}`, d: path(line, false) })),
      // A single step makes no line.
      data.lines.filter((line) => line.steps.length === 1 && Number.isFinite(line.values[0])).map((line) =>
        svg("circle", { class: `dot ${line.channel}`, cx: x(line.steps[0]), cy: y(line.values[0]), r: 3.5 })),
      data.marks.filter((mark) => mark.step >= domain.x[0] && mark.step <= domain.x[1]).map((mark) =>
        svg("path", { class: `mark ${mark.severity}`, d: `M${x(mark.step)} ${bottom - 7}l4 7h-8z` })),
      svg("g", { class: "cursor" }), labels());
    figure.setAttribute("aria-label", data.summary);
    cursor();
  }

  function nearest(event) {
    const box = figure.getBoundingClientRect();
    const step = domain.x[0] + ((event.clientX - box.left - LEFT) / (size.width - LEFT - size.right)) * (domain.x[1] - domain.x[0]);
    const steps = data.lines[0]?.steps || [];
    let best = null;
    for (const one of steps) if (best === null || Math.abs(one - step) < Math.abs(best - step)) best = one;
    return best;
  }

  figure.addEventListener("pointermove", (event) => {
    const step = data && domain ? nearest(event) : null;
    if (step === null) return tip.hide();
    const values = data.lines.filter((line) => line.name).map((line) => {
      const at = line.steps.indexOf(step);
      const value = at < 0 ? NaN : line.values[at] - (line.base ? line.base[at] : 0);
      return `${line.name}: ${plain(value)}`;
    });
    return tip.show(event.clientX, event.clientY, `step ${stepText(step)}`, ...values);
  });
  figure.addEventListener("pointerleave", tip.hide);
  figure.addEventListener("click", (event) => {
    const step = data && domain ? nearest(event) : null;
    if (step !== null) onStep(step);
  });

  return {
    element,
    draw,
    // data: {key, lines: [{name, label, channel, steps, values, base?, second?}], zero, step, since, marks, summary}
    update(next) {
      const same = data && data.key === next.key;
      data = next;
      if (same && domain) cursor();
      else draw();
    },
  };
}
