// Numbers steered by keys, buttons and sliders: what a world or a robot is told each frame.

import { freshId, h } from "../dom.js";

const KEYS = [["KeyW", "KeyS"], ["KeyD", "KeyA"], ["KeyE", "KeyQ"], ["KeyK", "KeyJ"], ["KeyL", "KeyH"]];
const ARROWS = { ArrowUp: "KeyW", ArrowDown: "KeyS", ArrowRight: "KeyD", ArrowLeft: "KeyA" };
const MOST_AXES = 16;

export class Controls {
  /** *count* numbers from −1 to 1, with *labels* as far as there are some. */
  constructor(count, labels = []) {
    this.held = new Set();
    this.axes = Array.from({ length: count }, (_, i) => ({ label: labels[i] ?? `value ${i + 1}`, keys: KEYS[i] ?? [] }));
    const shown = this.axes.slice(0, MOST_AXES);
    this.element = h("div.controls", {}, shown.map((axis) => this.row(axis)),
      h("p.help", {}, "Hold a key or a button: W and S for the first, A and D for the second, Q and E for the third; arrows do too. The sliders stay where they are put.",
        count > MOST_AXES ? ` The other ${count - MOST_AXES} are 0.` : ""));
    this.onKey = (event) => this.key(event);
    this.onBlur = () => this.held.clear();
  }

  row(axis) {
    const id = freshId("axis");
    axis.slider = h("input", { id, type: "range", min: -1, max: 1, step: 0.01, value: "0" });
    axis.reading = h("output", { for: id }, "0");
    const button = (code, sign) => {
      const made = h("button.key", { type: "button", "aria-label": `${axis.label} ${sign}, key ${code.slice(3)}`, "data-key": code }, code.slice(3));
      made.addEventListener("pointerdown", () => this.press(code));
      for (const kind of ["pointerup", "pointerleave", "pointercancel"]) made.addEventListener(kind, () => this.held.delete(code));
      made.addEventListener("keydown", (event) => { if (event.key === " " || event.key === "Enter") this.press(code); });
      made.addEventListener("keyup", () => this.held.delete(code));
      return made;
    };
    const [plus, minus] = axis.keys;
    return h("div.axis", {}, h("label", { for: id }, axis.label), minus ? button(minus, "minus") : null, axis.slider, plus ? button(plus, "plus") : null, axis.reading);
  }

  press(code) { this.held.add(code); }

  key(event) {
    const isText = event.target.closest("textarea, input:not([type=range]), select");
    const code = ARROWS[event.code] ?? event.code;
    if (isText || event.ctrlKey || event.metaKey || event.altKey || !this.axes.some((axis) => axis.keys.includes(code))) return;
    if (event.type === "keyup") this.held.delete(code);
    else this.press(code);
    event.preventDefault();
  }

  listen() {
    for (const kind of ["keydown", "keyup"]) window.addEventListener(kind, this.onKey);
    window.addEventListener("blur", this.onBlur);
  }

  release() {
    for (const kind of ["keydown", "keyup"]) window.removeEventListener(kind, this.onKey);
    window.removeEventListener("blur", this.onBlur);
    this.held.clear();
  }

  /** One number an axis: the slider's, and ±1 while a key is held. */
  values() {
    return this.axes.map((axis) => {
      const pushed = Number(this.held.has(axis.keys[0])) - Number(this.held.has(axis.keys[1]));
      const value = pushed || Number(axis.slider?.value ?? 0);
      if (axis.reading) axis.reading.textContent = String(value);
      return value;
    });
  }
}
