// Pictures from words, and from other pictures.

import { decodeBase64, events, send } from "../api.js";
import { freshId, h, select } from "../dom.js";
import { FilePicker } from "../files.js";
import { Progress, picture } from "../outputs.js";
import { Workspace, seconds } from "../workspace.js";

const MAKE = "/v1/images/generations";
const EDIT = "/v1/images/edits";

export const images = {
  id: "images",
  title: "Images",
  shows: (model) => model.routes.includes(MAKE) || model.routes.includes(EDIT),
  create,
};

const FORMATS = [["png", "PNG"], ["webp", "WebP"], ["jpeg", "JPEG"]];

function create(model) {
  const edits = model.routes.includes(EDIT);
  const space = new Workspace(model, { title: "Images", action: "Make", without: ["size", "n"] });
  const prompt = h("textarea", { rows: 3 });
  space.field("prompt", "What to show", prompt);
  const picker = new FilePicker({ accept: "image/*", label: "Add a picture to change" });
  const mask = new FilePicker({ accept: "image/*", most: 1, label: "Add a mask" });
  if (edits) {
    space.files("image", "Pictures", picker);
    if (model.canvas?.masks !== false) space.files("mask", "Mask", mask, "Transparent where the first picture is to change.");
    picker.listen(space.form);
  }
  const size = sizeField(space, model, "auto");
  const count = h("input", { type: "text", inputmode: "numeric", placeholder: "1", autocomplete: "off" });
  space.field("n", "How many", count, "", "settings");
  const format = select(FORMATS, "png");
  space.field("output_format", "File", format, "", "settings");

  const reuse = (blob) => h("button.quiet.small", { type: "button", onclick: () => {
    picker.add([new File([blob], `picture.${blob.type.split("/")[1]}`, { type: blob.type })]);
    space.form.scrollIntoView({ block: "start" });
  } }, "Change this");

  space.submit = async () => {
    const fields = { model: model.id, prompt: prompt.value, output_format: format.value, ...space.knobs.values() };
    if (size.value) fields.size = size.value;
    if (count.value) fields.n = Number(count.value);
    fields.stream = true;
    if (model.modalities.output.includes("preview")) fields.partial_images = 3;
    const request = picker.attachments.length
      ? { path: EDIT, form: [...Object.entries(fields), ...picker.attachments.map((one) => ["image[]", one]), ...mask.attachments.map((one) => ["mask", one])], streams: true }
      : { path: MAKE, json: fields, streams: true };
    if (!model.routes.includes(request.path)) {
      throw Object.assign(new Error("This model changes pictures: add one."), { param: "image" });
    }
    space.code.request(request);
    const progress = new Progress();
    const results = h("div.pictures");
    space.output.replaceChildren(progress.element, results);
    const began = performance.now();
    try {
      await follow(await send(request, space.signal), progress, results, edits ? reuse : null);
    } finally {
      progress.element.remove();
    }
    return `${results.children.length} in ${seconds(performance.now() - began)}`;
  };
  return space.element;
}

/** An input for a size in pixels that says which ones the model makes. */
export function sizeField(space, model, preset) {
  const { multiple = 1, min_side: least, max_side: most, choices = [] } = model.canvas?.sizes ?? {};
  const names = choices.map(([width, height]) => `${width}x${height}`);
  const known = h("datalist", { id: freshId("sizes") }, names.map((name) => h("option", { value: name })));
  const input = h("input", { type: "text", list: known.id, placeholder: preset, autocomplete: "off" });
  const sides = most ? ` Sides of ${least} to ${most}${multiple > 1 ? `, multiples of ${multiple}` : ""}.` : "";
  const help = names.length ? `One of ${names.join(", ")}.` : `Width x height in pixels.${sides}`;
  space.field("size", "Size", input, help, "settings").element.append(known);
  return input;
}

async function follow(response, progress, results, reuse) {
  for await (const event of events(response)) {
    const type = `image/${event.output_format ?? "png"}`;
    if (event.type.endsWith(".partial_image")) {
      progress.show(`data:${type};base64,${event.b64_json}`);
    } else if (event.type.endsWith(".completed")) {
      const bytes = decodeBase64(event.b64_json);
      const actions = reuse ? [reuse(new Blob([bytes], { type }))] : [];
      results.append(picture(bytes, type, { actions }));
    } else if (event.step !== undefined) {
      progress.add(event);
    }
  }
}
