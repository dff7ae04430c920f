// What every view is made of: a main column, settings beside it, one request at a time, its errors and its code.

import { ApiError } from "./api.js";
import { CodePanel } from "./code.js";
import { Field, h } from "./dom.js";
import { KnobForm } from "./knobs.js";

export class Workspace {
  /**
   * @param title heading of the view. @param action word on the button that sends. @param without knobs that the view
   * has controls of its own for. @param knobPrefix what errors put before a knob's name.
   */
  constructor(model, { title, about = "", action, without = [], knobPrefix = "" }) {
    this.model = model;
    this.knobPrefix = knobPrefix;
    this.knobs = new KnobForm(model.knobs, without);
    this.fields = new Map(this.knobs.fields.map((field) => [field.name, field]));
    this.action = action;
    this.button = h("button.primary.send", { type: "submit" }, action);
    this.alert = h("p.notice.error", { role: "alert", hidden: true });
    this.status = h("p.status", { role: "status" });
    this.output = h("div.output");
    this.inputs = h("div.inputs");
    this.settings = h("div.settings");
    this.code = new CodePanel();
    this.form = h("form.composer", { novalidate: true }, this.inputs, h("div.send-row", {}, this.status, this.button));
    this.main = h("div.column", {}, this.form, this.alert, this.output);
    this.element = h("section.workspace", { "aria-label": title },
      h("div.column-wrap", {}, h("h1", {}, title), about ? h("p.about", {}, about) : null, this.main, this.code.element),
      h("aside.side", { "aria-label": "Settings" }, this.settings, this.knobs.element));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.run(() => this.submit());
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.running) this.form.requestSubmit();
    });
  }

  get running() { return this.controller !== undefined; }
  get signal() { return this.controller.signal; }

  /** Put a labelled control into the main column or (*where*: `settings`) beside it. */
  field(name, label, control, help = "", where = "inputs", body = control) {
    const field = new Field(name, label, control, help, body);
    this.fields.set(name, field);
    this[where].append(field.element);
    return field;
  }

  /** A field for files; *recorder* adds to them what the microphone hears. */
  files(name, label, picker, help = "", recorder = null) {
    if (recorder) picker.button.before(recorder.button);
    return this.field(name, label, picker.button, help, "inputs", picker.element);
  }

  stop() { this.controller?.abort(); }

  /** Do *work*, which may be stopped; what it throws is shown where it belongs. */
  async run(work) {
    if (this.running) return;
    this.controller = new AbortController();
    this.clearErrors();
    this.button.textContent = "Stop";
    this.button.classList.add("stop");
    this.element.setAttribute("aria-busy", "true");
    this.status.textContent = "";
    const began = performance.now();
    try {
      const said = await work();
      this.status.textContent = said ?? `Done in ${seconds(performance.now() - began)}.`;
    } catch (error) {
      if (error.name === "AbortError" || this.signal.aborted) this.status.textContent = "Stopped.";
      else this.fail(error);
    } finally {
      this.controller = undefined;
      this.button.textContent = this.action;
      this.button.classList.remove("stop");
      this.element.removeAttribute("aria-busy");
    }
  }

  clearErrors() {
    this.alert.hidden = true;
    for (const field of this.fields.values()) field.fail(null);
  }

  /** Show *error* at the field that it names, else above the answer. */
  fail(error) {
    if (!(error instanceof ApiError) && error.param === undefined) console.error(error);
    if (error.status === 401) document.dispatchEvent(new CustomEvent("key-needed", { detail: error.message }));
    const field = this.fieldOf(error.param);
    this.status.textContent = "";
    const wait = error.retryAfter ? ` (try again in ${error.retryAfter} s)` : "";
    if (field) {
      field.fail(error.message + wait);
      field.show();
      this.status.textContent = "Not sent: see the marked field.";
    } else {
      this.alert.textContent = error.message + wait;
      this.alert.hidden = false;
    }
  }

  fieldOf(param) {
    if (!param) return null;
    const name = param.startsWith(this.knobPrefix) ? param.slice(this.knobPrefix.length) : param;
    return this.fields.get(param) ?? this.fields.get(name) ?? this.fields.get(name.split(/[.[]/)[0]) ?? null;
  }
}

export function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
