// The page around the tab. Inside TensorBoard: its dark mode, its reload button, its address. Everything is optional
// and in try/catch: the parent may be another origin (a notebook), or there may be none (a report on disk).

const PREFIX = "em.";

export function makeHost() {
  const inside = (() => {
    try {
      return window.parent !== window && Boolean(window.parent.document);
    } catch {
      return false;
    }
  })();
  const place = () => (inside ? window.parent : window);
  let written = null;
  return {
    inside,
    dark() {
      if (inside && place().document.body.classList.contains("dark-mode")) return true;
      return !inside && window.matchMedia("(prefers-color-scheme: dark)").matches;
    },
    onDark(handler) {
      if (inside) {
        new MutationObserver(handler).observe(place().document.body, { attributes: true, attributeFilter: ["class"] });
      } else {
        window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", handler);
      }
    },
    readHash() {
      const values = {};
      for (const part of place().location.hash.slice(1).split("&")) {
        const [key, value] = part.split("=");
        if (value === undefined) continue;
        try {
          const name = decodeURIComponent(key);
          if (name.startsWith(PREFIX)) values[name.slice(PREFIX.length)] = decodeURIComponent(value);
        } catch {
          // A broken escape in a pasted link: that part is ignored.
        }
      }
      return values;
    },
    writeHash(values) {
      const others = place().location.hash.slice(1).split("&").filter((part) => part && !part.startsWith(PREFIX));
      const ours = Object.entries(values).map(([key, value]) => `${PREFIX}${key}=${encodeURIComponent(value)}`);
      const hash = `#${[...others, ...ours].join("&")}`;
      if (hash === written || hash === place().location.hash) return;
      written = hash;
      try {
        place().history.replaceState(place().history.state, "", hash);
      } catch {
        // Too many changes in a short time, or a sandboxed page: the link is a convenience.
      }
    },
    onHash(handler) {
      place().addEventListener("hashchange", () => {
        if (place().location.hash !== written) handler();
      });
    },
    onReload(handler) {
      if (!inside) return;
      // TensorBoard's (experimental) way to talk to plugins: a channel of JSON messages, each answered by its id.
      const channel = new MessageChannel();
      channel.port1.onmessage = (event) => {
        let message;
        try {
          message = JSON.parse(event.data);
        } catch {
          return;
        }
        if (message.isReply) return;
        if (message.type === "experimental.DataReloaded") handler();
        channel.port1.postMessage(JSON.stringify({ type: message.type, id: message.id, payload: null, error: null, isReply: true }));
      };
      window.parent.postMessage("experimental.bootstrap", window.parent.location.origin, [channel.port2]);
    },
  };
}
