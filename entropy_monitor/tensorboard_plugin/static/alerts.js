// The table of alerts: what, how bad, where, when. A line leads to its head and step.

import { h, replace, svg } from "./dom.js";
import { stepText } from "./format.js";

const PAGE = 500;
const SEVERITIES = ["error", "warn", "info"];
// Different outlines, so that severity does not rest on colour.
const SHAPES = { error: "M4.2 1h5.6L13 4.2v5.6L9.8 13H4.2L1 9.8V4.2z", warn: "M7 1l6.2 12H.8z", info: "M7 1a6 6 0 1 1 0 12A6 6 0 0 1 7 1z" };

export function makeAlerts(actions) {
  const title = h("h2", {}, "Alerts");
  const count = h("span", { class: "count" });
  const filter = h("select", { "aria-label": "Least severity shown", on: { change: () => redraw() } },
    h("option", { value: "info" }, "all"), h("option", { value: "warn" }, "warn and error"), h("option", { value: "error" }, "error"));
  const body = h("tbody", {});
  const empty = h("p", { class: "note" });
  const more = h("button", { type: "button", class: "more", on: { click: () => { shown += PAGE; redraw(); } } });
  const table = h("table", {},
    h("thead", {}, h("tr", {}, ["Severity", "Step", "Kind", "Where", "What"].map((name) => h("th", { scope: "col" }, name)))), body);
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of alerts" }, table, more);
  const element = h("section", { class: "card alerts-card", "aria-label": "Alerts" }, h("div", { class: "card-head" }, title, count, filter), empty, scroll);
  let view = null;
  let shown = PAGE;
  let drawn = "";

  function icon(severity) {
    return svg("svg", { class: "severity", viewBox: "0 0 14 14", width: 12, height: 12, "aria-hidden": "true" }, svg("path", { d: SHAPES[severity] || SHAPES.info }));
  }

  function where(alert) {
    if (alert.layer === null) return "model";
    const layer = alert.layer_index === null ? alert.layer : view.short[alert.layer_index];
    return alert.head === null ? layer : `${layer}, head ${alert.head}`;
  }

  function row(alert) {
    const severity = SEVERITIES.includes(alert.severity) ? alert.severity : "info";
    const go = () => {
      for (const line of body.children) line.removeAttribute("aria-current");
      element.setAttribute("aria-current", "true");
      actions.open(alert);
    };
    const element = h("tr", { class: severity, "data-step": alert.step, on: { click: go } },
      h("td", { class: "severity-cell" }, icon(severity), ` ${alert.severity}`),
      h("td", { class: "number" }, stepText(alert.step)),
      h("td", {}, alert.kind.replaceAll("_", " ")),
      h("td", { title: alert.layer || "whole model" }, h("button", { type: "button", class: "link", on: { click: (event) => { event.stopPropagation(); go(); } } }, where(alert))),
      h("td", { class: "message", title: alert.message }, h("div", {}, alert.message)));
    return element;
  }

  function redraw() {
    const least = SEVERITIES.indexOf(filter.value);
    const chosen = view.alerts.filter((alert) => {
      const rank = SEVERITIES.indexOf(alert.severity);
      return (rank < 0 ? 2 : rank) <= least;
    });
    chosen.reverse(); // newest first
    replace(body, chosen.slice(0, shown).map(row));
    const rest = chosen.length - shown;
    more.hidden = rest <= 0;
    more.textContent = `Show ${Math.min(PAGE, rest)} more of ${rest.toLocaleString("en-US")}`;
    scroll.hidden = chosen.length === 0;
    const missing = view.total - view.alerts.length;
    empty.hidden = chosen.length > 0 && missing <= 0;
    empty.textContent = chosen.length === 0
      ? view.alerts.length ? "No alert of this severity." : "No alerts: nothing unusual was seen."
      : `${view.total.toLocaleString("en-US")} alerts were raised; the log keeps the latest ${view.alerts.length.toLocaleString("en-US")}.`;
    const alarms = view.alerts.filter((alert) => alert.severity === "warn" || alert.severity === "error").length;
    count.textContent = view.total ? `${view.total.toLocaleString("en-US")}, of which ${alarms.toLocaleString("en-US")} warn or error` : "";
  }

  return {
    element,
    // view: {key, alerts, total, short, error, loading, chosen}
    update(next) {
      const key = next.key;
      view = next;
      if (view.error || view.loading) {
        scroll.hidden = true;
        empty.hidden = false;
        empty.textContent = view.error || "Loading\u2026";
        drawn = "";
        return;
      }
      if (key !== drawn) {
        drawn = key;
        shown = PAGE;
        redraw();
      }
      for (const line of body.children) line.classList.toggle("future", Number(line.dataset.step) > view.step);
    },
  };
}
