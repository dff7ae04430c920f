// Texts to vectors, and how near they lie to each other.

import { send } from "../api.js";
import { h } from "../dom.js";
import { Workspace } from "../workspace.js";

export const embeddings = {
  id: "embeddings",
  title: "Embeddings",
  shows: (model) => model.routes.includes("/v1/embeddings"),
  create,
};

function create(model) {
  const space = new Workspace(model, { title: "Embeddings", about: "One text a line: their vectors, and the cosine of each two.", action: "Embed" });
  const texts = h("textarea", { rows: 5 });
  texts.value = "A cat sleeps on the sofa.\nA kitten naps.\nThe stock market fell.";
  space.field("input", "Texts", texts);

  space.submit = async () => {
    const input = texts.value.split("\n").filter((line) => line.trim());
    const request = { path: "/v1/embeddings", json: { model: model.id, input, encoding_format: "float", ...space.knobs.values() } };
    space.code.request(request);
    const { data, usage } = await (await send(request, space.signal)).json();
    const vectors = data.map((item) => item.embedding);
    space.output.replaceChildren(similarities(input, vectors), listing(input, vectors));
    return `${vectors.length} vectors of ${vectors[0]?.length ?? 0} numbers from ${usage.prompt_tokens} tokens`;
  };
  return space.element;
}

const dot = (a, b) => a.reduce((sum, value, i) => sum + value * b[i], 0);
const cosine = (a, b) => dot(a, b) / (Math.sqrt(dot(a, a) * dot(b, b)) || 1);

function similarities(texts, vectors) {
  const numbers = texts.map((_, i) => h("th", { scope: "col", title: texts[i] }, String(i + 1)));
  return h("div.scroll", {}, h("table.heat", {}, h("caption", {}, "Cosine similarity"), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Text"), numbers)),
    h("tbody", {}, texts.map((text, i) => h("tr", {}, h("th", { scope: "row" }, `${i + 1} ${text}`),
      vectors.map((vector) => heat(cosine(vectors[i], vector))))))));
}

function heat(value) {
  const cell = h("td", {}, value.toFixed(3));
  cell.style.setProperty("--heat", String(Math.max(0, value)));
  return cell;
}

function listing(texts, vectors) {
  return h("details", {}, h("summary", {}, "Vectors"), h("ol", {}, vectors.map((vector, i) => (
    h("li", {}, h("span", {}, texts[i]), h("pre", {}, h("code", {}, JSON.stringify(vector.slice(0, 64)) + (vector.length > 64 ? " …" : "")))))))); 
}
