// Entry point inside TensorBoard: an almost empty page that imports this module and calls render().

import { start } from "./app.js";
import { h } from "./dom.js";
import { makeHost } from "./host.js";
import { httpSource } from "./source.js";

export async function render() {
  document.documentElement.lang = "en";
  document.title = "Attention";
  const style = h("link", { rel: "stylesheet", href: "./style.css" });
  const styled = new Promise((done) => {
    style.addEventListener("load", done);
    style.addEventListener("error", done);
  });
  document.head.append(style, h("meta", { name: "viewport", content: "width=device-width, initial-scale=1" }));
  const root = h("div", { id: "em-root" });
  document.body.append(root);
  await styled; // sizes are measured, so styles come first
  await start(root, httpSource(), makeHost());
}
