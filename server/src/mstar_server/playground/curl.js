// A request as a curl command. The key is named, never shown; files are named, not pasted.

import { Attachment, Embedded, address, apiKey } from "./api.js";

const MARK = "\uE000"; // of private use: no text that JSON.stringify escapes

const quoted = (text) => `'${String(text).replaceAll("'", "'\\''")}'`;

/** *request*, as `send` takes it; with `streams` curl shows the answer as it comes, `savesTo` is a file for it. */
export function curlOf(request) {
  const lines = [`curl ${request.streams ? "-N " : ""}${request.savesTo ? `-o ${request.savesTo} ` : ""}${quoted(address(request.path).href)}`];
  if (apiKey.get()) lines.push('-H "Authorization: Bearer $MSTAR_API_KEY"');
  for (const [name, value] of request.form ?? []) {
    // -F reads @file; --form-string takes a text as it is
    if (value instanceof Attachment) lines.push(`-F ${quoted(`${name}=@${value.name};type=${value.type}`)}`);
    else lines.push(`--form-string ${quoted(`${name}=${value}`)}`);
  }
  if (request.json === undefined) return lines.join(" \\\n  ");
  lines.push("-H 'Content-Type: application/json'");
  const files = [];
  const text = JSON.stringify(request.json, function mark(name, value) {
    const original = this[name]; // *value* is what its toJSON made of it
    if (!(original instanceof Embedded)) return value;
    files.push(original.attachment);
    return `${original.prefix}${MARK}${files.length - 1}${MARK}`;
  }, 2);
  if (!files.length) return [...lines, `-d ${quoted(text)}`].join(" \\\n  ");
  return `${[...lines, "-d @- <<JSON"].join(" \\\n  ")}\n${hereDocument(text, files)}\nJSON`;
}

/** *text* with the shell filling in each file's base64. */
function hereDocument(text, files) {
  return text.replace(/[\\$`]/g, "\\$&")
    .replace(new RegExp(`${MARK}(\\d+)${MARK}`, "g"), (_, number) => `$(base64 < ${quoted(files[number].name)} | tr -d '\\n')`);
}
