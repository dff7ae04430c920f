// A conversation: streamed, with thoughts folded away, calls of tools answered by hand, media in and out.

import { events, send } from "../api.js";
import { RecordButton } from "../audio.js";
import { growing, h } from "../dom.js";
import { FilePicker, acceptOf } from "../files.js";
import { Workspace } from "../workspace.js";
import { AnswerView, QuestionView } from "./chat-messages.js";

const PATH = "/v1/chat/completions";

export const chat = {
  id: "chat",
  title: "Chat",
  shows: (model) => model.routes.includes(PATH),
  create,
};

function create(model) {
  const space = new Workspace(model, { title: "Chat", action: "Send" });
  space.main.classList.add("chat");
  const log = space.output;
  log.setAttribute("role", "log");
  log.setAttribute("aria-label", "Conversation");
  space.main.prepend(log, space.alert); // the composer stands below what was said

  const text = growing({ placeholder: "Ask something", "aria-label": "Message" });
  const field = space.field("messages", "Message", text);
  field.label.classList.add("hidden");
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    if (!space.running) space.form.requestSubmit();
  });
  const accept = acceptOf(model.modalities.input);
  const picker = new FilePicker({ accept });
  if (accept) {
    space.inputs.append(picker.element);
    picker.listen(space.form);
    if (model.modalities.input.includes("audio")) {
      const recorder = new RecordButton((file) => picker.add([file]), (error) => space.fail(error));
      picker.button.after(recorder.button);
    }
  }
  const clear = h("button.quiet", { type: "button" }, "New chat");
  space.status.after(clear);

  const system = h("textarea", { rows: 3 });
  space.field("system", "System prompt", system, "", "settings");
  const tools = h("textarea", { rows: 3, spellcheck: "false", placeholder: '[{"type": "function", "function": {"name": …}}]' });
  space.settings.append(h("details", {}, h("summary", {}, "Tools"), space.field("tools", "Tools as JSON", tools, "Calls are shown; you write what they return.", "settings").element));
  const aloud = h("input", { type: "checkbox" });
  const voice = h("input", { type: "text", placeholder: "the model's default", autocomplete: "off" });
  if (model.modalities.output.includes("audio")) {
    space.settings.append(h("label.choice", {}, aloud, " Answer with sound too"));
    space.field("audio.voice", "Voice", voice, "", "settings");
  }

  let history = []; // [{message, view}]
  const keep = (message, view) => {
    history.push({ message, view });
    log.append(view.element);
    view.element.scrollIntoView({ block: "end" });
  };

  clear.addEventListener("click", () => {
    space.stop();
    history = [];
    log.replaceChildren();
    text.focus();
  });

  async function answer() {
    const messages = history.map((turn) => turn.message);
    if (system.value) messages.unshift({ role: "system", content: system.value });
    const json = { model: model.id, messages, stream: true, stream_options: { include_usage: true }, ...space.knobs.values() };
    if (tools.value.trim()) json.tools = parseTools(tools.value);
    if (aloud.checked) Object.assign(json, { modalities: ["text", "audio"], audio: { voice: voice.value || "default", format: "wav" } });
    const request = { path: PATH, json, streams: true };
    space.code.request(request);
    const response = await send(request, space.signal);
    const view = new AnswerView({ onRetry: () => retry(view), onResults: (results) => giveResults(results) });
    const turn = { message: view.message, view };
    history.push(turn);
    log.append(view.element);
    view.foot.scrollIntoView({ block: "nearest" });
    let said;
    try {
      for await (const chunk of events(response)) view.take(chunk);
    } finally {
      said = view.end(space.signal.aborted);
      turn.message = view.message;
    }
    return said;
  }

  const retry = (view) => {
    if (space.running) return;
    const at = history.findIndex((turn) => turn.view === view);
    for (const turn of history.splice(at)) turn.view.element.remove();
    space.run(answer);
  };

  const giveResults = (results) => {
    if (space.running) return;
    for (const message of results) keep(message, new QuestionView(message, []));
    space.run(answer);
  };

  space.submit = async () => {
    if (!text.value.trim() && !picker.attachments.length) {
      throw Object.assign(new Error("Write something first."), { param: "messages" });
    }
    const attachments = picker.attachments;
    const message = { role: "user", content: contentOf(text.value, attachments) };
    const question = { message, view: new QuestionView(message, attachments) };
    history.push(question);
    log.append(question.view.element);
    question.view.element.scrollIntoView({ block: "nearest" });
    const typed = text.value;
    text.value = "";
    text.fit();
    picker.take();
    try {
      return await answer();
    } catch (error) {
      if (history.at(-1) === question) { // nothing came: the question goes back to where it can be changed
        history.pop();
        question.view.element.remove();
        text.value = typed;
        text.fit();
        picker.attachments = attachments;
        picker.render();
      }
      throw error;
    }
  };
  return space.element;
}

function parseTools(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw Object.assign(new Error(`This is not JSON: ${error.message}`), { param: "tools" });
  }
}

/** A message's content: a text, or parts in OpenAI's shapes. */
function contentOf(text, attachments) {
  if (!attachments.length) return text;
  const parts = attachments.map((attachment) => {
    if (attachment.kind === "image") return { type: "image_url", image_url: { url: attachment.asDataUrl() } };
    if (attachment.kind === "video") return { type: "video_url", video_url: { url: attachment.asDataUrl() } };
    const format = { "audio/mpeg": "mp3", "audio/wav": "wav", "audio/x-wav": "wav" }[attachment.type] ?? attachment.name.split(".").at(-1);
    return { type: "input_audio", input_audio: { data: attachment.asBase64(), format } };
  });
  return text ? [...parts, { type: "text", text }] : parts;
}
