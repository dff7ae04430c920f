// The panel that shows what was sent, as a command and as a Python program.

import { curlOf } from "./curl.js";
import { copyButton, h } from "./dom.js";
import { nativePython, openaiPython } from "./python.js";

export class CodePanel {
  constructor() {
    this.pre = h("pre", { tabindex: 0, "aria-label": "The request as code" }, h("code", {}));
    this.kinds = ["curl", "Python"].map((kind) => h("button.tab", { type: "button", "aria-pressed": kind === "curl", onclick: () => this.choose(kind) }, kind));
    this.kind = "curl";
    this.note = h("p.help", {}, "Send something: here is the same request as code.");
    this.body = h("div", { hidden: true }, h("div.code-bar", {}, h("div.tabs", { role: "group", "aria-label": "Language" }, this.kinds), copyButton(() => this.pre.textContent)), this.pre);
    this.element = h("details.code", {}, h("summary", {}, "Show code"), this.note, this.body);
  }

  /** *texts*: `{curl, Python}`; one may be missing. */
  set(texts) {
    this.texts = texts;
    for (const button of this.kinds) button.hidden = !texts[button.textContent];
    this.note.hidden = true;
    this.body.hidden = false;
    this.choose(texts[this.kind] ? this.kind : "Python");
  }

  /** Show *request*, as `send` takes it. */
  request(request) {
    this.set({ curl: curlOf(request), Python: request.path === "/generate" ? nativePython(request) : openaiPython(request) });
  }

  choose(kind) {
    this.kind = kind;
    for (const button of this.kinds) button.setAttribute("aria-pressed", String(button.textContent === kind));
    if (this.texts) this.pre.firstChild.textContent = this.texts[kind];
  }
}
