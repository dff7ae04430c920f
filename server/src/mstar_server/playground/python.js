// A request as a Python program: OpenAI's client for its routes, ours for the native ones.

import { Attachment, Embedded, address, apiKey } from "./api.js";

const INDENT = "    ";

/** OpenAI's client: which method sends a request to a path, and which of its fields that method has by name. */
const METHODS = [
  { path: "/v1/chat/completions", call: "chat.completions.create",
    knows: "model messages stream stream_options modalities audio tools tool_choice temperature top_p max_tokens max_completion_tokens frequency_penalty presence_penalty seed stop n logprobs top_logprobs logit_bias response_format reasoning_effort",
    after: (json) => (json.stream
      ? ["for chunk in answer:", `${INDENT}if chunk.choices and chunk.choices[0].delta.content:`, `${INDENT}${INDENT}print(chunk.choices[0].delta.content, end="", flush=True)`]
      : ["print(answer.choices[0].message.content)"]) },
  { path: "/v1/embeddings", call: "embeddings.create", knows: "model input dimensions encoding_format",
    after: () => ["for item in answer.data:", `${INDENT}print(item.index, item.embedding[:8])`] },
  { path: "/v1/audio/speech", call: "audio.speech.with_streaming_response.create", within: true,
    knows: "model input voice instructions response_format speed stream_format",
    after: (json) => [`${INDENT}answer.stream_to_file("speech.${json.response_format ?? "mp3"}")`] },
  { path: "/v1/audio/transcriptions", call: "audio.transcriptions.create",
    knows: "file model language prompt response_format temperature stream timestamp_granularities include chunking_strategy",
    after: (json) => (json.stream
      ? ["for event in answer:", `${INDENT}if event.type == "transcript.text.delta":`, `${INDENT}${INDENT}print(event.delta, end="", flush=True)`]
      : ["print(answer)"]) },
  { path: "/v1/audio/translations", call: "audio.translations.create", knows: "file model prompt response_format temperature",
    after: () => ["print(answer)"] },
  { path: "/v1/images/generations", call: "images.generate",
    knows: "prompt model n size quality style background output_format output_compression response_format partial_images stream moderation user",
    after: imagesAfter },
  { path: "/v1/images/edits", call: "images.edit",
    knows: "image mask prompt model n size quality background output_format output_compression response_format partial_images stream input_fidelity user",
    after: imagesAfter },
  { path: "/v1/videos", call: "videos.create_and_poll", knows: "prompt model seconds size input_reference",
    after: () => ["if answer.status != \"completed\":", `${INDENT}raise SystemExit(answer.error)`, "client.videos.download_content(answer.id).write_to_file(\"video.mp4\")"] },
];

function imagesAfter(json) {
  if (!json.stream) {
    return ["for number, image in enumerate(answer.data):",
      `${INDENT}open(f"image-{number}.png", "wb").write(base64.b64decode(image.b64_json))`];
  }
  return ["for event in answer:", `${INDENT}print(event.type)`, `${INDENT}if event.type.endswith(".completed"):`,
    `${INDENT}${INDENT}open("image.png", "wb").write(base64.b64decode(event.b64_json))`];
}

/** An expression as it stands. */
export class Raw {
  constructor(text) { this.text = text; }
}

