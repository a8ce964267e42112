// The heat map, layers x heads, on a canvas, and the change by layer beside it on the same rows.

import { h, replace, segmented, tooltip } from "./dom.js";
import { ellipsis, greek, plain, tickText, ticks } from "./format.js";
import { colorOf, cssColor, cssGradient } from "./colors.js";
import { makeBars } from "./bars.js";
import { CHOICES } from "./stats.js";

const AXIS = 20;
const RANK = { info: 0, warn: 1, error: 2 };

// `actions`: select(layer, head), stat(name), compare(mode), key(event).
export function makeHeatmap(actions) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const live = h("div", { class: "status", id: "em-cell", role: "status" });
  const focus = h("div", { class: "map", tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-describedby": "em-cell" }, canvas);
  const bars = makeBars((layer) => actions.select(layer, null));
  const body = h("div", { class: "map-body" }, focus, bars.element);
  const title = h("h2", {});
  const choice = segmented("Statistic", CHOICES.map((one) => ({ value: one.stat, label: one.label, title: one.title })), actions.stat);
  const more = h("select", { "aria-label": "More statistics", on: { change: () => more.value && actions.stat(more.value) } });
  const compare = segmented("Which run the map shows", [
    { value: "a", label: "run 1" }, { value: "b", label: "run 2" }, { value: "diff", label: "1 \u2212 2" },
  ], actions.compare);
  const legend = h("div", { class: "legend" });
  const element = h("section", { class: "card map-card", "aria-label": "Layers and heads" },
    h("div", { class: "card-head" }, title, compare.element),
    h("div", { class: "choices" }, choice.element, more),
    h("div", { class: "map-legends" }, legend, bars.legend),
    body, live);
  const tip = tooltip();
  let view = null;
  let moreKey = "";
  let family = "";
  let palette = null;
  const pixels = document.createElement("canvas");
  let geometry = null;

  function layout() {
    const width = body.clientWidth;
    const count = view.layers.length;
    const heads = Math.max(...view.layers.map((layer) => layer.heads));
    const narrow = width < 560;
    const barWidth = Math.round(Math.min(300, Math.max(96, width * (narrow ? 0.32 : 0.28))));
    const longest = narrow ? 9 : 22;
    const context = canvas.getContext("2d");
    context.font = font();
    const labels = view.short.map((text) => ellipsis(text, longest));
    const labelWidth = Math.ceil(Math.max(...labels.map((text) => context.measureText(text).width))) + 10;
    const room = Math.max(60, width - barWidth - labelWidth - 14);
    const available = Math.max(320, Math.min(980, view.room));
    const rowHeight = Math.max(4, Math.min(56, Math.floor((available - AXIS) / count)));
    const cell = Math.min(96, room / heads);
    geometry = { labels, labelWidth, rowHeight, cell, top: AXIS, heads, height: AXIS + rowHeight * count + 2, width: labelWidth + Math.ceil(cell * heads) + 2 };
    bars.layout({ width: Math.max(barWidth, width - geometry.width - 14), rowHeight, top: AXIS, count });
  }

  function font() {
    family = family || getComputedStyle(document.body).fontFamily;
    return `11px ${family}`;
  }

  function draw() {
    const { labels, labelWidth, rowHeight, cell, top, heads, width, height } = geometry;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const colors = themeColors();
    drawCells(context, colors);
    context.font = font();
    context.textBaseline = "middle";
    const every = Math.max(1, Math.ceil(12 / rowHeight));
    labels.forEach((text, layer) => {
      const selected = layer === view.selected.layer;
      if (layer % every && !selected) return;
      if (!selected && every > 1 && Math.abs(layer - view.selected.layer) * rowHeight < 12) return;
      context.fillStyle = selected ? colors.text : colors.muted;
      context.textAlign = "right";
      context.fillText(text, labelWidth - 6, top + (layer + 0.5) * rowHeight);
    });
    const step = Math.max(1, Math.ceil(24 / cell));
    context.textAlign = "center";
    for (let head = 0; head < heads; head += 1) {
      const selected = head === view.selected.head;
      if (head % step && !selected) continue;
      if (!selected && step > 1 && Math.abs(head - view.selected.head) * cell < 20) continue;
      context.fillStyle = selected ? colors.text : colors.muted;
      context.fillText(String(head), labelWidth + (head + 0.5) * cell, top - 9);
    }
    drawFrames(context, colors);
  }

  function drawCells(context, colors) {
    const { labelWidth, rowHeight, cell, top } = geometry;
    if (Math.min(cell, rowHeight) < 9) return drawPixels(context, colors);
    const gap = 1;
    let at = 0;
    view.layers.forEach((layer, row) => {
      for (let head = 0; head < layer.heads; head += 1, at += 1) {
        const value = view.values ? view.values[at] : NaN;
        // Whole pixels, or neighbouring cells would show seams.
        const x = Math.round(labelWidth + head * cell);
        const right = Math.round(labelWidth + (head + 1) * cell);
        context.fillStyle = Number.isFinite(value) ? cssColor(colorOf(view.scale, value)) : colors.absent;
        context.fillRect(x, top + row * rowHeight, right - x - gap, rowHeight - gap);
      }
    });
  }

  // Many small cells: one pixel each, scaled up in one go.
  function drawPixels(context, colors) {
    const { labelWidth, rowHeight, cell, top, heads } = geometry;
    const count = view.layers.length;
    pixels.width = heads;
    pixels.height = count;
    const small = pixels.getContext("2d");
    const image = small.createImageData(heads, count);
    const words = new Uint32Array(image.data.buffer);
    let at = 0;
    view.layers.forEach((layer, row) => {
      for (let head = 0; head < layer.heads; head += 1, at += 1) {
        const value = view.values ? view.values[at] : NaN;
        words[row * heads + head] = Number.isFinite(value) ? colorOf(view.scale, value) : colors.absentWord;
      }
    });
    small.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(pixels, labelWidth, top, cell * heads, rowHeight * count);
  }

  function drawFrames(context, colors) {
    const { labelWidth, rowHeight, cell, top } = geometry;
    for (const frame of view.frames) {
      const model = frame.layer === null;
      const heads = model ? geometry.heads : view.layers[frame.layer].heads;
      const x = labelWidth + (frame.head ?? 0) * cell;
      const y = top + (frame.layer ?? 0) * rowHeight;
      const width = frame.head === null ? heads * cell : cell;
      const height = model ? rowHeight * view.layers.length : rowHeight;
      outline(context, x, y, width, height, colors.card, 3);
      context.setLineDash(frame.severity === "info" ? [3, 2] : []);
      outline(context, x, y, width, height, colors[frame.severity], 2);
      context.setLineDash([]);
    }
    const { layer, head } = view.selected;
    if (view.layers[layer]) {
      outline(context, labelWidth + head * cell, top + layer * rowHeight, cell, rowHeight, colors.card, 5);
      outline(context, labelWidth + head * cell, top + layer * rowHeight, cell, rowHeight, colors.text, 2.5);
    }
  }

  function outline(context, x, y, width, height, color, line) {
    context.strokeStyle = color;
    context.lineWidth = line;
    context.strokeRect(x - 0.5, y - 0.5, Math.max(3, width), Math.max(3, height));
  }

  // Read once per theme: asking for computed styles makes the browser lay the page out.
  function themeColors() {
    const theme = document.documentElement.dataset.theme;
    if (palette && palette.theme === theme) return palette;
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(read("--absent").slice(at, at + 2), 16));
    palette = { theme, absentWord: (0xff000000 | (b << 16) | (g << 8) | r) >>> 0, text: read("--text"), muted: read("--muted"), card: read("--card"), absent: read("--absent"), info: read("--info"), warn: read("--warn"), error: read("--error") };
    return palette;
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const head = Math.floor((event.clientX - box.left - geometry.labelWidth) / geometry.cell);
    const layer = Math.floor((event.clientY - box.top - geometry.top) / geometry.rowHeight);
    const row = view.layers[layer];
    return row && head >= 0 && head < row.heads ? { layer, head } : null;
  }

  function valueText(layer, head) {
    const at = view.layers.slice(0, layer).reduce((sum, one) => sum + one.heads, 0) + head;
    const value = view.values ? view.values[at] : NaN;
    if (!Number.isFinite(value)) return "no row counted here";
    return `${view.title} ${plain(value * view.factor)}${view.unit ? ` ${view.unit}` : ""}`;
  }

  function frameText(layer, head) {
    const found = view.frames.filter((one) => (one.layer === layer || one.layer === null) && (one.head === head || one.head === null));
    const level = (one) => (one.layer === null ? " (model)" : one.head === null ? " (layer)" : "");
    return found.map((one) => `${one.severity}: ${one.kind.replaceAll("_", " ")}${level(one)}, step ${one.step.toLocaleString("en-US")}`);
  }

  canvas.addEventListener("pointermove", (event) => {
    const cell = view && geometry && cellAt(event);
    if (!cell) return tip.hide();
    return tip.show(event.clientX, event.clientY, `${view.layers[cell.layer].name}, head ${cell.head}`, valueText(cell.layer, cell.head), ...frameText(cell.layer, cell.head));
  });
  canvas.addEventListener("pointerleave", tip.hide);
  canvas.addEventListener("click", (event) => {
    const cell = view && geometry && cellAt(event);
    if (cell) actions.select(cell.layer, cell.head);
  });
  focus.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -1e6], End: [0, 1e6], PageUp: [-1e6, 0], PageDown: [1e6, 0] };
    const move = moves[event.key];
    if (!move || !view || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const layer = Math.min(view.layers.length - 1, Math.max(0, view.selected.layer + move[0]));
    const head = Math.min(view.layers[layer].heads - 1, Math.max(0, view.selected.head + move[1]));
    actions.select(layer, head);
  });

  function updateMore(names) {
    const key = JSON.stringify([names, view.stat]);
    if (key === moreKey) return;
    moreKey = key;
    replace(more, h("option", { value: "" }, "more\u2026"), names.map((one) => h("option", { value: one.value }, one.label)));
    more.value = names.some((one) => one.value === view.stat) ? view.stat : "";
    more.classList.toggle("chosen", more.value !== "");
    more.hidden = names.length === 0;
  }

  function updateLegend() {
    const { low, high } = view.scale;
    const marks = ticks(low * view.factor, high * view.factor, 4);
    replace(legend,
      h("div", { class: "ramp", style: { background: cssGradient(view.scale) } }),
      h("div", { class: "ramp-ticks" }, marks.map((value) => h("span", { style: { left: `${(100 * (value / view.factor - low)) / (high - low)}%` } }, tickText(value, marks)))));
    legend.title = `${view.title}${view.unit ? `, ${view.unit}` : ""}`;
  }

  return {
    element,
    focus,
    resize() {
      if (view) {
        layout();
        draw();
      }
    },
    // view: {layers, short, values, scale, factor, unit, title, doc, stat, more, selected, frames, bars, comparing,
    //        compare, step, room}
    update(next) {
      const sameShape = view && view.layers === next.layers && view.room === next.room;
      view = next;
      replace(title, h("span", {}, view.title), view.formula ? h("span", { class: "formula" }, greek(view.formula)) : null, h("span", { class: "at" }, view.at));
      title.title = view.doc;
      choice.update(view.stat);
      for (const one of CHOICES) choice.show(one.stat, view.offered.has(one.stat));
      compare.element.hidden = !view.comparing;
      compare.update(view.compare);
      updateMore(view.more);
      bars.update(view.bars, view.selected.layer);
      if (!sameShape || !geometry) layout();
      focus.dataset.cells = String(view.layers.reduce((sum, one) => sum + one.heads, 0));
      draw();
      bars.draw();
      updateLegend();
      focus.setAttribute("aria-label", `${view.title}, ${view.layers.length} layers, ${view.layers.reduce((sum, one) => sum + one.heads, 0)} heads. Arrow keys choose a head.`);
      const { layer, head } = view.selected;
      const text = view.layers[layer] ? `${view.layers[layer].name}, head ${head}: ${valueText(layer, head)}` : "";
      const frames = view.layers[layer] ? frameText(layer, head) : [];
      const full = [text, ...frames].join(" \u00b7 ");
      if (live.textContent !== full) live.textContent = full;
    },
  };
}

// Alerts up to a step as frames: one per head, layer and for the model, the worst one.
export function framesOf(alerts, step, layers) {
  const worst = new Map();
  for (const alert of alerts) {
    const known = alert.layer === null || (alert.layer_index !== null && layers[alert.layer_index]);
    if (!known || alert.step === null || alert.step > step) continue;
    const head = alert.level === "head" ? alert.head : null;
    const key = `${alert.layer_index}/${head}`;
    const before = worst.get(key);
    if (!before || (RANK[alert.severity] ?? 0) >= (RANK[before.severity] ?? 0)) {
      worst.set(key, { layer: alert.layer_index, head, severity: alert.severity in RANK ? alert.severity : "info", kind: alert.kind, step: alert.step });
    }
  }
  // The wider first, so that a head's frame lies on top of its layer's and the model's.
  const width = (one) => (one.layer === null ? 0 : one.head === null ? 1 : 2);
  return [...worst.values()].sort((a, b) => width(a) - width(b) || RANK[a.severity] - RANK[b.severity]);
}
