// The server, asked with fetch and websockets. One error for whatever went wrong.

const KEY = "mstar-api-key";

/** Paths are below wherever this page is shown, so that it works behind a proxy's path. */
export function address(path) {
  return new URL(path.replace(/^\//, ""), new URL(".", document.baseURI.split("#")[0]));
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** What the server's error object says, with the status of its answer. */
export class ApiError extends Error {
  constructor(error, status = 0, retryAfter = null) {
    super(error?.message ?? `the server answered with status ${status}`);
    this.param = error?.param ?? null;
    this.code = error?.code ?? null;
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** A file that goes into a request: its bytes in a form, its base64 in JSON. Made by `await Attachment.of(file)`. */
export class Attachment {
  constructor(file, base64) {
    this.file = file;
    this.base64 = base64;
    this.name = file.name || "file";
    this.type = file.type || "application/octet-stream";
  }

  static async of(file) {
    const bytes = new Uint8Array(await file.arrayBuffer());
    return new Attachment(file, encodeBase64(bytes));
  }

  get kind() { return this.type.split("/")[0]; }
  get url() { return (this.shown ??= URL.createObjectURL(this.file)); }

  /** In a JSON body as a data URL, or as bare base64. */
  asDataUrl() { return new Embedded(this, `data:${this.type};base64,`); }
  asBase64() { return new Embedded(this, ""); }
}

/** An attachment's text inside JSON. The shown code names the file instead. */
export class Embedded {
  constructor(attachment, prefix) {
    this.attachment = attachment;
    this.prefix = prefix;
  }

  toJSON() { return this.prefix + this.attachment.base64; }
}

export function encodeBase64(bytes) {
  let text = "";
  for (let start = 0; start < bytes.length; start += 0x8000) {
    text += String.fromCharCode(...bytes.subarray(start, start + 0x8000));
  }
  return btoa(text);
}

export function decodeBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/**
 * Send a request `{method, path, json}` or `{method, path, form: [[name, value]]}`; values of a form are texts and
 * attachments. Resolves to a response of status 2xx, else throws an `ApiError`.
 */
export async function send(request, signal) {
  const headers = {};
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let body;
  if (request.json !== undefined) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(request.json);
  } else if (request.form) {
    body = new FormData();
    for (const [name, value] of request.form) {
      if (value instanceof Attachment) body.append(name, value.file, value.name);
      else body.append(name, String(value));
    }
  }
  const method = request.method ?? (body === undefined ? "GET" : "POST");
  const response = await fetch(address(request.path), { method, headers, body, signal }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new ApiError({ message: "The server cannot be reached." });
  });
  if (response.ok) return response;
  const text = await response.text();
  const retryAfter = response.headers.get("Retry-After");
  let error;
  try {
    ({ error } = JSON.parse(text));
  } catch {
    error = { message: text.slice(0, 300) || `${response.status} ${response.statusText}` };
  }
  throw new ApiError(error, response.status, retryAfter === null ? null : Number(retryAfter));
}

async function* textLines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      yield* lines;
    }
    if (rest) yield rest;
  } finally {
    await reader.cancel().catch(() => {}); // whoever leaves the loop early does not want the rest
  }
}

function checked(value) {
  const failed = value.type === "error" || (value.error && !value.id);
  if (failed) throw new ApiError(value.error, value.status);
  return value;
}

/** The objects of a stream of server-sent events. */
export async function* events(response) {
  for await (const line of textLines(response)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    yield checked(JSON.parse(data));
  }
}

/** The objects of a stream of JSON lines. */
export async function* jsonLines(response) {
  for await (const line of textLines(response)) {
    if (line.trim()) yield checked(JSON.parse(line));
  }
}

/** An open websocket. Browsers send no headers with one: the key goes as OpenAI's clients send it. */
export function openSocket(path) {
  const url = address(path);
  url.protocol = url.protocol.replace("http", "ws");
  const protocols = apiKey.get() ? ["mstar", `openai-insecure-api-key.${apiKey.get()}`] : [];
  let socket;
  try {
    socket = new WebSocket(url, protocols);
  } catch (error) {
    return Promise.reject(new ApiError({ message: `A browser cannot send this key to a socket: ${error.message}` }));
  }
  return new Promise((resolve, reject) => {
    socket.addEventListener("open", () => resolve(socket));
    socket.addEventListener("error", () => reject(new ApiError({ message: "The socket could not be opened." })));
  });
}
