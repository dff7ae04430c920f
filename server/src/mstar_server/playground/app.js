// The page's frame: the models, the views that a model has, the key, dark or light.

import { ApiError, apiKey, send } from "./api.js";
import { h } from "./dom.js";
import { chat } from "./views/chat.js";
import { embeddings } from "./views/embeddings.js";
import { generate } from "./views/generate.js";
import { images } from "./views/images.js";
import { live } from "./views/live.js";
import { speech } from "./views/speech.js";
import { transcription } from "./views/transcription.js";
import { videos } from "./views/videos.js";

const VIEWS = [chat, speech, transcription, images, videos, embeddings, live, generate];

const main = document.getElementById("main");
const nav = document.getElementById("views");
const chooser = document.getElementById("model");
const status = document.getElementById("model-state");

let models = [];
const made = new Map(); // "model/view" → element: what a person typed stays while the page is open

// --- models and views -------------------------------------------------------------------------------------------------

async function loadModels() {
  status.textContent = "Loading…";
  try {
    models = (await (await send({ path: "/v1/models" })).json()).data;
    status.textContent = "";
  } catch (error) {
    status.textContent = "";
    showFailure(error);
    return;
  }
  chooser.replaceChildren(...models.map((model) => h("option", { value: model.id }, model.id)));
  chooser.disabled = models.length < 2;
  made.clear();
  route();
}

function showFailure(error) {
  nav.replaceChildren();
  chooser.replaceChildren();
  const again = h("button", { type: "button", onclick: loadModels }, "Try again");
  main.replaceChildren(h("section.empty", {}, h("h1", {}, "The server's models are not known"),
    h("p.notice.error", { role: "alert" }, error.message), h("p.buttons", {}, again)));
  if (error instanceof ApiError && error.status === 401) askForKey(error.message);
}

/** What the page's address names: `#/model/view`. */
function wanted() {
  const [, model, view] = location.hash.split("/").map(decodeURIComponent);
  return { model, view };
}

const hashOf = (model, view) => `#/${encodeURIComponent(model.id)}/${view.id}`;

function route() {
  if (!models.length) {
    main.replaceChildren(h("section.empty", {}, h("h1", {}, "No models"), h("p", {}, "This server has none.")));
    return;
  }
  const { model: name, view: id } = wanted();
  const model = models.find((known) => known.id === name) ?? models[0];
  const views = VIEWS.filter((view) => view.shows(model));
  const view = views.find((known) => known.id === id) ?? views[0];
  chooser.value = model.id;
  status.textContent = [model.state && model.state !== "loaded" ? model.state : "", model.summary].filter(Boolean).join(" · ");
  nav.replaceChildren(...views.map((known) => h("a", { href: hashOf(model, known), "aria-current": known === view ? "page" : null }, known.title)));
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  if (!view) {
    main.replaceChildren(h("section.empty", {}, h("h1", {}, model.id), h("p", {}, "This page has nothing for this model's abilities: ", model.abilities.join(", "), ".")));
    return;
  }
  document.title = `${view.title} · ${model.id} · M*`;
  const key = `${model.id}/${view.id}`;
  if (!made.has(key)) made.set(key, view.create(model));
  main.replaceChildren(made.get(key));
}

chooser.addEventListener("change", () => {
  const model = models.find((known) => known.id === chooser.value);
  const same = VIEWS.find((view) => view.id === wanted().view && view.shows(model));
  location.hash = hashOf(model, same ?? VIEWS.find((view) => view.shows(model)) ?? VIEWS[0]);
});
window.addEventListener("hashchange", route);

// --- the key ------------------------------------------------------------------------------------------------------------

const dialog = document.getElementById("key-dialog");
const keyInput = document.getElementById("key-input");

function askForKey(reason = "") {
  keyInput.value = apiKey.get();
  document.getElementById("key-error").textContent = reason;
  if (!dialog.open) dialog.showModal();
}

document.getElementById("key-button").addEventListener("click", () => askForKey());
document.getElementById("key-cancel").addEventListener("click", () => dialog.close("cancel"));
document.addEventListener("key-needed", (event) => askForKey(event.detail));
dialog.addEventListener("close", () => {
  if (dialog.returnValue !== "use") return;
  dialog.returnValue = "";
  apiKey.set(keyInput.value.trim());
  loadModels();
});

// --- dark or light ---------------------------------------------------------------------------------------------------

const themeButton = document.getElementById("theme-button");
const isDark = () => (document.documentElement.dataset.theme ?? (window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  themeButton.textContent = isDark() ? "☀" : "☾";
  themeButton.setAttribute("aria-label", isDark() ? "Switch to light" : "Switch to dark");
}

themeButton.addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  localStorage.setItem("mstar-theme", theme);
  setTheme(theme);
});
setTheme(localStorage.getItem("mstar-theme"));

loadModels();
