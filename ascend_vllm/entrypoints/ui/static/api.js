// Requests to the server. All addresses are relative to the page, so that a prefix of a proxy stays in front of them.

const KEY_NAME = "ascend-vllm-key";
let key = "";
try {
  // of this tab alone: it survives a reload and ends with the tab
  key = sessionStorage.getItem(KEY_NAME) || "";
} catch {
  // storage is forbidden in this browser: the key lives as long as the page
}

export const currentKey = () => key;

export function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(KEY_NAME, value);
    else sessionStorage.removeItem(KEY_NAME);
  } catch {
    // see above
  }
}

/** The address of a route for programs outside of the page. */
export const absolute = (path) => new URL(path, document.baseURI).href;

/** An error that is a sentence for the reader. `status` is that of the answer, 0 without one. */
export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function sentence(status, text) {
  let said = "";
  try {
    const body = JSON.parse(text);
    said = body.error?.message || body.message || body.detail || (typeof body.error === "string" ? body.error : "");
  } catch {
    said = text.length < 300 && !text.includes("<") ? text : "";
  }
  if (typeof said !== "string") said = JSON.stringify(said);
  if (status === 401) return "The server does not accept this key.";
  if (status === 429) return said || "The server answers too many of your requests already. Try again in a moment.";
  if (status === 503) return said || "The server is too busy or is stopping. Try again in a moment.";
  return said || `The server answered with status ${status} and no explanation.`;
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error instanceof TypeError && key && /[^\x20-\xff]/.test(key)) throw new ServerError("A key cannot have such letters.", 401);
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw new ServerError(sentence(response.status, await response.text()), response.status);
  return response;
}

export const getJson = async (path) => (await request(path)).json();
export const getText = async (path, signal) => (await request(path, { signal })).text();

/** The events of a streamed chat completion, as objects. */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        // comments keep the connection open
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(event.error.message || "The server ended the answer with an error.");
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server broke while it was answering.");
  }
  throw new ServerError("The server closed the connection before the answer was complete.");
}
