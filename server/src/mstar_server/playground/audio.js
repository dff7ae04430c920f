// Sound: played while it arrives, kept as a WAV file, and recorded from the microphone.

import { decodeBase64 } from "./api.js";
import { h, saveLink } from "./dom.js";

/** Signed 16-bit samples, interleaved, as a WAV file. */
export function wavBlob(pieces, rate, channels) {
  const size = pieces.reduce((sum, piece) => sum + piece.length * 2, 0);
  const head = new DataView(new ArrayBuffer(44));
  const put = (at, text) => [...text].forEach((character, i) => head.setUint8(at + i, character.charCodeAt(0)));
  put(0, "RIFF"); head.setUint32(4, 36 + size, true); put(8, "WAVEfmt ");
  head.setUint32(16, 16, true); head.setUint16(20, 1, true); head.setUint16(22, channels, true);
  head.setUint32(24, rate, true); head.setUint32(28, rate * channels * 2, true);
  head.setUint16(32, channels * 2, true); head.setUint16(34, 16, true);
  put(36, "data"); head.setUint32(40, size, true);
  return new Blob([head, ...pieces], { type: "audio/wav" });
}

export function toInt16(samples) {
  return Int16Array.from(samples, (value) => Math.round(Math.max(-1, Math.min(1, value)) * 32767));
}

/** Whole samples from bytes that may be cut anywhere; the odd byte waits for the next ones. */
export class Pcm16Reader {
  constructor() { this.rest = new Uint8Array(0); }

  read(bytes) {
    const all = new Uint8Array(this.rest.length + bytes.length);
    all.set(this.rest);
    all.set(bytes, this.rest.length);
    const whole = all.length - (all.length % 2);
    this.rest = all.slice(whole);
    return new Int16Array(all.buffer.slice(0, whole));
  }
}

let shared; // browsers allow a page only a few contexts

/** Plays pieces one after the other, without gaps as long as they come in time. */
class Speaker {
  constructor() {
    this.context = shared ??= new AudioContext();
    this.context.resume(); // one that was made before anybody touched the page is asleep
    this.next = 0;
    this.sources = new Set();
  }

  play(samples, rate, channels) {
    const frames = Math.floor(samples.length / channels);
    if (!frames) return;
    const buffer = this.context.createBuffer(channels, frames, rate);
    for (let channel = 0; channel < channels; channel += 1) {
      const plane = buffer.getChannelData(channel);
      for (let i = 0; i < frames; i += 1) plane[i] = samples[i * channels + channel] / 32768;
    }
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    this.next = Math.max(this.next, this.context.currentTime + 0.06); // a little ahead, for pieces that come late
    source.start(this.next);
    this.next += buffer.duration;
    this.sources.add(source);
    source.onended = () => this.sources.delete(source);
  }

  stop() {
    for (const source of this.sources) source.stop();
  }
}

/** A sound that is being made: heard at once, then a player for the whole of it. */
export class Sound {
  constructor({ aloud = true, name = "audio.wav" } = {}) {
    this.name = name;
    this.pieces = [];
    this.rate = 0;
    this.channels = 1;
    this.meter = h("span.help", {}, "waiting for sound");
    this.element = h("div.sound", {}, this.meter);
    // rates below 3 kHz have no context: such a sound is only kept
    this.speaker = aloud ? new Speaker() : null;
  }

  get duration() { return this.rate ? this.pieces.reduce((sum, piece) => sum + piece.length, 0) / this.channels / this.rate : 0; }

  add(samples, rate, channels = 1) {
    this.rate = rate;
    this.channels = channels;
    this.pieces.push(samples);
    if (rate >= 3000) this.speaker?.play(samples, rate, channels);
    this.meter.textContent = `${this.duration.toFixed(2)} s so far`;
  }

  addBase64(text, rate, channels) { this.add(new Int16Array(decodeBase64(text).buffer), rate, channels); }

  /** No more comes; *quiet* also ends what is still being played. */
  end(quiet = false) {
    if (quiet) this.speaker?.stop();
    if (!this.pieces.length) {
      this.element.replaceChildren();
      return;
    }
    this.element.replaceChildren(player(wavBlob(this.pieces, this.rate, this.channels), this.name,
      `${this.duration.toFixed(2)} s, ${this.rate / 1000} kHz`));
  }
}

/** Controls for a finished sound. */
export function player(blob, name, about = "") {
  const url = URL.createObjectURL(blob);
  return h("div.sound", {}, h("audio", { controls: true, src: url, preload: "metadata" }), h("span.help", {}, about), saveLink(blob, name));
}

/** The microphone as pieces of float32 samples of one channel. */
export class Microphone {
  /** *rate*: samples a second, or undefined for the device's own. *onPiece* gets about *length* samples each time. */
  static async open({ rate, length = 2048, onPiece }) {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new Error("Browsers give pages the microphone only over HTTPS or on localhost.");
    }
    const stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: true } })
      .catch((error) => { throw new Error(`The microphone cannot be used: ${error.message}`); });
    const microphone = new Microphone();
    microphone.stream = stream;
    try {
      microphone.context = new AudioContext(rate ? { sampleRate: rate } : {});
      await microphone.context.audioWorklet.addModule(new URL("./recorder-worklet.js", import.meta.url));
      const source = microphone.context.createMediaStreamSource(stream); // some browsers do not change the rate
      const node = new AudioWorkletNode(microphone.context, "recorder", { processorOptions: { length }, numberOfOutputs: 0 });
      node.port.onmessage = (event) => onPiece(event.data);
      source.connect(node);
      microphone.node = node;
    } catch (error) {
      microphone.close();
      throw new Error(`This browser cannot record${rate ? ` at ${rate} Hz` : ""}: ${error.message}`);
    }
    return microphone;
  }

  get rate() { return this.context.sampleRate; }

  close() {
    if (this.node) this.node.port.onmessage = null;
    for (const track of this.stream.getTracks()) track.stop();
    if (this.context?.state !== "closed") this.context?.close();
  }
}

/** A button that records a clip; *onClip* gets it as a WAV file. */
export class RecordButton {
  constructor(onClip, onError) {
    this.onClip = onClip;
    this.onError = onError;
    this.button = h("button.quiet.record", { type: "button", "aria-pressed": "false", onclick: () => this.toggle() }, "Record");
  }

  async toggle() {
    if (this.microphone) return this.finish();
    this.button.disabled = true;
    try {
      const pieces = [];
      this.pieces = pieces;
      this.microphone = await Microphone.open({
        onPiece: (piece) => {
          pieces.push(toInt16(piece));
          const length = pieces.reduce((sum, one) => sum + one.length, 0) / this.microphone.rate;
          this.button.textContent = `Stop (${length.toFixed(1)} s)`;
        },
      });
      this.button.setAttribute("aria-pressed", "true");
      this.button.textContent = "Stop";
    } catch (error) {
      this.onError(error);
    } finally {
      this.button.disabled = false;
    }
  }

  finish() {
    const { microphone, pieces } = this;
    const rate = Math.round(microphone.rate);
    microphone.close();
    this.microphone = undefined;
    this.button.setAttribute("aria-pressed", "false");
    this.button.textContent = "Record";
    if (!pieces.length) return;
    const blob = wavBlob(pieces, rate, 1);
    this.onClip(new File([blob], "recording.wav", { type: "audio/wav" }));
  }
}
