// A live session: input goes in while output comes out. Microphones for models that listen, keys for worlds.

import { ApiError, encodeBase64, openSocket } from "../api.js";
import { Microphone } from "../audio.js";
import { h } from "../dom.js";
import { Outputs } from "../outputs.js";
import { livePython, python } from "../python.js";
import { Workspace } from "../workspace.js";
import { Controls } from "./controls.js";

export const live = {
  id: "live",
  title: "Live",
  shows: (model) => model.routes.includes("/generate") && (model.live ?? []).length > 0,
  create,
};

const PIECE_S = 0.08; // of microphone in one message
const AHEAD = 8; // controls that may be on their way without an answer

function create(model) {
  const space = new Workspace(model, { title: "Live", about: "One session over a websocket: what you send is heard while the answer is made.", action: "Start", knobPrefix: "model_kwargs." });
  const text = h("input", { type: "text", autocomplete: "off" });
  if (model.modalities.input.includes("text")) space.field("text", "Text to begin with", text, "For models that take one.", "settings");
  const inputs = model.live.map((input) => makeInput(input));
  const group = h("div.live-inputs", {}, inputs.map((input) => input.element));
  space.inputs.append(group);
  const outputs = new Outputs(space.output, { live: true });

  space.submit = async () => {
    const opening = { model: model.id, live: model.live.map((input) => input.name) };
    if (text.value) opening.text = text.value;
    const knobs = space.knobs.values();
    if (Object.keys(knobs).length) opening.model_kwargs = knobs;
    outputs.clear();
    const session = new Session(opening, (delta) => outputs.add(delta));
    space.stop = () => session.stop();
    try {
      await session.open();
      for (const input of inputs) await input.start(session);
      space.status.textContent = "Live.";
      return `Ended: ${await session.ended}.`;
    } finally {
      for (const input of inputs) input.stop();
      session.close();
      outputs.end();
      space.code.set({ Python: livePython(opening, inputs.flatMap((input) => input.code())) });
    }
  };
  return space.element;
}

/** One request on a socket of its own. */
class Session {
  constructor(opening, onDelta) {
    this.opening = opening;
    this.onDelta = onDelta;
    this.sent = 0;
    this.heard = -1;
    this.ended = new Promise((resolve, reject) => {
      this.resolve = resolve;
      this.reject = reject;
    });
    this.ended.catch(() => {}); // it may fail before anybody waits for it
  }

  async open() {
    this.socket = await openSocket("/generate/ws");
    this.socket.addEventListener("message", (message) => this.take(JSON.parse(message.data)));
    this.socket.addEventListener("close", () => this.reject(new ApiError({ message: "The socket closed before the answer ended." })));
    this.say(this.opening);
  }

  take(event) {
    if (event.type === "delta") {
      this.heard = event.seq ?? this.heard;
      this.onDelta(event);
    } else if (event.type === "done") {
      this.resolve(event.finish_reason);
    } else if (event.type === "error") {
      this.reject(new ApiError(event.error, event.status));
    }
  }

  say(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify({ id: "live", ...message }));
  }

  /** Items for *stream*; false if too many wait for an answer and *patient* says to leave these out. */
  push(stream, items, patient = false) {
    if (this.stopping || (patient && this.sent - this.heard > AHEAD)) return false;
    this.say({ append: { [stream]: items } });
    this.sent += 1;
    return true;
  }

  /** End the input and let the model finish; the second time, cancel. */
  stop() {
    this.say(this.stopping ? { cancel: true } : { end_input: true });
    this.stopping = true;
  }

  close() { this.socket?.close(); }
}

function makeInput(input) {
  if (input.modality === "audio") return new Listening(input);
  if (input.modality === "text") return new Writing(input);
  if (input.shape.length === 1) return new Steering(input);
  return new Items(input);
}

