// Entry point of the one-file report: the same page on answers that lie in the file.

import { start } from "./app.js";
import { makeHost } from "./host.js";
import { inlineSource } from "./source.js";

export function openReport() {
  const data = JSON.parse(document.getElementById("em-data").textContent);
  return start(document.getElementById("em-root"), inlineSource(data), makeHost());
}
