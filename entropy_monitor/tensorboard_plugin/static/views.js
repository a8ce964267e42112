// From what is known and chosen to what each card shows: plain data, no elements.

import { CHANNELS } from "./bars.js";
import { colorScale } from "./colors.js";
import { shortNames, stepText } from "./format.js";
import { framesOf } from "./heatmap.js";
import { positionOf } from "./library.js";
import { CHOICES, factorOf, isChange, kindOf, titleOf, unitText } from "./stats.js";

const CHANGES = ["total", ...CHANNELS];
const shortCache = new WeakMap();
const extentCache = new WeakMap();

export function shortOf(info) {
  if (!shortCache.has(info.layers)) shortCache.set(info.layers, shortNames(info.layers.map((layer) => layer.name)));
  return shortCache.get(info.layers);
}

export function statInfo(info, name) {
  return info.stats.find((one) => one.name === name) || { name, formula: "", unit: isChange(name) ? "nat" : "1", doc: "" };
}

export function changeAt(attribution, position) {
  const count = attribution.steps.length;
  return Object.fromEntries(attribution.changes.map((name, k) => [name, attribution.arrays.model[k * count + position]]));
}

function layerChanges(attribution, position, layers) {
  const count = attribution.steps.length;
  return Array.from({ length: layers }, (_, layer) =>
    Object.fromEntries(attribution.changes.map((name, k) => [name, attribution.arrays.layers[(k * count + position) * layers + layer]])));
}

export function meanAt(attribution, stat, position) {
  const at = attribution.stats.indexOf(stat);
  return at < 0 ? NaN : attribution.arrays.means[at * attribution.steps.length + position];
}

// How far bars reach over all steps, for the model and for any layer, so that axes stand still.
function extents(attribution) {
  if (extentCache.has(attribution)) return extentCache.get(attribution);
  const { model, layers } = attribution.arrays;
  const find = (values) => {
    const size = values.length / CHANGES.length;
    let low = 0;
    let high = 0;
    for (let i = 0; i < size; i += 1) {
      let left = 0;
      let right = 0;
      for (let k = 1; k < CHANGES.length; k += 1) {
        const value = values[k * size + i];
        if (value < 0) left += value;
        else if (value > 0) right += value;
      }
      low = Math.min(low, left);
      high = Math.max(high, right);
    }
    return { low, high };
  };
  const found = { model: find(model), layers: find(layers) };
  extentCache.set(attribution, found);
  return found;
}

function join(list) {
  const low = Math.min(...list.map((one) => one.low));
  const high = Math.max(...list.map((one) => one.high));
  // A run in which nothing has changed yet still gets an axis.
  return high - low > 1e-6 ? { low, high } : { low: -0.5, high: 0.5 };
}

export function sinceText(attribution) {
  const { kind, step } = attribution.since;
  if (step === null) return "since the start";
  return kind === "baseline" ? `since the baseline (step ${stepText(step)})` : `since step ${stepText(step)}`;
}

export function heroView(state, infos, attributions, position) {
  const first = attributions[0];
  const step = first.steps[position];
  const factor = factorOf("nat", state.unit);
  const runs = attributions.map((attribution, i) => {
    const at = i === 0 ? position : positionOf(attribution.steps, step);
    const note = attribution.problem ? `The change cannot be split: ${attribution.problem}` : null;
    const total = meanAt(attribution, "total_entropy", at);
    const content = meanAt(attribution, "content_mass_entropy", at);
    // At A itself there is no change to tell; the terms of the entropy are known there.
    const moment = attribution.steps[at] === attribution.since.step && Number.isFinite(content);
    if (moment) return { moment, change: { total, sink: total - content, content, support: 0 }, after: stepText(attribution.steps[at]), name: infos[i].name, note };
    return { change: changeAt(attribution, at), before: stepText(attribution.since.step), after: stepText(attribution.steps[at]), name: infos[i].name, note };
  });
  const start = Math.max(0, positionOf(first.steps, first.since.step ?? first.steps[0]));
  const tile = (stat, label, title, unit, scale) => {
    const one = { label, title, unit, before: meanAt(first, stat, start) * scale, after: meanAt(first, stat, position) * scale };
    if (attributions[1]) one.second = meanAt(attributions[1], stat, positionOf(attributions[1].steps, step)) * scale;
    return one;
  };
  const tiles = [
    tile("total_entropy", "entropy H", "Mean entropy over all heads", state.unit, factor),
    tile("sink_mass", "sink mass s", "Mean attention on the sink over all heads", "", 1),
    tile("content_evenness", "evenness J", "Content entropy free of length: 1 uniform, 0 one key", "", 1),
  ];
  const highest = (attribution, at) => (attribution.arrays.highest ? attribution.arrays.highest[at] : NaN);
  if (first.arrays.highest) {
    const one = { label: "max logit", title: "Largest attention logit of all heads", unit: "", before: highest(first, start), after: highest(first, position) };
    if (attributions[1]) one.second = highest(attributions[1], positionOf(attributions[1].steps, step));
    tiles.push(one);
  }
  return { steps: first.steps, position, start, step, unit: state.unit, factor, runs, tiles, extent: runs.some((run) => run.moment) ? { low: 0, high: Math.max(...runs.map((run) => run.change.total || 1)) } : join(attributions.map((one) => extents(one).model)) };
}