class Input {
  constructor(input, ...children) {
    this.input = input;
    this.element = h("section.live-input", { "data-input": input.name, "aria-label": input.name }, h("h2", {}, input.name), input.description ? h("p.help", {}, input.description) : null, children);
  }

  async start(session) { this.session = session; }
  stop() { this.session = undefined; }
  code() { return []; }
}

class Listening extends Input {
  constructor(input) {
    const level = h("meter", { min: 0, max: 0.3, value: 0, "aria-label": "Level of the microphone" });
    const mute = h("input", { type: "checkbox" });
    super(input, h("p.level", {}, "Microphone ", level), h("label", {}, mute, " Mute"));
    this.level = level;
    this.mute = mute;
    this.rate = input.rate ?? 24000;
    this.length = Math.round(this.rate * PIECE_S);
  }

  async start(session) {
    this.microphone = await Microphone.open({ rate: this.rate, length: this.length, onPiece: (piece) => this.hear(session, piece) });
  }

  hear(session, piece) {
    const samples = this.mute.checked ? new Float32Array(piece.length) : piece; // silence keeps the model's clock going
    this.level.value = Math.sqrt(samples.reduce((sum, value) => sum + value * value, 0) / samples.length);
    session.push(this.input.name, { dtype: "float32", shape: [samples.length], data: encodeBase64(new Uint8Array(samples.buffer)) });
  }

  stop() { this.microphone?.close(); }

  code() {
    return [`call.push(${JSON.stringify(this.input.name)}, np.zeros(${this.length}, np.float32))  # your samples, ${this.rate} a second`];
  }
}

/** Controls that are sent at a steady rate, as long as the model keeps up. */
class Steering extends Input {
  constructor(input) {
    const controls = new Controls(input.shape[0], input.labels);
    super(input, controls.element);
    this.controls = controls;
    this.sent = [];
  }

  async start(session) {
    this.sent = [];
    this.controls.listen();
    this.timer = setInterval(() => this.tick(session), 1000 / (this.input.rate ?? 10));
  }

  tick(session) {
    const values = this.controls.values();
    if (session.push(this.input.name, [values], true) && this.sent.length < 5) this.sent.push(values);
  }

  stop() {
    clearInterval(this.timer);
    this.controls.release();
  }

  code() { return this.sent.map((values) => `call.push(${JSON.stringify(this.input.name)}, np.array(${python([values])}, np.float32))`); }
}

class Writing extends Input {
  constructor(input) {
    const line = h("input", { type: "text", "aria-label": input.name, autocomplete: "off" });
    const send = h("button", { type: "button", disabled: true }, "Send");
    super(input, h("div.row", {}, line, send));
    Object.assign(this, { line, send, sent: [] });
    send.addEventListener("click", () => this.write());
    line.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // else the form would be sent
      this.write();
    });
  }

  write() {
    if (!this.session || !this.line.value) return;
    this.session.push(this.input.name, this.items());
    this.sent.push(this.line.value);
    this.line.value = "";
  }

  items() { return this.line.value; }

  async start(session) {
    super.start(session);
    this.sent = [];
    this.send.disabled = false;
  }

  stop() {
    super.stop();
    this.send.disabled = true;
  }

  code() { return this.sent.map((text) => `call.push(${JSON.stringify(this.input.name)}, ${JSON.stringify(text)})`); }
}

/** Anything else: items typed as JSON. */
class Items extends Writing {
  constructor(input) {
    super(input);
    this.line.placeholder = `JSON: a list of items of shape ${JSON.stringify(input.shape)}`;
  }

  items() { return JSON.parse(this.line.value); }

  write() {
    try {
      this.line.setCustomValidity("");
      super.write();
    } catch (error) {
      this.line.setCustomValidity(`This is not JSON: ${error.message}`);
      this.line.reportValidity();
    }
  }

  code() { return this.sent.map((text) => `call.push(${JSON.stringify(this.input.name)}, np.array(${text}, np.float32))`); }
}
