// The turns of a conversation as they are shown.

import { decodeBase64 } from "../api.js";
import { Pcm16Reader, Sound } from "../audio.js";
import { copyButton, h } from "../dom.js";
import { preview } from "../files.js";
import { markdown } from "../markdown.js";
import { picture } from "../outputs.js";
import { seconds } from "../workspace.js";

const NAMES = { user: "You", tool: "Tool" };

/** What a person, or a tool, said. */
export class QuestionView {
  constructor(message, attachments) {
    const text = typeof message.content === "string" ? message.content : message.content.filter((part) => part.type === "text").map((part) => part.text).join("\n");
    this.element = h("article.turn", { "data-role": message.role, "aria-label": NAMES[message.role] },
      h("p.who", {}, NAMES[message.role]), attachments.length ? h("div.media", {}, attachments.map(preview)) : null, h("p.text", {}, text));
  }
}

/** What the model says, chunk by chunk; `message` is what goes back to it in the next request. */
export class AnswerView {
  constructor({ onRetry, onResults }) {
    this.onRetry = onRetry;
    this.onResults = onResults;
    this.text = "";
    this.thoughts = "";
    this.calls = [];
    this.began = performance.now();
    this.thinking = h("details.reasoning", { hidden: true }, h("summary", {}, "Thoughts"), h("p.text"));
    this.body = h("div.markdown");
    this.media = h("div.media");
    this.toolCalls = h("div.tool-calls");
    this.facts = h("span.help");
    this.foot = h("p.foot", {}, this.facts);
    this.element = h("article.turn", { "data-role": "assistant", "aria-label": "Model" }, h("p.who", {}, "Model"), this.thinking, this.body, this.media, this.toolCalls, this.foot);
    this.body.append(h("span.waiting", { "aria-label": "Waiting for the answer" }));
  }

  get message() {
    const message = { role: "assistant", content: this.text };
    if (this.calls.length) message.tool_calls = this.calls;
    return message;
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices ?? [];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const { content, reasoning_content: thought, tool_calls: calls, audio, images } = choice.delta ?? {};
    if (thought) this.think(thought);
    if (content) this.say(content);
    for (const piece of calls ?? []) this.call(piece);
    if (audio) this.hear(audio);
    for (const image of images ?? []) this.draw(image);
  }

  mark() { this.first ??= performance.now(); }

  think(text) {
    this.mark();
    this.thoughts += text;
    this.thinking.hidden = false;
    this.thinking.lastChild.textContent = this.thoughts;
  }

  say(text) {
    this.mark();
    this.text += text;
    // at most once a frame: a long answer would be read anew for each token
    this.drawing ??= requestAnimationFrame(() => this.render());
  }

  render() {
    cancelAnimationFrame(this.drawing);
    this.drawing = undefined;
    // whoever has scrolled up to read is left there
    const follows = this.foot.getBoundingClientRect().top < window.innerHeight;
    this.body.replaceChildren(...markdown(this.text));
    if (follows) this.foot.scrollIntoView({ block: "nearest" });
  }

  call(piece) {
    this.mark();
    const call = (this.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= piece.id ?? "";
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
    this.toolCalls.replaceChildren(...this.calls.filter(Boolean).map((one) => (
      h("div.tool-call", {}, h("p", {}, "calls ", h("strong", {}, one.function.name)), h("pre", {}, h("code", {}, one.function.arguments))))));
  }

  /** Sound as WAV: the first piece has the header, the others samples. */
  hear({ data, transcript }) {
    if (transcript) this.say(transcript);
    if (!data) return;
    this.mark();
    const bytes = decodeBase64(data);
    if (!this.sound) {
      this.sound = new Sound({ name: "answer.wav" });
      this.samples = new Pcm16Reader();
      this.media.append(this.sound.element);
    }
    const head = wavHead(bytes);
    if (head) this.format = head;
    this.sound.add(this.samples.read(bytes.subarray(head ? head.start : 0)), this.format?.rate ?? 24000, this.format?.channels ?? 1);
  }

  draw(image) {
    const [, type, data] = /^data:([^;]+);base64,(.*)$/s.exec(image.image_url?.url ?? "") ?? [];
    if (data) this.media.append(picture(decodeBase64(data), type));
  }

  /** No more comes. Returns what the status line says. */
  end(stopped) {
    this.render();
    this.sound?.end(stopped);
    const took = performance.now() - this.began;
    const said = [stopped ? "stopped" : this.reason === "length" ? "cut: as long as allowed" : this.reason];
    if (this.usage) said.push(`${this.usage.prompt_tokens} + ${this.usage.completion_tokens} tokens`);
    if (this.first) said.push(`first after ${seconds(this.first - this.began)}`);
    if (this.usage && this.usage.completion_tokens > 1 && !stopped) {
      const rate = (this.usage.completion_tokens - 1) / Math.max(1e-3, (this.began + took - this.first) / 1000);
      said.push(`${rate < 10 ? rate.toFixed(1) : Math.round(rate)} a second`);
    }
    this.facts.textContent = said.filter(Boolean).join(" · ");
    this.foot.append(copyButton(() => this.text), h("button.quiet.small", { type: "button", onclick: this.onRetry }, "Try again"));
    if (this.calls.length && !stopped) this.askForResults();
    return said[0] === "stopped" ? "Stopped." : "";
  }

  /** Tools run with whoever asks: here that is a person. */
  askForResults() {
    const boxes = this.calls.map((call, i) => {
      const box = h("textarea", { rows: 2, "aria-label": `What ${call.function.name} returns` });
      this.toolCalls.children[i].append(box);
      return box;
    });
    const give = h("button", { type: "button" }, "Send results");
    give.addEventListener("click", () => {
      give.remove();
      for (const box of boxes) box.disabled = true;
      this.onResults(this.calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: boxes[i].value })));
    });
    this.toolCalls.append(give);
  }
}

/** Rate, channels and start of the samples if *bytes* begin with a WAV file's head. */
function wavHead(bytes) {
  const text = (at) => String.fromCharCode(...bytes.subarray(at, at + 4));
  if (bytes.length < 44 || text(0) !== "RIFF" || text(8) !== "WAVE") return null;
  const view = new DataView(bytes.buffer, bytes.byteOffset);
  let rate = 0;
  let channels = 1;
  for (let at = 12; at + 8 <= bytes.length;) {
    const size = view.getUint32(at + 4, true);
    if (text(at) === "fmt ") {
      channels = view.getUint16(at + 10, true);
      rate = view.getUint32(at + 12, true);
    }
    if (text(at) === "data") return { rate, channels, start: at + 8 };
    at += 8 + size + (size % 2);
  }
  return null;
}
