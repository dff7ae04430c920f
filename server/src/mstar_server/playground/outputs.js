// What native answers carry, by modality and stream, shown while it arrives.

import { decodeBase64 } from "./api.js";
import { Sound } from "./audio.js";
import { h, saveLink } from "./dom.js";

const SHOWN_NUMBERS = 12;

export class Outputs {
  /** *aloud*: play sound while it arrives. *live*: of pictures only the newest is kept. */
  constructor(element, { aloud = true, live = false } = {}) {
    this.element = element;
    this.options = { aloud, live };
    this.streams = new Map();
  }

  clear() {
    this.end(true);
    this.streams.clear();
    this.element.replaceChildren();
  }

  add(delta) {
    const key = `${delta.modality}/${delta.stream}`;
    let shown = this.streams.get(key);
    if (!shown) {
      shown = makeStream(delta, this.options);
      this.streams.set(key, shown);
      const name = delta.stream && delta.stream !== delta.modality ? `${delta.modality}: ${delta.stream}` : delta.modality;
      this.element.append(h("section.stream", { "data-stream": delta.stream, "data-modality": delta.modality }, h("h2", {}, name), shown.element));
    }
    shown.add(delta);
  }

  end(quiet = false) {
    for (const shown of this.streams.values()) shown.end?.(quiet);
  }
}

function makeStream(delta, { aloud, live }) {
  if (delta.modality === "text") return new Texts("p.text");
  if (delta.modality === "reasoning") return new Texts("p.text.reasoning");
  if (delta.modality === "tool_call") return new Calls();
  if (delta.modality === "audio") return new AudioStream(aloud);
  if (delta.modality === "progress") return new Progress();
  if (delta.modality === "segment") return new Segments();
  if (delta.encoding === "png") return new Frames(live);
  return new Arrays();
}

class Texts {
  constructor(kind) { this.element = h(kind); }
  add(delta) { this.element.append(delta.text); }
}

class Calls {
  constructor() {
    this.element = h("ul.calls");
    this.calls = new Map();
  }

  add(delta) {
    let shown = this.calls.get(delta.call);
    if (!shown) {
      shown = h("code");
      this.calls.set(delta.call, shown);
      this.element.append(h("li", {}, h("strong", {}, delta.name), " ", shown));
    }
    shown.append(delta.arguments);
  }
}

class AudioStream {
  constructor(aloud) {
    this.sound = new Sound({ aloud });
    this.element = this.sound.element;
  }

  add(delta) { this.sound.addBase64(delta.data, delta.rate, delta.channels); }
  end(quiet) { this.sound.end(quiet); }
}

/** A bar, and the picture as it is so far. */
export class Progress {
  constructor() {
    this.bar = h("progress", { max: 1, value: 0, "aria-label": "Progress" });
    this.text = h("span.help");
    this.picture = h("img.preview", { alt: "The picture so far", hidden: true });
    this.element = h("div.progress", {}, this.bar, this.text, this.picture);
  }

  add(delta) {
    this.bar.max = delta.total || 1;
    this.bar.value = delta.step;
    this.text.textContent = delta.total ? `${delta.step} of ${delta.total}` : `${delta.step}`;
    if (delta.preview) this.show(`data:image/png;base64,${delta.preview}`);
  }

  show(source) {
    this.picture.src = source;
    this.picture.hidden = false;
  }
}

class Segments {
  constructor() { this.element = h("ol.segments"); }
  add(delta) { this.element.append(segment(delta)); }
}

export function segment({ start, end, text }) {
  return h("li", {}, h("span.time", {}, `${start.toFixed(2)} – ${end.toFixed(2)} s`), " ", text);
}

/** Pictures; or a video, whose newest frame is shown. */
class Frames {
  constructor(live) {
    this.live = live;
    this.element = h("div.pictures");
    this.count = h("span.help");
  }

  add(delta) {
    for (const data of delta.frames ?? [delta.data]) {
      if (this.live || delta.fps) this.frame(data, delta.fps);
      else this.element.append(picture(decodeBase64(data), "image/png"));
    }
  }

  frame(data, fps) {
    this.number = (this.number ?? 0) + 1;
    this.screen ??= h("img.screen", { alt: "The newest frame" });
    if (this.number === 1) this.element.append(this.screen, this.count);
    this.screen.src = `data:image/png;base64,${data}`;
    this.count.textContent = `frame ${this.number}${fps ? `, ${fps} a second` : ""}`;
  }
}

/** A finished picture with a way to keep it. Tiny ones are shown larger, pixel by pixel. */
export function picture(bytes, type, { name = "image", about = "A picture that the model made", actions = [] } = {}) {
  const blob = new Blob([bytes], { type });
  const size = h("span.help");
  const image = h("img.result", { src: URL.createObjectURL(blob), alt: about });
  image.addEventListener("load", () => {
    size.textContent = `${image.naturalWidth} × ${image.naturalHeight}`;
    image.classList.toggle("tiny", image.naturalWidth < 128);
  });
  return h("figure", {}, image, h("figcaption", {}, size, saveLink(blob, `${name}.${type.split("/")[1]}`), actions));
}

/** Numbers: the newest item as a list with bars, and how many there have been. */
class Arrays {
  constructor() {
    this.facts = h("p.help");
    this.bars = h("ol.bars", { "aria-label": "The newest values" });
    this.element = h("div.arrays", {}, this.facts, this.bars);
    this.count = 0;
    this.most = 1e-9;
  }

  add(delta) {
    this.count += 1;
    const seq = delta.seq === undefined ? "" : `, heard up to input ${delta.seq}`;
    this.facts.textContent = `${delta.dtype} ${JSON.stringify(delta.shape)}, item ${this.count}${seq}`;
    const rows = delta.shape.length > 1 ? delta.data.at(-1) : delta.data;
    const numbers = [rows ?? []].flat(Infinity).map(Number);
    this.most = Math.max(this.most, ...numbers.slice(0, SHOWN_NUMBERS).map(Math.abs));
    this.bars.replaceChildren(...numbers.slice(0, SHOWN_NUMBERS).map((value) => (
      h("li", {}, h("meter", { min: 0, max: this.most, value: Math.abs(value), "aria-hidden": "true" }), h("output", {}, String(Math.round(value * 1e4) / 1e4))))));
    if (numbers.length > SHOWN_NUMBERS) this.bars.append(h("li.help", {}, `… ${numbers.length - SHOWN_NUMBERS} more`));
  }
}
