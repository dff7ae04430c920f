// Sound to text, from a file or the microphone.

import { events, send } from "../api.js";
import { RecordButton } from "../audio.js";
import { copyButton, h, select } from "../dom.js";
import { FilePicker } from "../files.js";
import { segment } from "../outputs.js";
import { Workspace } from "../workspace.js";

const PATHS = { transcribe: "/v1/audio/transcriptions", translate: "/v1/audio/translations" };

export const transcription = {
  id: "transcription",
  title: "Transcription",
  shows: (model) => Object.values(PATHS).some((path) => model.routes.includes(path)),
  create,
};

const FORMATS = [["json", "text, as it comes"], ["verbose_json", "text with times"], ["srt", "subtitles (SRT)"], ["vtt", "subtitles (WebVTT)"]];

function create(model) {
  const space = new Workspace(model, { title: "Transcription", action: "Transcribe", without: ["language", "prompt"] });
  const picker = new FilePicker({ accept: "audio/*,video/*", most: 1, label: "Choose a file" });
  const recorder = new RecordButton((file) => picker.add([file]), (error) => space.fail(error));
  space.files("file", "Recording", picker, "Files can also be pasted or dropped here.", recorder);
  picker.listen(space.form);

  const tasks = Object.entries(PATHS).filter(([, path]) => model.routes.includes(path)).map(([task]) => [task, task === "translate" ? "into English" : "as it is spoken"]);
  const task = select(tasks, tasks[0][0]);
  if (tasks.length > 1) space.field("task", "Written", task, "", "settings");
  const format = select(FORMATS, "json");
  space.field("response_format", "Answer", format, "", "settings");
  const texts = [["language", "Language", "Of the speech, as in en; empty: the model finds out."], ["prompt", "Prompt", "Words to expect, for models that take them."]];
  const inputs = texts.map(([name, label, help]) => [name, h("input", { type: "text", autocomplete: "off" }), label, help]);
  for (const [name, input, label, help] of inputs) space.field(name, label, input, help, "settings");

  space.submit = async () => {
    const [clip] = picker.attachments;
    if (!clip) throw Object.assign(new Error("Record something, or choose a file."), { param: "file" });
    const streams = format.value.endsWith("json") && task.value === "transcribe";
    const form = [["model", model.id], ["file", clip], ["response_format", format.value], ...Object.entries(space.knobs.values())];
    if (streams) form.push(["stream", true]);
    for (const [name, input] of inputs) {
      const applies = name !== "language" || task.value === "transcribe";
      if (input.value && applies) form.push([name, input.value]);
    }
    const request = { path: PATHS[task.value], form, streams };
    space.code.request(request);
    const text = h("p.text");
    const parts = h("ol.segments");
    space.output.replaceChildren(h("section.stream", {}, text, parts, copyButton(() => text.textContent)));
    const response = await send(request, space.signal);
    if (streams) await follow(response, text, parts);
    else if (format.value === "verbose_json") showWhole(await response.json(), text, parts);
    else text.textContent = format.value === "json" ? (await response.json()).text : await response.text();
    if (text.textContent === "") return "No speech was found.";
    return undefined;
  };
  return space.element;
}

async function follow(response, text, parts) {
  for await (const event of events(response)) {
    if (event.type === "transcript.text.delta") text.append(event.delta);
    else if (event.type === "transcript.text.segment") parts.append(segment(event));
    else if (event.type === "transcript.text.done") text.textContent = event.text;
  }
}

function showWhole(answer, text, parts) {
  text.textContent = answer.text;
  parts.append(...(answer.segments ?? []).map(segment));
}
