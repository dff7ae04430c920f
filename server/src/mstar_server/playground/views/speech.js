// Texts spoken: heard while they are made; voices chosen, or added from a clip.

import { send } from "../api.js";
import { Pcm16Reader, RecordButton, Sound } from "../audio.js";
import { freshId, h } from "../dom.js";
import { FilePicker } from "../files.js";
import { Workspace } from "../workspace.js";

export const speech = {
  id: "speech",
  title: "Speech",
  shows: (model) => model.routes.includes("/v1/audio/speech"),
  create,
};

const OWN = ["speed", "ref_text", "ref_audio"];
const DEFAULT_RATE = 24000; // of bare PCM, where nothing else is said: OpenAI's

function create(model) {
  const space = new Workspace(model, { title: "Speech", action: "Speak", without: OWN });
  const text = h("textarea", { rows: 4 });
  text.value = "Hello! This is how I sound.";
  space.field("input", "Text", text);
  const known = h("datalist", { id: freshId("voices") });
  const voice = h("input", { type: "text", list: known.id, placeholder: "the model's default", autocomplete: "off" });
  const field = space.field("voice", "Voice", voice, "One of the list, or what the model understands beside it.", "settings");
  field.element.append(known);
  const instructions = h("input", { type: "text", autocomplete: "off" });
  space.field("instructions", "How to speak", instructions, "For models that take such words.", "settings");
  if ("speed" in model.knobs) {
    const speed = h("input", { type: "text", inputmode: "decimal", placeholder: "1", autocomplete: "off" });
    space.field("speed", "Speed", speed, "From 0.25 to 4.", "settings");
    space.speed = speed;
  }
  listVoices(model, known).catch((error) => space.fail(error));
  const clones = model.modalities.input.includes("audio");
  if (clones) space.settings.append(addVoice(space, model, voice, known));

  space.submit = async () => {
    const json = { model: model.id, input: text.value, voice: voice.value || "default", response_format: "pcm", ...space.knobs.values() };
    if (instructions.value) json.instructions = instructions.value;
    if (space.speed?.value) json.speed = Number(space.speed.value);
    const request = { path: "/v1/audio/speech", json, savesTo: "speech.pcm" };
    space.code.request(request);
    const sound = new Sound({ name: "speech.wav" });
    space.output.replaceChildren(sound.element);
    try {
      await hear(await send(request, space.signal), sound);
    } finally {
      sound.end(space.signal.aborted);
    }
    return `${sound.duration.toFixed(2)} s of sound`;
  };
  return space.element;
}

/** Play the bare PCM of *response*, whose headers say what it is. */
async function hear(response, sound) {
  const rate = Number(response.headers.get("X-Sample-Rate")) || DEFAULT_RATE;
  const channels = Number(response.headers.get("X-Audio-Channels")) || 1;
  const samples = new Pcm16Reader();
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    sound.add(samples.read(value), rate, channels);
  }
}

async function listVoices(model, known) {
  const { data } = await (await send({ path: `/v1/audio/voices?model=${encodeURIComponent(model.id)}` })).json();
  known.replaceChildren(...data.map((voice) => {
    const about = [voice.name === voice.id ? "" : voice.name, voice.language, voice.uploaded ? "uploaded" : ""];
    return h("option", { value: voice.id }, about.filter(Boolean).join(", "));
  }));
}

/** A clip becomes a voice of this server. */
function addVoice(space, model, chooser, known) {
  const name = h("input", { type: "text", autocomplete: "off" });
  const transcript = h("input", { type: "text", autocomplete: "off" });
  const picker = new FilePicker({ accept: "audio/*", most: 1, label: "Choose a clip" });
  const recorder = new RecordButton((file) => picker.add([file]), (error) => space.fail(error));
  const said = h("p.status", { role: "status" });
  const add = h("button", { type: "button" }, "Add the voice");
  add.addEventListener("click", async () => {
    space.clearErrors();
    add.disabled = true;
    try {
      const form = [["name", name.value], ...picker.attachments.map((clip) => ["audio_sample", clip])];
      if (transcript.value) form.push(["ref_text", transcript.value]);
      const voice = await (await send({ path: "/v1/audio/voices", form })).json();
      await listVoices(model, known);
      chooser.value = voice.id;
      said.textContent = `${voice.name} can be chosen now.`;
    } catch (error) {
      space.fail(error);
    } finally {
      add.disabled = false;
    }
  });
  const group = h("details", {}, h("summary", {}, "Add a voice"));
  const inputs = space.inputs;
  space.inputs = group; // the fields' errors are the workspace's
  space.field("name", "Name", name);
  space.files("audio_sample", "Clip of the voice", picker, "", recorder);
  space.field("ref_text", "What it says", transcript, "If you know it: many models copy a voice better then.");
  space.inputs = inputs;
  group.append(h("p.buttons.below", {}, add), said);
  return group;
}
