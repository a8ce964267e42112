// What is chosen, and how it is written in the address. Values out of an address are checked like any other input.

import { VIEWS } from "./curves.js";

// step null: the last one, also when it moves. since "baseline": the run's own baseline. layer null: choose for me.
export function initialState() {
  return { run: null, vs: "", stat: "sink_mass", since: "baseline", step: null, layer: null, head: 0, view: "change", unit: "nat", compare: "a" };
}

const NAME = /^[a-z0-9_]{1,64}$/;

function whole(text) {
  return /^-?\d{1,15}$/.test(text) ? Number(text) : null;
}

export function readState(hash, state) {
  const next = { ...state };
  if (hash.run !== undefined) next.run = hash.run;
  if (hash.vs !== undefined) next.vs = hash.vs;
  if (hash.stat !== undefined && NAME.test(hash.stat)) next.stat = hash.stat;
  if (hash.since !== undefined) next.since = hash.since === "baseline" ? "baseline" : whole(hash.since) ?? "baseline";
  if (hash.step !== undefined) next.step = hash.step === "last" ? null : whole(hash.step);
  const layer = hash.layer === undefined ? null : whole(hash.layer);
  const head = hash.head === undefined ? null : whole(hash.head);
  if (layer !== null && layer >= 0) Object.assign(next, { layer, head: head !== null && head >= 0 ? head : 0 });
  if (VIEWS.includes(hash.view)) next.view = hash.view;
  if (hash.unit === "nat" || hash.unit === "bit") next.unit = hash.unit;
  if (["a", "b", "diff"].includes(hash.compare)) next.compare = hash.compare;
  return next;
}

export function writeState(state) {
  const values = { run: state.run ?? "", stat: state.stat, step: state.step === null ? "last" : String(state.step) };
  if (state.since !== "baseline") values.since = String(state.since);
  if (state.layer !== null) Object.assign(values, { layer: String(state.layer), head: String(state.head) });
  if (state.view !== "change") values.view = state.view;
  if (state.unit !== "nat") values.unit = state.unit;
  if (state.vs) Object.assign(values, { vs: state.vs, compare: state.compare });
  return values;
}
