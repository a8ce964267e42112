// The page: toolbar, cards, and what happens when something is chosen, loaded or reloaded.

import { makeAlerts } from "./alerts.js";
import { makeCurves } from "./curves.js";
import { h, picker, replace, segmented } from "./dom.js";
import { ellipsis, stepText } from "./format.js";
import { makeHeatmap } from "./heatmap.js";
import { makeHero } from "./hero.js";
import { makeLibrary, positionOf } from "./library.js";
import { emptyPage, errorPage, gonePage, helpDialog, loadingPage } from "./messages.js";
import { initialState, readState, writeState } from "./state.js";
import { CHOICES, isChange } from "./stats.js";
import { barsView, curvesView, firstHead, heroView, mapView, shortOf } from "./views.js";

const POLL_MS = 10000;
const SOON_MS = 1200;

export function start(root, source, host) {
  let state = readState(host.readHash(), initialState());
  let steps = [];
  let alertAt = -1;
  let room = { key: null, value: 480 };
  let sinceList = { key: null, options: [] };
  let hashTimer = null;
  let theme = null; // null: follow the page around
  const library = makeLibrary(source, () => render());

  function set(change) {
    state = { ...state, ...change };
    render();
  }

  const actions = {
    select(layer, head) {
      set({ layer, head: head ?? Math.min(state.head, library.run(state.run).layers[layer].heads - 1) });
    },
    stat: (stat) => set({ stat }),
    view: (view) => set({ view }),
    compare: (compare) => set({ compare }),
    step: (step) => actions.position(positionOf(steps, step)),
    position: (position) => set({ step: position >= steps.length - 1 ? null : steps[Math.max(0, position)] }),
    move: (by) => actions.position(positionOf(steps, state.step) + by),
    open(alert) {
      const change = { step: alert.step === null || alert.step >= steps.at(-1) ? null : steps[positionOf(steps, alert.step)] };
      if (alert.layer_index !== null) Object.assign(change, { layer: alert.layer_index, head: alert.head ?? 0 });
      set(change);
      // In one column the map may be far above the table; beside it, the page stays where it is.
      const { top } = map.focus.getBoundingClientRect();
      if (top < 0 || top > window.innerHeight - 120) map.element.scrollIntoView({ block: "start" });
    },
  };

  const hero = makeHero(actions);
  const map = makeHeatmap(actions);
  const curves = makeCurves(actions);
  const alerts = makeAlerts(actions);
  const run = picker("Run", "em-run", (name) => set({ run: name, layer: null, head: 0, step: null, since: "baseline", vs: name === state.vs ? "" : state.vs }));
  const vs = picker("Compare with", "em-vs", (name) => set({ vs: name, compare: name ? state.compare : "a" }));
  const since = picker("Since (A)", "em-since", (value) => set({ since: value === "baseline" ? "baseline" : Number(value) }));
  const unit = segmented("Unit of entropy", [{ value: "nat", label: "nat" }, { value: "bit", label: "bit" }], (value) => set({ unit: value }));
  const dark = h("button", { type: "button", class: "icon", "aria-label": "Light or dark", title: "Light or dark", on: { click: () => {
    theme = isDark() ? "light" : "dark";
    applyTheme();
  } } }, "\u25d0");
  const help = helpDialog();
  const helpButton = h("button", { type: "button", class: "icon", "aria-label": "How to read this page", title: "How to read this page ( ? )", on: { click: () => help.showModal() } }, "?");
  const reload = h("button", { type: "button", class: "icon", "aria-label": "Reload", title: "Reload", on: { click: () => refresh() } }, "\u21bb");
  const toolbar = h("header", { class: "toolbar" }, h("h1", {}, "Attention entropy"), run.element, vs.element, since.element,
    h("div", { class: "spacer" }), unit.element, source.live ? reload : null, dark, helpButton);
  const notices = h("div", { class: "notices", role: "status" });
  const grid = h("div", { class: "grid" }, map.element, h("div", { class: "side" }, curves.element, alerts.element));
  const page = h("main", {});
  replace(root, toolbar, notices, page, help);

  function isDark() {
    return theme === null ? host.dark() : theme === "dark";
  }

  function applyTheme() {
    document.documentElement.dataset.theme = isDark() ? "dark" : "light";
    render();
  }

  function refresh() {
    library.retry();
    return library.refresh();
  }

  function show(...elements) {
    // Cards stay in the page while they can, so that focus and open lists survive a reload.
    if (elements.length !== page.children.length || elements.some((element, i) => page.children[i] !== element)) replace(page, elements);
    const cards = elements[0] === hero.element;
    toolbar.classList.toggle("bare", !cards && !(library.runs || []).length);
    root.dataset.state = cards ? "ready" : elements[0].dataset.state || "message";
  }

  function message(name, element) {
    element.dataset.state = name;
    // The same message is not rebuilt on every poll: a screen reader would read it again.
    if (page.firstChild?.dataset?.state === name && page.firstChild.textContent === element.textContent) return;
    show(element);
  }

  function render() {
    const runs = library.runs;
    if (!runs) return library.problem ? message("error", errorPage(library.problem, refresh)) : message("loading", loadingPage());
    run.update([...runs, ...(state.run && !library.run(state.run) ? [{ name: state.run }] : [])].map((one) => ({ value: one.name, label: ellipsis(one.name, 60) })), state.run ?? runs[0]?.name);
    if (!runs.length && !state.run) return message("empty", emptyPage(refresh));
    if (state.run === null || state.run === "") state = { ...state, run: runs[0].name };
    const info = library.run(state.run);
    if (!info) return message("gone", gonePage(state.run, runs.length ? () => set({ ...initialState(), run: runs[0].name }) : null));
    if (info.problem) return message("error", errorPage(info.problem, refresh));
    const other = state.vs && state.vs !== state.run ? library.run(state.vs) : null;
    const infos = other && !other.problem ? [info, other] : [info];
    vs.update([{ value: "", label: "\u2013" }, ...runs.filter((one) => one.name !== state.run).map((one) => ({ value: one.name, label: ellipsis(one.name, 60) }))], infos[1]?.name ?? "");
    vs.element.hidden = runs.length < 2;

    const from = String(state.since);
    const attributions = infos.map((one) => library.get("attribution", one.name, from));
    if (attributions[0].error && state.since !== "baseline" && !info.loading) return set({ since: "baseline" });
    const attribution = attributions[0].value;
    // Asked for together: the server reads the run once for all of them.
    const list = library.get("alerts", info.name);
    framesFor(infos);
    if (!attribution) return attributions[0].error && !info.loading ? message("error", errorPage(attributions[0].error, refresh)) : message("loading", loadingPage());
    if (!attribution.steps.length) return message("error", errorPage("This run has no step that can be shown.", refresh));
    return renderCards(infos, attributions.map((one) => one.value), list);
  }

  function renderCards(infos, attributions, list) {
    const info = infos[0];
    const attribution = attributions[0];
    const known = attributions.filter(Boolean);
    const raised = list.value ? list.value.alerts : [];
    steps = attribution.steps;
    if (state.layer === null && (list.value || list.error)) state = { ...state, ...firstHead(info, raised, attribution), view: steps.length === 1 ? "terms" : state.view };
    const layer = Math.min(state.layer ?? 0, info.layers.length - 1);
    if (layer !== state.layer || state.head >= info.layers[layer].heads) state = { ...state, layer: state.layer === null ? null : layer, head: Math.min(state.head, info.layers[layer].heads - 1) };
    if (!info.stats.some((one) => one.name === state.stat)) state = { ...state, stat: info.stats[0].name };
    const position = positionOf(steps, state.step);
    const step = steps[position];
    show(hero.element, grid);
    since.update(sinceOptions(attribution), String(state.since));
    since.select.disabled = !source.anySince;
    unit.update(state.unit);
    hero.update({ ...heroView(state, infos, known, position), marks: stepMarks(raised) });
    const frames = framesFor(infos);
    renderNotices(infos, list, frames, attribution);
    const bars = barsView(state, infos.slice(0, known.length), known, position);
    map.update(mapView({ state, infos, answers: frames.map((one) => one.value), step, alerts: raised, bars, dark: isDark(), room: mapRoom(infos) }));
    const series = state.layer === null ? [] : infos.map((one) => seriesOf(one, info, String(state.since)));
    curves.update(curvesView({ state, infos, answers: series.map((one) => one && one.value), attribution, step, alerts: raised, error: series[0]?.error }));
    alerts.update({
      key: JSON.stringify([info.name, info.version, list.version, raised.length]), alerts: raised, total: list.value ? list.value.total : 0,
      short: shortOf(info), step, error: list.error, loading: !list.value,
    });
    // Browsers slow down pages that rewrite their address at every move of a slider.
    clearTimeout(hashTimer);
    hashTimer = setTimeout(() => host.writeHash(writeState(state)), 120);
  }

  function framesFor(infos) {
    const from = isChange(state.stat) ? String(state.since) : "baseline";
    return infos.map((one) => library.get("frames", one.name, state.stat, from));
  }

  // The same head of the compared run, found by the layer's name.
  function seriesOf(one, info, from) {
    const layer = one === info ? state.layer : one.layers.findIndex((other) => other.name === info.layers[state.layer].name);
    if (layer < 0 || state.head >= one.layers[layer].heads) return null;
    return library.get("series", one.name, layer, state.head, from);
  }

  function sinceOptions(attribution) {
    const first = attribution.since.kind === "baseline" ? `baseline (step ${stepText(attribution.since.step)})` : `first step (${stepText(attribution.steps[0])})`;
    const label = state.since === "baseline" ? first : "baseline or first step";
    if (sinceList.key !== steps || sinceList.label !== label) {
      const every = source.anySince ? steps.map((step) => ({ value: String(step), label: `step ${stepText(step)}` })) : [];
      sinceList = { key: steps, label, options: [{ value: "baseline", label }, ...every] };
    }
    return sinceList.options;
  }

  function stepMarks(raised) {
    const worst = new Map();
    const rank = { info: 0, warn: 1, error: 2 };
    for (const alert of raised) {
      if (alert.step === null) continue;
      const position = positionOf(steps, alert.step);
      const before = worst.get(position);
      if (before === undefined || rank[alert.severity] > rank[before]) worst.set(position, alert.severity);
    }
    return [...worst].slice(-300).map(([position, severity]) => ({ position, severity }));
  }

  function renderNotices(infos, list, frames, attribution) {
    const texts = [...(list.value?.notices || [])];
    if (attribution.problem) texts.push(attribution.problem);
    for (const one of frames) if (one.error) texts.push(one.error);
    const frame = frames[0].value;
    if (frame && frame.steps.length < frame.total_steps) texts.push(`The heat map shows ${stepText(frame.steps.length)} of ${stepText(frame.total_steps)} steps.`);
    if (infos[1]) {
      const names = new Set(infos[1].layers.map((one) => one.name));
      const missing = infos[0].layers.filter((one) => !names.has(one.name)).length + infos[1].layers.length - infos[0].layers.filter((one) => names.has(one.name)).length;
      if (missing) texts.push(`${missing} layers exist in only one of the two runs.`);
    }
    if (library.problem) texts.push(`Not up to date: ${library.problem}`);
    if (notices.dataset.key !== texts.join("\n")) {
      notices.dataset.key = texts.join("\n");
      replace(notices, texts.map((text) => h("p", {}, text)));
    }
  }

  // As high as the window allows. Measured only when something above the map may have changed: it forces a layout.
  function mapRoom(infos) {
    const key = `${infos.length} ${notices.dataset.key} ${window.innerWidth} ${window.innerHeight}`;
    if (key !== room.key) {
      const top = grid.getBoundingClientRect().top + window.scrollY;
      room = { key, value: Math.max(300, document.documentElement.clientHeight - top - 172) };
    }
    return room.value;
  }

  function nextAlert() {
    const raised = library.get("alerts", state.run).value?.alerts || [];
    if (!raised.length) return;
    alertAt = (alertAt + 1) % raised.length;
    actions.open(raised[raised.length - 1 - alertAt]);
  }

  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || help.open || event.target.closest("input, select, textarea")) return;
    const keys = { ",": () => actions.move(-1), ".": () => actions.move(1), a: nextAlert, b: () => set({ unit: state.unit === "nat" ? "bit" : "nat" }), "?": () => help.showModal() };
    const action = keys[event.key] || (/^[1-8]$/.test(event.key) ? () => actions.stat(CHOICES[Number(event.key) - 1].stat) : null);
    if (!action || root.dataset.state !== "ready") return;
    event.preventDefault();
    action();
  });
  host.onDark(applyTheme);
  host.onHash(() => {
    clearTimeout(hashTimer);
    state = readState(host.readHash(), initialState());
    render();
  });
  host.onReload(refresh);
  let drawnAt = "";
  const resized = () => {
    // The cards' own height changes with what they show; only the room given to the page matters.
    const now = `${root.clientWidth} ${document.documentElement.clientHeight} ${window.devicePixelRatio}`;
    if (now === drawnAt || root.dataset.state !== "ready") return;
    drawnAt = now;
    render();
    map.resize();
    curves.draw();
  };
  new ResizeObserver(resized).observe(root);
  window.addEventListener("resize", resized);
  if (source.live) {
    const poll = () => {
      // A very large run comes in two parts; the second is a second or two away.
      const soon = (library.runs || []).some((one) => one.loading);
      setTimeout(async () => {
        if (document.visibilityState === "visible") await library.refresh();
        poll();
      }, soon ? SOON_MS : POLL_MS);
    };
    refresh().then(poll);
    applyTheme();
    return null;
  }
  applyTheme();
  return refresh();
}
