// Elements by function calls. Texts come from log folders that anyone may have written and this frame shares
// TensorBoard's origin, so text goes in as text nodes only: nothing here parses markup.

const SVG_SPACE = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  return build(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return build(document.createElementNS(SVG_SPACE, tag), props, children);
}

function build(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    } else if (name === "style") {
      for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A row of buttons of which one is pressed. `options`: [{value, label, title}].
export function segmented(label, options, onPick) {
  const buttons = options.map((option) =>
    h("button", { type: "button", title: option.title, "data-value": option.value, on: { click: () => onPick(option.value) } }, option.label),
  );
  const element = h("div", { class: "segmented", role: "group", "aria-label": label }, buttons);
  return {
    element,
    update(value) {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === String(value)));
    },
    show(value, visible) {
      for (const button of buttons) if (button.dataset.value === String(value)) button.hidden = !visible;
    },
  };
}

// A labelled select. `update(options, value)` with options [{value, label}] leaves an unchanged list alone, so that
// an open list does not close while a run is being written.
export function picker(label, id, onPick) {
  const select = h("select", { id, on: { change: () => onPick(select.value) } });
  const element = h("label", { class: "picker", for: id }, h("span", {}, label), select);
  let shown = null;
  let seen = null;
  return {
    element,
    select,
    update(options, value) {
      const key = options === seen ? shown : JSON.stringify(options);
      seen = options;
      if (key !== shown) {
        replace(select, options.map((option) => h("option", { value: option.value }, option.label)));
        shown = key;
      }
      select.value = String(value);
    },
  };
}

export function tooltip() {
  const element = h("div", { class: "tooltip", hidden: true, "aria-hidden": "true" });
  document.body.append(element);
  return {
    show(x, y, ...lines) {
      replace(element, lines.map((line) => h("div", {}, line)));
      element.hidden = false;
      const box = element.getBoundingClientRect();
      const left = Math.min(x + 14, document.documentElement.clientWidth - box.width - 8);
      const top = y + 18 + box.height > document.documentElement.clientHeight ? y - box.height - 10 : y + 18;
      element.style.left = `${Math.max(4, left)}px`;
      element.style.top = `${Math.max(4, top)}px`;
    },
    hide() {
      element.hidden = true;
    },
  };
}
