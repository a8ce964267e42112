// Colour scales. Viridis for values; PRGn for changes, with a dark middle on dark pages so that "no change"
// recedes on both. 256 entries each, interpolated in sRGB between published anchor colours.

const VIRIDIS = ["#440154", "#482475", "#414487", "#355f8d", "#2a788e", "#21918c", "#22a884", "#44bf70", "#7ad151", "#bddf26", "#fde725"];
const PRGN_LIGHT = ["#40004b", "#762a83", "#9970ab", "#c2a5cf", "#e7d4e8", "#f7f7f7", "#d9f0d3", "#a6dba0", "#5aae61", "#1b7837", "#00441b"];
const PRGN_DARK = ["#e3c2ec", "#c795d6", "#9c6bb0", "#6d4780", "#43324f", "#2b2e34", "#2c4a33", "#37713f", "#4e9a57", "#7dc582", "#bfecc0"];

function scale(anchors) {
  const table = new Uint32Array(256);
  const rgb = anchors.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  for (let i = 0; i < 256; i += 1) {
    const at = (i / 255) * (anchors.length - 1);
    const low = Math.min(anchors.length - 2, Math.floor(at));
    const [r, g, b] = rgb[low].map((value, k) => Math.round(value + (rgb[low + 1][k] - value) * (at - low)));
    table[i] = 0xff000000 | (b << 16) | (g << 8) | r; // little-endian RGBA, as ImageData wants it
  }
  return table;
}

const TABLES = { viridis: scale(VIRIDIS), prgnLight: scale(PRGN_LIGHT), prgnDark: scale(PRGN_DARK) };

// What a statistic's colours run over. Masses and shares are fixed to [0, 1], so that colours mean the same in every
// run; other values run over all steps, so that moving the slider does not move the scale; changes are symmetric.
export function colorScale(kind, limits, dark) {
  if (kind === "change") {
    const most = Math.max(Math.abs(limits[0]), Math.abs(limits[1])) || 1;
    return { table: dark ? TABLES.prgnDark : TABLES.prgnLight, low: -most, high: most };
  }
  const fixed = kind === "mass" || kind === "share" || kind === "evenness";
  const low = fixed || limits[0] >= 0 ? 0 : limits[0];
  const high = fixed ? 1 : limits[1];
  return { table: TABLES.viridis, low, high: high > low ? high : low + 1 };
}

export function colorOf(scaleOf, value) {
  const at = Math.round(((value - scaleOf.low) / (scaleOf.high - scaleOf.low)) * 255);
  return scaleOf.table[at < 0 ? 0 : at > 255 ? 255 : at];
}

const cssCache = new Map();

// Kept by value: a large map would otherwise build a text for every cell at every move of the slider.
export function cssColor(rgba) {
  let text = cssCache.get(rgba);
  if (text === undefined) {
    text = `rgb(${rgba & 255} ${(rgba >> 8) & 255} ${(rgba >> 16) & 255})`;
    cssCache.set(rgba, text);
  }
  return text;
}

export function cssGradient(scaleOf) {
  const stops = [];
  for (let i = 0; i <= 16; i += 1) stops.push(`${cssColor(scaleOf.table[Math.round((i / 16) * 255)])} ${(i / 16) * 100}%`);
  return `linear-gradient(to right, ${stops.join(", ")})`;
}
