// What the statistic buttons offer, how each is named and coloured. Whatever else a run recorded is offered in a list.

export const CHOICES = [
  { stat: "sink_mass", label: "s", title: "Sink mass" },
  { stat: "content_entropy", label: "H(\u03c0)", title: "Content entropy" },
  { stat: "content_evenness", label: "evenness", title: "Content evenness" },
  { stat: "total_entropy", label: "H", title: "Total entropy" },
  { stat: "max_logit", label: "max logit", title: "Largest attention logit" },
  { stat: "change_total", label: "\u0394H", title: "Change of entropy" },
  { stat: "change_sink", label: "\u0394 sink", title: "Part of the change from the sink" },
  { stat: "change_content", label: "\u0394 content", title: "Part of the change from the content" },
];

export function isChange(stat) {
  return stat.startsWith("change_");
}

export function titleOf(stat) {
  const choice = CHOICES.find((one) => one.stat === stat);
  if (choice) return choice.title;
  if (stat === "change_support") return "Part of the change from the support";
  const text = stat.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export function kindOf(stat, unit) {
  if (isChange(stat)) return "change";
  if (stat === "content_evenness") return "evenness";
  return unit;
}

// Entropies follow the nat/bit switch; nothing else does.
export function factorOf(statUnit, unit) {
  return statUnit === "nat" && unit === "bit" ? 1 / Math.LN2 : 1;
}

export function unitText(statUnit, unit) {
  if (statUnit === "nat") return unit;
  return { mass: "share of attention", share: "share of rows", logit: "logits", keys: "keys", rows: "rows" }[statUnit] || "";
}
