// Where the numbers come from: TensorBoard's routes, or blocks of text inside a one-file report. Both give the same
// answers in the same packing (see packing.py), so nothing above this file knows which it is.

const NAN_CODE = 65535;

export class SourceError extends Error {}

export function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = {};
  let at = 4 + length;
  for (const block of header.blocks) {
    const count = block.shape.reduce((product, size) => product * size, 1);
    if (block.dtype === "u2") {
      arrays[block.name] = dequantise(new Uint16Array(buffer, at, count), header.ranges[block.name]);
      at += 2 * count + ((2 * count) % 4);
    } else {
      arrays[block.name] = new Float32Array(buffer, at, count);
      at += 4 * count;
    }
  }
  return { ...header, arrays };
}

function dequantise(codes, [low, high]) {
  const values = new Float32Array(codes.length);
  const unit = (high - low) / (NAN_CODE - 1);
  for (let i = 0; i < codes.length; i += 1) values[i] = codes[i] === NAN_CODE ? NaN : low + codes[i] * unit;
  return values;
}

export function httpSource() {
  async function get(route, params) {
    const query = new URLSearchParams(Object.entries(params || {}).filter(([, value]) => value !== null && value !== undefined));
    let response;
    try {
      response = await fetch(`./${route}?${query}`, { credentials: "same-origin" });
    } catch {
      throw new SourceError("TensorBoard does not answer. Is it still running?");
    }
    if (!response.ok) {
      const body = await response.json().catch(() => ({}));
      throw new SourceError(typeof body.error === "string" ? body.error : `TensorBoard answered ${response.status}.`);
    }
    return response;
  }
  const json = async (route, params) => (await get(route, params)).json();
  const packed = async (route, params) => unpack(await (await get(route, params)).arrayBuffer());
  return {
    live: true,
    anySince: true,
    runs: () => json("runs").then((answer) => answer.runs.map((run) => ({ ...run, ...answer.layouts[run.layout] }))),
    alerts: (run) => json("alerts", { run }),
    frames: (run, stat, since) => packed("frames", { run, stat, from: since }),
    series: (run, layer, head, since) => packed("series", { run, layer, head, from: since }),
    attribution: (run, since) => packed("attribution", { run, from: since }),
  };
}

// `data`: {runs, alerts: {run: answer}}; packed answers lie in elements "em-frames-<run>-<stat>" as base64.
export function inlineSource(data) {
  const index = new Map(data.runs.map((run, i) => [run.name, i]));
  const cache = new Map();
  function blob(id) {
    if (!cache.has(id)) {
      const element = document.getElementById(id);
      if (!element) throw new SourceError("This report does not hold that.");
      const text = atob(element.textContent.trim());
      const bytes = new Uint8Array(text.length);
      for (let i = 0; i < text.length; i += 1) bytes[i] = text.charCodeAt(i);
      cache.set(id, unpack(bytes.buffer));
    }
    return cache.get(id);
  }
  const frames = async (run, stat) => blob(`em-frames-${index.get(run)}-${stat}`);
  return {
    live: false,
    anySince: false,
    runs: async () => data.runs,
    alerts: async (run) => data.alerts[index.get(run)],
    frames,
    attribution: async (run) => blob(`em-attribution-${index.get(run)}`),
    async series(run, layer, head) {
      const info = data.runs[index.get(run)];
      const at = info.layers.slice(0, layer).reduce((sum, one) => sum + one.heads, 0) + head;
      const names = info.stats.map((stat) => stat.name);
      const total = info.layers.reduce((sum, one) => sum + one.heads, 0);
      const pick = async (stat) => {
        const answer = await frames(run, stat);
        return answer.steps.map((_, i) => answer.arrays.values[i * total + at]);
      };
      const stats = names.filter((name) => !name.startsWith("change_"));
      const changes = ["total", "sink", "content", "support"];
      const values = await Promise.all(stats.map(pick));
      const changed = await Promise.all(changes.map((name) => pick(`change_${name}`)));
      const { steps } = await frames(run, stats[0]);
      return { layer, head, stats, changes, steps, arrays: { values: Float32Array.from(values.flat()), changes: Float32Array.from(changed.flat()) } };
    },
  };
}