// At A itself, where nothing has changed yet: the terms of the entropy by layer.
function termBars(state, infos, attributions, position) {
  const layers = infos[0].layers;
  const step = attributions[0].steps[position];
  const runs = attributions.map((attribution, i) => {
    const { terms } = attribution.arrays;
    const size = terms.length / 2;
    const at = (i === 0 ? position : positionOf(attribution.steps, step)) * infos[i].layers.length;
    const own = new Map(infos[i].layers.map((layer, k) => [layer.name, { total: terms[at + k] + terms[size + at + k], sink: terms[at + k], content: terms[size + at + k], support: 0 }]));
    return layers.map((layer) => own.get(layer.name) || { total: NaN, sink: NaN, content: NaN, support: NaN });
  });
  const high = Math.max(1e-6, ...runs.flat().map((one) => one.total).filter(Number.isFinite));
  return { layers, runs, extent: { low: 0, high }, factor: factorOf("nat", state.unit), unit: state.unit, title: "Entropy by layer", since: sinceText(attributions[0]), word: "term", support: false };
}

export function barsView(state, infos, attributions, position) {
  const step = attributions[0].steps[position];
  const layers = infos[0].layers;
  if (step === attributions[0].since.step && attributions.every((one) => one.arrays.terms)) return termBars(state, infos, attributions, position);
  const runs = attributions.map((attribution, i) => {
    const at = i === 0 ? position : positionOf(attribution.steps, step);
    const own = layerChanges(attribution, at, infos[i].layers.length);
    if (i === 0) return own;
    const byName = new Map(infos[i].layers.map((layer, k) => [layer.name, own[k]]));
    return layers.map((layer) => byName.get(layer.name) || { total: NaN, sink: NaN, content: NaN, support: NaN });
  });
  const factor = factorOf("nat", state.unit);
  const support = runs.some((run) => run.some((layer) => Math.abs(layer.support) >= 0.0005));
  return { layers, runs, extent: join(attributions.map((one) => extents(one).layers)), factor, unit: state.unit, title: `Change by layer ${sinceText(attributions[0])}`, since: sinceText(attributions[0]), word: "part", support };
}

function frameOf(answer, step) {
  const heads = answer.arrays.values.length / Math.max(1, answer.steps.length);
  const at = positionOf(answer.steps, step);
  return answer.arrays.values.subarray(at * heads, (at + 1) * heads);
}

// Run 1 minus run 2 where both have the layer and the head; NaN elsewhere.
function difference(infos, frames) {
  const starts = new Map();
  let at = 0;
  for (const layer of infos[1].layers) {
    starts.set(layer.name, { at, heads: layer.heads });
    at += layer.heads;
  }
  const out = new Float32Array(frames[0].length).fill(NaN);
  at = 0;
  for (const layer of infos[0].layers) {
    const other = starts.get(layer.name);
    for (let head = 0; head < layer.heads; head += 1) {
      if (other && head < other.heads) out[at + head] = frames[0][at + head] - frames[1][other.at + head];
    }
    at += layer.heads;
  }
  return out;
}

