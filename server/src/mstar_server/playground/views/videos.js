// Videos: jobs of the server that go on without this page.

import { send } from "../api.js";
import { h, saveLink } from "../dom.js";
import { FilePicker } from "../files.js";
import { Workspace } from "../workspace.js";
import { sizeField } from "./images.js";

const PATH = "/v1/videos";
const EVERY_MS = 1000;

export const videos = {
  id: "videos",
  title: "Videos",
  shows: (model) => model.routes.includes(PATH),
  create,
};

function create(model) {
  const space = new Workspace(model, { title: "Videos", action: "Make", without: ["size", "seconds"] });
  const prompt = h("textarea", { rows: 3 });
  space.field("prompt", "What to show", prompt);
  const picker = new FilePicker({ accept: "image/*,video/*", most: 1, label: "Add a first picture" });
  const takesMedia = ["image", "video"].some((kind) => model.modalities.input.includes(kind));
  if (takesMedia) space.files("input_reference", "Begins with", picker);
  const length = h("input", { type: "text", inputmode: "decimal", placeholder: "the model's default", autocomplete: "off" });
  const { max_frames: most, fps } = model.canvas?.lengths ?? {};
  space.field("seconds", "Seconds", length, most ? `Up to ${Math.floor((most / fps) * 100) / 100}, at ${fps} frames a second.` : "", "settings");
  const size = sizeField(space, model, "the model's default");
  const jobs = h("div.jobs");
  space.output.append(jobs);

  const remove = async (job, card) => {
    try {
      await send({ path: `${PATH}/${job.id}`, method: "DELETE" });
      card.remove();
    } catch (error) {
      space.fail(error);
    }
  };

  space.submit = async () => {
    const fields = { model: model.id, prompt: prompt.value, ...space.knobs.values() };
    if (length.value) fields.seconds = length.value;
    if (size.value) fields.size = size.value;
    const form = [...Object.entries(fields), ...picker.attachments.map((one) => ["input_reference", one])];
    const request = picker.attachments.length ? { path: PATH, form } : { path: PATH, json: fields };
    space.code.request(request);
    const job = await (await send(request, space.signal)).json();
    const card = new Job(job, remove);
    jobs.prepend(card.element);
    await card.follow(space.signal);
    return card.job.status;
  };

  const before = async () => {
    const { data } = await (await send({ path: `${PATH}?limit=10` })).json();
    for (const job of data.filter((one) => one.model === model.id)) {
      const card = new Job(job, remove);
      jobs.append(card.element);
      card.follow(new AbortController().signal).catch((error) => card.say(error.message));
    }
  };
  before().catch((error) => space.fail(error));
  return space.element;
}

class Job {
  constructor(job, remove) {
    this.bar = h("progress", { max: 100, "aria-label": "Progress" });
    this.text = h("span.help", { role: "status" });
    this.screen = h("div");
    const drop = h("button.quiet.small", { type: "button", onclick: () => { this.gone = true; remove(this.job, this.element); } }, "Delete");
    this.element = h("article.job", { "data-job": job.id }, h("p.job-title", {}, job.prompt ?? job.id), h("div.progress", {}, this.bar, this.text), this.screen, h("p.buttons", {}, drop));
    this.show(job);
  }

  show(job) {
    this.job = job;
    this.bar.value = job.progress ?? 0;
    this.text.textContent = `${job.status.replace("_", " ")}${job.status === "in_progress" ? `, ${Math.round(job.progress ?? 0)} %` : ""}`;
  }

  say(text) { this.text.textContent = text; }

  /** Ask until the job has ended. Stopping the asking leaves the job alone. */
  async follow(signal) {
    while (["queued", "in_progress"].includes(this.job.status) && !this.gone) {
      await pause(EVERY_MS, signal);
      this.show(await (await send({ path: `${PATH}/${this.job.id}` }, signal)).json());
    }
    this.bar.hidden = true;
    if (this.job.status === "failed") this.say(`failed: ${this.job.error?.message ?? "no reason given"}`);
    if (this.job.status !== "completed") return;
    const blob = await (await send({ path: `${PATH}/${this.job.id}/content` }, signal)).blob();
    this.screen.replaceChildren(h("video.result", { controls: true, src: URL.createObjectURL(blob) }), saveLink(blob, "video.mp4"));
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}
