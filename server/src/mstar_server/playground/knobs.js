// A form made from the JSON schema of a model's knobs. What is left alone is not sent.

import { Field, h, select } from "./dom.js";

/** The type that a person fills in, seen through `anyOf` with null. */
function resolved(schema) {
  const choices = (schema.anyOf ?? []).filter((choice) => choice.type !== "null");
  return choices.length === 1 ? { ...schema, ...choices[0] } : schema;
}

function bounds(schema) {
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  const isWide = (value) => value !== undefined && Math.abs(value) >= 2 ** 53;
  const left = low === undefined || isWide(low) ? "" : schema.minimum === undefined ? `above ${low}` : `from ${low}`;
  const right = high === undefined || isWide(high) ? "" : schema.maximum === undefined ? `below ${high}` : `to ${high}`;
  return [left, right].filter(Boolean).join(" ");
}

const shown = (value) => (value === null || value === undefined ? "not set" : typeof value === "string" ? value : JSON.stringify(value));

/** One knob: its control, and `read()`, which gives undefined for "unchanged" and throws what is no value at all. */
class Knob {
  constructor(name, given) {
    const schema = resolved(given);
    const preset = given.default;
    const values = schema.enum ?? (schema.const === undefined ? null : [schema.const]);
    let control;
    if (values) {
      control = select([["", `default: ${shown(preset)}`], ...values.map((value) => [JSON.stringify(value), shown(value)])], "");
      this.read = () => (control.value === "" ? undefined : JSON.parse(control.value));
    } else if (schema.type === "boolean") {
      control = select([["", `default: ${preset === true ? "on" : preset === false ? "off" : "not set"}`], ["true", "on"], ["false", "off"]], "");
      this.read = () => (control.value === "" ? undefined : control.value === "true");
    } else if (schema.type === "number" || schema.type === "integer") {
      control = h("input", {
        type: "text", inputmode: schema.type === "integer" && !(schema.minimum < 0) ? "numeric" : "decimal",
        placeholder: shown(preset), autocomplete: "off",
      });
      this.read = () => readNumber(name, control.value.trim());
    } else if (schema.type === "string") {
      control = h("input", { type: "text", placeholder: preset === "" ? "empty" : shown(preset), autocomplete: "off" });
      this.read = () => (control.value === "" ? undefined : control.value);
    } else {
      control = h("input", { type: "text", placeholder: `JSON; default: ${shown(preset)}`, autocomplete: "off", spellcheck: "false" });
      this.read = () => readJson(name, control.value.trim());
    }
    this.field = new Field(name, name, control, schema.description ?? "");
    const range = bounds(schema);
    if (range) this.field.label.append(h("span.range", {}, range));
    this.preset = preset;
  }

  get value() {
    const value = this.read();
    return value === this.preset ? undefined : value;
  }
}

class BadValue extends Error {
  constructor(param, message) {
    super(message);
    this.param = param;
  }
}

function readNumber(name, text) {
  if (text === "") return undefined;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new BadValue(name, `${text} is not a number.`);
  if (Number.isInteger(value) && !Number.isSafeInteger(value)) {
    throw new BadValue(name, "A browser cannot send an integer beyond 2⁵³ exactly; the API takes it.");
  }
  return value;
}

function readJson(name, text) {
  if (text === "") return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new BadValue(name, `This is not JSON: ${error.message}`);
  }
}

/** All knobs of a model but those in *without*, which a view has controls of its own for. */
export class KnobForm {
  constructor(schemas, without = []) {
    this.knobs = Object.entries(schemas).filter(([name]) => !without.includes(name)).map(([name, schema]) => [name, new Knob(name, schema)]);
    this.fields = this.knobs.map(([, knob]) => knob.field);
    const reset = h("button.quiet.small", { type: "button", onclick: () => this.reset() }, "Reset");
    const changed = h("span.count");
    this.element = h("details.knobs", { open: window.matchMedia("(min-width: 60rem)").matches },
      h("summary", {}, "Parameters ", changed),
      this.knobs.length ? this.fields.map((field) => field.element) : h("p.help", {}, "This model has none."),
      this.knobs.length ? h("p.buttons", {}, reset) : null);
    this.element.addEventListener("input", () => {
      const count = this.knobs.filter(([, knob]) => knob.field.control.value !== "").length;
      changed.textContent = count ? `${count} changed` : "";
    });
  }

  has(name) { return this.knobs.some(([known]) => known === name); }

  /** What differs from the defaults, by name. Throws for what is no value of its type. */
  values() {
    const found = {};
    for (const [name, knob] of this.knobs) {
      const value = knob.value;
      if (value !== undefined) found[name] = value;
    }
    return found;
  }

  reset() {
    for (const field of this.fields) {
      field.control.value = "";
      field.fail(null);
    }
    this.element.dispatchEvent(new Event("input"));
  }
}
