// Elements, made in one call. Text only ever enters as text: nothing that a model says is parsed as HTML.

/**
 * An element: `h("button.primary", {type: "button", onclick}, "Send")`. Properties that begin with `on` are listeners;
 * null and false leave an attribute out, true sets an empty one.
 */
export function h(kind, properties = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

let lastId = 0;

/** An id that nothing else on the page has. */
export function freshId(prefix = "id") {
  lastId += 1;
  return `${prefix}-${lastId}`;
}

/** *text* as parts of an element; what stands in backquotes is code. */
function withCode(text) {
  return text.split("`").map((part, number) => (number % 2 ? h("code", {}, part) : part));
}

/** A labelled control with help and a place for its error. */
export class Field {
  /** *body*: what stands in the control's place, with the control inside. */
  constructor(name, label, control, help = "", body = control) {
    this.name = name;
    this.control = control;
    control.id ||= freshId("field");
    this.error = h("p.error", { id: `${control.id}-error`, hidden: true });
    const described = [this.error.id];
    const helps = [];
    if (help) {
      helps.push(h("p.help", { id: `${control.id}-help` }, withCode(help)));
      described.push(`${control.id}-help`);
    }
    control.setAttribute("aria-describedby", described.join(" "));
    this.label = h("label.label", { for: control.id }, label);
    this.element = h("div.field", { "data-field": name }, this.label, body, this.error, ...helps);
  }

  /** Say what is wrong with the value, here; nothing takes it back. */
  fail(message) {
    this.error.textContent = message ?? "";
    this.error.hidden = !message;
    if (message) this.control.setAttribute("aria-invalid", "true");
    else this.control.removeAttribute("aria-invalid");
  }

  show() {
    for (let around = this.element.parentElement; around; around = around.parentElement) {
      if (around.tagName === "DETAILS") around.open = true;
    }
    this.control.focus();
  }
}

export function select(options, value, properties = {}) {
  const element = h("select", properties, options.map(([key, label]) => h("option", { value: key }, label)));
  element.value = value;
  return element;
}

/** A text area that grows with its text. */
export function growing(properties) {
  const element = h("textarea", { rows: 1, ...properties });
  const fit = () => {
    element.style.setProperty("height", "auto");
    element.style.setProperty("height", `${Math.min(element.scrollHeight + 2, window.innerHeight * 0.4)}px`);
  };
  element.addEventListener("input", fit);
  element.fit = fit;
  return element;
}

/** A button that copies what *text* returns. */
export function copyButton(text, label = "Copy") {
  const button = h("button.quiet.small", { type: "button" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed here"; // without HTTPS browsers give pages no clipboard
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

/** A link that saves *blob* as *name*. */
export function saveLink(blob, name, label = "Save") {
  return h("a.button.quiet.small", { href: URL.createObjectURL(blob), download: name }, label);
}

export function announce(text) {
  document.getElementById("model-state").textContent = text;
}
