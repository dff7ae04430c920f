// Files into a request: by button, by pasting, by dropping, from the microphone.

import { Attachment } from "./api.js";
import { h } from "./dom.js";

/** What a model's input modalities let a person choose; *all* for models that take any file. */
export function acceptOf(modalities) {
  return ["image", "audio", "video"].filter((kind) => modalities.includes(kind)).map((kind) => `${kind}/*`).join(",");
}

export class FilePicker {
  /**
   * @param accept as in an input's attribute; empty takes all. @param most how many may be chosen.
   * @param label word on the button. @param onChange called when the list has changed.
   */
  constructor({ accept = "", most = Infinity, label = "Attach", onChange = () => {} }) {
    this.accept = accept;
    this.most = most;
    this.onChange = onChange;
    this.attachments = [];
    this.input = h("input", { type: "file", accept: accept || null, multiple: most > 1, hidden: true,
      onchange: () => { this.add([...this.input.files]); this.input.value = ""; } });
    this.button = h("button.quiet", { type: "button", onclick: () => this.input.click() }, label);
    this.list = h("ul.chips", { "aria-label": "Attached files" });
    this.problem = h("p.error", { role: "alert", hidden: true });
    this.element = h("div.picker", {}, this.button, this.input, this.list, this.problem);
  }

  takes(file) {
    return !this.accept || this.accept.split(",").some((pattern) => (
      pattern.startsWith(".") ? file.name.toLowerCase().endsWith(pattern) : pattern.endsWith("/*") ? file.type.startsWith(pattern.slice(0, -1)) : file.type === pattern));
  }

  async add(files) {
    this.problem.hidden = true;
    for (const file of files) {
      if (!this.takes(file)) {
        this.problem.textContent = `${file.name || "This"} (${file.type || "unknown kind"}) is not what this takes: ${this.accept.replaceAll(",", ", ")}.`;
        this.problem.hidden = false;
        continue;
      }
      const attachment = await Attachment.of(file);
      if (this.attachments.length >= this.most) this.attachments.shift();
      this.attachments.push(attachment);
    }
    this.render();
  }

  remove(attachment) {
    this.attachments = this.attachments.filter((one) => one !== attachment);
    this.render();
    this.button.focus();
  }

  /** The files, which leave the list. */
  take() {
    const taken = this.attachments;
    this.attachments = [];
    this.render();
    return taken;
  }

  render() {
    this.list.replaceChildren(...this.attachments.map((attachment) => h("li.chip", {},
      preview(attachment), h("span.chip-name", {}, attachment.name),
      h("button.quiet.icon", { type: "button", "aria-label": `Remove ${attachment.name}`, onclick: () => this.remove(attachment) }, "×"))));
    this.onChange();
  }

  /** Take what is pasted into or dropped onto *element*. */
  listen(element) {
    element.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
    element.addEventListener("dragover", (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault();
      element.classList.add("dropping");
    });
    element.addEventListener("dragleave", () => element.classList.remove("dropping"));
    element.addEventListener("drop", (event) => {
      element.classList.remove("dropping");
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }
}

export function preview(attachment) {
  if (attachment.kind === "image") return h("img.thumb", { src: attachment.url, alt: attachment.name });
  if (attachment.kind === "audio") return h("audio", { controls: true, src: attachment.url, "aria-label": attachment.name });
  if (attachment.kind === "video") return h("video.thumb", { controls: true, src: attachment.url, "aria-label": attachment.name });
  return null;
}
