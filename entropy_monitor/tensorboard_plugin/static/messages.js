// What the page says when there is nothing to show, and how to read it.

import { h } from "./dom.js";

const EXAMPLES = [
  ["Lightning", "from entropy_monitor import EntropyMonitor\n\ntrainer = Trainer(callbacks=[EntropyMonitor()])"],
  ["Hugging Face", "from entropy_monitor import EntropyMonitorCallback\n\ntrainer = Trainer(..., callbacks=[EntropyMonitorCallback()])"],
];

export function emptyPage(onReload) {
  return h("section", { class: "card state" },
    h("h2", {}, "No attention data yet"),
    h("p", {}, "This log folder has no run that was written with entropy_monitor. Add the callback to the trainer; the first numbers appear after its first logged step."),
    EXAMPLES.map(([name, code]) => [h("h3", {}, name), h("pre", { tabindex: "0", "aria-label": `Example for ${name}` }, h("code", {}, code))]),
    h("p", {}, "A run that is already training shows up here by itself: TensorBoard looks for new data every few seconds."),
    h("button", { type: "button", on: { click: onReload } }, "Look again"));
}

export function errorPage(message, onReload) {
  return h("section", { class: "card state", role: "alert" }, h("h2", {}, "This cannot be shown"), h("p", {}, message),
    h("button", { type: "button", on: { click: onReload } }, "Try again"));
}

export function loadingPage() {
  return h("section", { class: "card state loading", role: "status" }, h("h2", {}, "Loading attention data\u2026"),
    h("div", { class: "bone wide" }), h("div", { class: "bone" }), h("div", { class: "bone tall" }));
}

export function gonePage(name, onFirst) {
  return h("section", { class: "card state", role: "alert" }, h("h2", {}, "This run has gone"),
    h("p", {}, "The run ", h("strong", {}, name), " is no longer in the log folder. It may have been moved or deleted."),
    onFirst ? h("button", { type: "button", on: { click: onFirst } }, "Show another run") : null);
}

const KEYS = [
  ["\u2190 \u2192 \u2191 \u2193", "choose a head (in the heat map)"],
  [", .", "previous, next step"],
  ["1 \u2026 8", "statistic"],
  ["a", "next alert"],
  ["b", "nat or bit"],
  ["?", "this help"],
];

export function helpDialog() {
  const close = h("button", { type: "button", class: "icon", "aria-label": "Close", on: { click: () => dialog.close() } }, "\u00d7");
  const dialog = h("dialog", { "aria-labelledby": "em-help-title" },
    h("div", { class: "card-head" }, h("h2", { id: "em-help-title" }, "How to read this page"), close),
    h("p", {}, "One attention row splits into the sink, with mass s, and the content, with composition \u03c0. Its entropy is exactly ",
      h("strong", {}, "H = Hb(s) + (1\u2212s)\u00b7H(\u03c0)"), ": a sink term and a content term."),
    h("p", {}, "When H falls, two very different things may have happened. The ", h("strong", {}, "sink part"),
      " of the change is what mass moving to (or from) the sink did: usually harmless. The ", h("strong", {}, "content part"),
      " is what attention among the other tokens did: if it collapses onto few keys, look at the alerts. A ", h("strong", {}, "support part"),
      " appears where rows see more or fewer keys than before."),
    h("p", {}, "The sink term Hb(s) can rise while the sink part of the change is negative: mass on the sink is mass taken from the content."),
    h("p", {}, "All values are means per head over the rows that count, then over heads. Shares are given only where both parts have the sign of the whole."),
    h("h3", {}, "Keys"),
    h("dl", { class: "keys" }, KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])));
  return dialog;
}
