// Numbers and names as text. The sentence is the one of entropy_monitor/notebook.py: what is printed adds up.

const MINUS = "\u2212";
export const BITS = 1 / Math.LN2;

export function signed(value, decimals) {
  const text = Math.abs(value).toFixed(decimals);
  if (Number(text) === 0) return text;
  return (value < 0 ? MINUS : "+") + text;
}

export function plain(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "\u2013";
  const size = Math.abs(value);
  let text;
  if (size !== 0 && size < 0.0005) text = value.toExponential(1);
  else if (size >= 1000) text = Math.round(value).toLocaleString("en-US");
  else text = value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
  return text.replace("-", MINUS);
}

export function stepText(step) {
  return step === null || step === undefined ? "\u2013" : step.toLocaleString("en-US");
}

function sumDecimals(values) {
  const largest = Math.max(0, ...values.map(Math.abs).filter(Number.isFinite));
  return largest >= 0.1 ? 2 : largest >= 0.01 ? 3 : 4;
}

// Round a sum and its parts so that the rounded parts add up to the rounded sum; missing last digits go to the
// parts whose own rounding error is largest in that direction.
export function roundSum(total, parts, decimals) {
  const scale = 10 ** decimals;
  const units = (value) => Math.sign(value) * Math.floor(Math.abs(value) * scale + 0.5);
  const target = units(total);
  const rounded = parts.map(units);
  const missing = target - rounded.reduce((sum, value) => sum + value, 0);
  const direction = missing > 0 ? 1 : -1;
  const order = parts.map((_, i) => i);
  order.sort((a, b) => direction * (parts[b] * scale - rounded[b]) - direction * (parts[a] * scale - rounded[a]));
  for (const i of order.slice(0, Math.abs(missing))) rounded[i] += direction;
  return { total: target / scale, parts: rounded.map((value) => value / scale) };
}

function shares(total, parts) {
  if (!Number.isFinite(total) || total === 0) return null;
  if (parts.some((part) => part * total < 0 || !Number.isFinite(part))) return null;
  return roundSum(100, parts.map((part) => (100 * part) / total), 0).parts;
}

// A change as it is printed: {total, parts: [{name, value, text}]} whose numbers add up; null if it is not known.
export function printedChange(change, factor) {
  const total = change.total * factor;
  let parts = ["sink", "content", "support"].map((name) => ({ name, value: change[name] * factor }));
  if (![total, ...parts.map((part) => part.value)].every(Number.isFinite)) return null;
  const decimals = sumDecimals([total, ...parts.map((part) => part.value)]);
  if (Math.abs(parts[2].value) * 10 ** decimals < 0.5) parts = parts.slice(0, 2);
  const rounded = roundSum(total, parts.map((part) => part.value), decimals);
  return { total: signed(rounded.total, decimals), parts: parts.map((part, i) => ({ ...part, text: signed(rounded.parts[i], decimals) })) };
}

// The sentence in pieces: [{text, channel}], so that the numbers can carry the colour of their channel.
export function changeSentence(change, before, after, unit) {
  const lead = `Steps ${before} \u2192 ${after}: `;
  const factor = unit === "bit" ? BITS : 1;
  const printed = printedChange(change, factor);
  if (!printed) return [{ text: `${lead}the change of mean entropy is not known` }];
  const total = change.total * factor;
  const { parts } = printed;
  const pieces = [{ text: lead }, { text: "mean entropy " }, { text: printed.total, channel: "total" }, { text: ` ${unit} = ` }];
  parts.forEach((part, i) => {
    if (i > 0) pieces.push({ text: " + " });
    pieces.push({ text: `${part.name} ${part.text}`, channel: part.name });
  });
  const split = shares(total, parts.map((part) => part.value));
  if (split) pieces.push({ text: ` (${split.map((share, i) => `${share}% ${parts[i].name}`).join(", ")})`, aside: true });
  else if (total !== 0) pieces.push({ text: " (shares undefined: parts of opposite sign)", aside: true });
  else pieces.push({ text: " (shares undefined: within noise)", aside: true });
  return pieces;
}

// Where there is nothing to compare yet: what the entropy of one step is made of.
export function momentSentence(terms, step, unit) {
  const lead = `Step ${step}: `;
  const printed = printedChange({ ...terms, support: 0 }, unit === "bit" ? BITS : 1);
  if (!printed) return [{ text: `${lead}the entropy is not known` }];
  const bare = (text) => text.replace(/^\+/, "");
  return [
    { text: lead }, { text: "mean entropy " }, { text: bare(printed.total), channel: "total" }, { text: ` ${unit} = ` },
    { text: `sink term ${bare(printed.parts[0].text)}`, channel: "sink" }, { text: " + " },
    { text: `content term ${bare(printed.parts[1].text)}`, channel: "content" },
  ];
}

// Short names for layers: what all have in common at both ends is dropped ("model.layers.3.self_attn" -> "3").
// Full names stay in tooltips and in the table of alerts.
export function shortNames(names) {
  const split = names.map((name) => {
    const [path, call] = splitCall(name);
    return { tokens: path.split("."), call };
  });
  if (!split.length) return [];
  let head = 0;
  let tail = 0;
  const first = split[0].tokens;
  const shortest = Math.min(...split.map((one) => one.tokens.length));
  while (head < shortest - 1 && split.every((one) => one.tokens[head] === first[head])) head += 1;
  while (tail < shortest - 1 - head && split.every((one) => one.tokens.at(-1 - tail) === first.at(-1 - tail))) tail += 1;
  const short = split.map((one) => {
    const text = one.tokens.slice(head, one.tokens.length - tail).filter((token) => token !== "layers" && token !== "layer" && token !== "blocks");
    return (text.join(".") || one.tokens.at(-1)) + one.call;
  });
  // Dropping tokens must not make two layers look alike.
  return new Set(short).size === short.length ? short : names;
}

function splitCall(name) {
  const found = /^(.*)(#\d+)$/.exec(name);
  return found ? [found[1], found[2]] : [name, ""];
}

export function ellipsis(text, longest) {
  return text.length <= longest ? text : `${text.slice(0, Math.ceil(longest / 2) - 1)}\u2026${text.slice(-Math.floor(longest / 2))}`;
}

// The formulas of the table of statistics are written in ASCII.
export function greek(text) {
  return text.replaceAll(/\bpi\b/g, "\u03c0").replaceAll(/\bsigma\b/g, "\u03c3").replaceAll(/\bd(?=[A-Z(]|c\b)/g, "\u0394").replaceAll(" - ", " \u2212 ").replaceAll("1-s", "1\u2212s");
}

// Round numbers for an axis: at most `count` ticks that cover [low, high].
export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999);
  const result = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) {
    result.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return result;
}

export function tickText(value, all) {
  const gap = all.length > 1 ? Math.abs(all[1] - all[0]) : Math.abs(value) || 1;
  if (gap >= 1000 && value !== 0 && Number.isInteger(value / 100)) return `${value / 1000}k`.replace("-", MINUS);
  const decimals = Math.min(6, Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9) + (String(gap / 10 ** Math.floor(Math.log10(gap))).startsWith("2.5") ? 1 : 0)));
  return value.toFixed(decimals).replace("-", MINUS);
}