// `answers`: frames of run 1 and, when comparing, of run 2; either may be null while loading.
export function mapView({ state, infos, answers, step, alerts, bars, dark, room }) {
  const which = infos.length > 1 ? state.compare : "a";
  const info = infos[which === "b" ? 1 : 0];
  const stat = statInfo(infos[0], state.stat);
  const factor = factorOf(stat.unit, state.unit);
  let values = null;
  let limits = [0, 0];
  let kind = kindOf(stat.name, stat.unit);
  if (which === "diff") {
    if (answers[0] && answers[1]) {
      values = difference(infos, [frameOf(answers[0], step), frameOf(answers[1], step)]);
      // The two ranges bound any difference; colours then stay put while the step moves.
      const finite = Array.from(values).filter(Number.isFinite).map(Math.abs);
      limits = [0, Math.max(0.25 * (answers[0].limits[1] - answers[0].limits[0]), ...finite)];
    }
    kind = "change";
  } else {
    const answer = answers[which === "b" ? 1 : 0];
    if (answer) {
      values = frameOf(answer, step);
      const known = answers.filter(Boolean).map((one) => one.limits);
      limits = [Math.min(...known.map((one) => one[0])), Math.max(...known.map((one) => one[1]))];
    }
  }
  const offered = new Set(infos[0].stats.map((one) => one.name));
  const quick = new Set(CHOICES.map((one) => one.stat));
  const at = stepText(answers[0] ? answers[0].steps[positionOf(answers[0].steps, step)] : step);
  return {
    layers: info.layers,
    short: shortOf(info),
    values,
    scale: colorScale(kind, limits, dark),
    factor,
    unit: unitText(stat.unit, state.unit),
    title: titleOf(stat.name),
    formula: stat.formula,
    doc: stat.doc,
    at: isChange(stat.name) ? `${bars ? bars.since : ""}, at step ${at}` : `at step ${at}${which === "diff" ? ", run 1 \u2212 run 2" : ""}`,
    stat: stat.name,
    offered,
    more: infos[0].stats.filter((one) => !quick.has(one.name)).map((one) => ({ value: one.name, label: titleOf(one.name) })),
    selected: { layer: state.layer ?? 0, head: state.head },
    frames: which === "a" ? framesOf(alerts, step, info.layers) : [],
    bars,
    comparing: infos.length > 1,
    compare: which,
    room,
  };
}

// The head to look at first: that of the worst alert, else the one whose layer changed most.
export function firstHead(info, alerts, attribution) {
  for (const severity of ["error", "warn"]) {
    const found = [...alerts].reverse().find((alert) => alert.severity === severity && alert.layer_index !== null);
    if (found) return { layer: found.layer_index, head: found.head ?? 0 };
  }
  if (attribution && attribution.steps.length) {
    const changes = layerChanges(attribution, attribution.steps.length - 1, info.layers.length).map((one) => Math.abs(one.total));
    const most = changes.reduce((best, value, i) => (value > (changes[best] || 0) ? i : best), 0);
    return { layer: most, head: 0 };
  }
  return { layer: 0, head: 0 };
}

export function curvesView({ state, infos, answers, attribution, step, alerts, error }) {
  const info = infos[0];
  const stat = statInfo(info, state.stat);
  const layer = info.layers[state.layer ?? 0];
  const marks = alerts.filter((alert) => alert.level === "head" && alert.layer_index === state.layer && alert.head === state.head && alert.step !== null)
    .map((alert) => ({ step: alert.step, severity: alert.severity }));
  return {
    key: JSON.stringify([info.name, infos[1]?.name, state.layer, state.head, state.view, state.unit, state.view === "stat" ? state.stat : "", state.since, answers.map((answer) => answer && answer.steps.length), marks.length, info.version, answers.map(Boolean)]),
    view: state.view,
    answer: answers[0],
    second: answers[1],
    layerName: layer.name,
    short: `Layer ${shortOf(info)[state.layer ?? 0]}`,
    head: state.head,
    factor: factorOf("nat", state.unit),
    unit: state.unit,
    step,
    stepText: stepText(step),
    since: attribution.since.kind === "baseline" ? `Baseline (step ${stepText(attribution.since.step)})` : `Step ${stepText(attribution.since.step)}`,
    sinceStep: attribution.since.step ?? NaN,
    stat: stat.name,
    statTitle: titleOf(stat.name),
    statFactor: factorOf(stat.unit, state.unit),
    statUnit: unitText(stat.unit, state.unit),
    marks,
    error,
  };
}