/** *value* as a Python expression. */
export function python(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (value instanceof Raw) return value.text;
  if (value instanceof Attachment) return `open(${python(value.name)}, "rb")`;
  if (value instanceof Embedded) return `${value.prefix ? `${python(value.prefix)} + ` : ""}encoded(${python(value.attachment.name)})`;
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return JSON.stringify(value).replace(/[\u007f-\u009f\u2028\u2029]/g, escaped);
  const deeper = indent + INDENT;
  const items = Array.isArray(value)
    ? value.map((item) => python(item, deeper))
    : Object.entries(value).map(([key, item]) => `${python(key)}: ${python(item, deeper)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const flat = `${open}${items.join(", ")}${close}`;
  if (flat.length + indent.length <= 88 && !flat.includes("\n")) return flat;
  return `${open}\n${items.map((item) => `${deeper}${item},`).join("\n")}\n${indent}${close}`;
}

const escaped = (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;

/** *call* with *fields* as its arguments, one a line. */
function pythonCall(call, fields, indent = "") {
  const lines = Object.entries(fields).map(([name, value]) => `${indent}${INDENT}${name}=${python(value, indent + INDENT)},`);
  return `${call}(\n${lines.join("\n")}\n${indent})`;
}

const serverRoot = () => address("").href.replace(/\/$/, "");
const KEY = 'os.environ["MSTAR_API_KEY"]';

/** A form's fields as an object; a name that comes several times, or ends in [], is a list. */
function formFields(form) {
  const fields = {};
  for (const [name, value] of form) {
    const key = name.replace(/\[\]$/, "");
    if (!(key in fields)) fields[key] = name.endsWith("[]") ? [value] : value;
    else fields[key] = [fields[key], value].flat();
  }
  return fields;
}

function holdsEmbedded(value) {
  if (value instanceof Embedded) return true;
  return Boolean(value) && typeof value === "object" && Object.values(value).some(holdsEmbedded);
}

/** *request*, as `send` takes it, with OpenAI's client; undefined for a path that it does not know. */
export function openaiPython(request) {
  const method = METHODS.find((known) => known.path === request.path);
  if (!method) return undefined;
  const given = request.json ?? formFields(request.form);
  const known = method.knows.split(" ");
  const fields = {};
  const extra = {};
  for (const [name, value] of Object.entries(given)) (known.includes(name) ? fields : extra)[name] = value;
  if (Object.keys(extra).length) fields.extra_body = extra;
  const embeds = holdsEmbedded(given);
  const after = method.after(given);
  const imports = [embeds || after.some((line) => line.includes("base64.")) ? "import base64" : "", apiKey.get() ? "import os" : ""].filter(Boolean);
  const helper = embeds ? ["", "", "def encoded(name):", `${INDENT}return base64.b64encode(open(name, "rb").read()).decode()`, ""] : [];
  const call = pythonCall(`client.${method.call}`, fields);
  return [
    ...imports, ...(imports.length ? [""] : []), "from openai import OpenAI", ...helper, "",
    `client = OpenAI(base_url=${python(`${serverRoot()}/v1`)}, api_key=${apiKey.get() ? KEY : '"none"'})`,
    method.within ? `with ${call} as answer:` : `answer = ${call}`,
    ...after, "",
  ].join("\n");
}

/** The head of a program that uses our client, up to its `with`. */
function nativeHead() {
  return [
    ...(apiKey.get() ? ["import os", ""] : []), "from mstar.client import Client", "",
    `with Client(${python(serverRoot())}${apiKey.get() ? `, api_key=${KEY}` : ""}) as client:`,
  ];
}

/** A form for `/generate` with our client. */
export function nativePython(request) {
  const all = (name) => request.form.filter(([known]) => known === name).map(([, value]) => value);
  const call = { text: all("text")[0] ?? "", model: all("model")[0] };
  if (all("files").length) call.files = all("files").map((file) => file.name);
  if (all("output_modalities").length) call.want = all("output_modalities");
  if (all("session").length) [call.session] = all("session");
  Object.assign(call, JSON.parse(all("model_kwargs")[0] ?? "{}"));
  return [
    ...nativeHead(), `${INDENT}with ${pythonCall("client.stream", call, INDENT)} as stream:`,
    `${INDENT}${INDENT}for delta in stream:`, `${INDENT}${INDENT}${INDENT}print(delta)`, "",
  ].join("\n");
}

/** A live request: its opening message and *pushes*, lines that push to `call`. */
export function livePython(opening, pushes) {
  const call = { live: opening.live, model: opening.model };
  if (opening.text) call.text = opening.text;
  if (opening.output_modalities?.length) call.want = opening.output_modalities;
  Object.assign(call, opening.model_kwargs ?? {});
  const head = nativeHead();
  return [
    "import numpy as np", ...head, `${INDENT}with ${pythonCall("client.open", call, INDENT)} as call:`,
    ...pushes.map((line) => `${INDENT}${INDENT}${line}`), `${INDENT}${INDENT}call.end()`,
    `${INDENT}${INDENT}for delta, seq in call:`, `${INDENT}${INDENT}${INDENT}print(seq, delta)`, "",
  ].join("\n");
}
