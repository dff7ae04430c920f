// The native route: any kind of request, any kind of answer.

import { jsonLines, send } from "../api.js";
import { h } from "../dom.js";
import { FilePicker } from "../files.js";
import { Outputs } from "../outputs.js";
import { Workspace, seconds } from "../workspace.js";

export const generate = {
  id: "generate",
  title: "Generate",
  shows: (model) => model.routes.includes("/generate"),
  create,
};

function create(model) {
  const space = new Workspace(model, {
    title: "Generate", about: "The native route: whatever the model takes and makes.", action: "Generate", knobPrefix: "model_kwargs.",
  });
  const text = h("textarea", { rows: 3 });
  space.field("text", "Text", text);
  const picker = new FilePicker({ label: "Add files" });
  space.files("files", "Files", picker);
  picker.listen(space.form);
  const wants = model.modalities.output.map((modality) => [modality, h("input", { type: "checkbox", value: modality })]);
  if (wants.length > 1) {
    space.settings.append(h("fieldset.choices", {}, h("legend", {}, "Wanted outputs"),
      wants.map(([modality, box]) => h("label", {}, box, " ", modality)), h("p.help", {}, "None chosen: the model decides.")));
  }
  const session = h("input", { type: "text", autocomplete: "off" });
  space.field("session", "Session", session, "State is kept under this name for the next request.", "settings");
  const outputs = new Outputs(space.output);

  space.submit = async () => {
    const form = [["model", model.id], ["text", text.value]];
    for (const attachment of picker.attachments) form.push(["files", attachment]);
    for (const [modality, box] of wants) if (box.checked) form.push(["output_modalities", modality]);
    const knobs = space.knobs.values();
    if (Object.keys(knobs).length) form.push(["model_kwargs", JSON.stringify(knobs)]);
    if (session.value) form.push(["session", session.value]);
    form.push(["streaming", true]);
    const request = { path: "/generate", form, streams: true };
    space.code.request(request);
    outputs.clear();
    const began = performance.now();
    try {
      let done;
      for await (const event of jsonLines(await send(request, space.signal))) {
        if (event.type === "delta") outputs.add(event);
        else if (event.type === "done") done = event;
      }
      return `${done?.finish_reason ?? "done"} in ${seconds(performance.now() - began)}`;
    } finally {
      outputs.end(space.signal.aborted);
    }
  };
  return space.element;
}
