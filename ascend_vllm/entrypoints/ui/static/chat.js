// The conversation: what was said, how it is shown, and the requests that continue it.

import { ServerError, streamChat } from "./api.js";
import { announce, copy, find, make } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { FieldError, outputKind, readFields, reveal } from "./settings.js";
import { makeTokenView } from "./tokens.js";

const ROLE_NAMES = { user: "You", tool: "Result of a call" };
const FINISH_NOTES = { length: "cut off at max tokens", tool_calls: "calls a tool", content_filter: "filtered" };
// pixels from the end of the conversation within which it follows a growing answer
const FOLLOW = 60;

/** An indented JSON text, or the text itself if it is not JSON. */
export function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export class Chat {
  /**
   * @param {() => string} model the name of the model to ask
   * @param {() => Promise<boolean>} askForKey asks for another key; false: the reader gave none
   * @param {() => void} changed called when the next request may be another one
   */
  constructor(model, askForKey, changed) {
    this.model = model;
    this.askForKey = askForKey;
    this.changed = changed;
    this.messages = [];
    this.images = [];
    this.running = null;
    this.draft = find("draft");
    this.scroll = find("scroll");
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.draft.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.draft.addEventListener("input", () => {
      this.fitDraft();
      this.changed();
    });
    find("composer").addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    find("stop").addEventListener("click", () => this.stop());
    find("clear").addEventListener("click", () => this.clear());
    find("file").addEventListener("change", (event) => {
      // a copy: the list is emptied with the field, which otherwise would not take the same file again
      this.addImages([...event.target.files]);
      event.target.value = "";
    });
    this.draft.addEventListener("paste", (event) => {
      if (!find("attach").hidden && event.clipboardData.files.length) this.addImages([...event.clipboardData.files]);
    });
  }

  // What is sent ---------------------------------------------------------------------------------------------------

  /** The body of the request that the conversation, and what is written but not sent yet, would make now. */
  nextBody() {
    const messages = [...this.messages];
    // an answer is not continued: what comes before it was the request
    while (messages.at(-1)?.role === "assistant" && !this.hasDraft()) messages.pop();
    if (this.hasDraft()) messages.push(this.draftMessage());
    if (!messages.length) messages.push({ role: "user", content: "Hello" });
    return this.bodyOf(messages);
  }

  bodyOf(messages) {
    const system = find("system").value.trim();
    const sent = messages.filter((message) => message.content || message.images?.length || message.calls?.length).map(toApi);
    if (system) sent.unshift({ role: "system", content: system });
    return { model: this.model(), messages: sent, ...readFields(messages.at(-1)?.role === "tool") };
  }

  hasDraft() {
    return this.draft.value.trim() !== "" || this.images.length > 0;
  }

  draftMessage() {
    return { role: "user", content: this.draft.value.trim(), images: [...this.images] };
  }

  // What the reader does -------------------------------------------------------------------------------------------

  send() {
    if (this.running || !this.hasDraft()) return;
    const message = this.draftMessage();
    if (!this.isReady([...this.messages, message])) return;
    this.draft.value = "";
    this.images = [];
    this.showImages();
    this.fitDraft();
    this.add(message);
    this.generate();
  }

  /** Whether the settings can be sent; if not, the wrong one is shown. */
  isReady(messages) {
    try {
      this.bodyOf(messages);
      return true;
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      find("toggle-panel").dispatchEvent(new CustomEvent("open-panel"));
      reveal(error.field);
      announce(error.message);
      return false;
    }
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.cutAt(0);
    this.draft.focus();
    announce("New chat");
  }

  /** Removes a message and all that follow. */
  cutAt(index) {
    for (const message of this.messages.splice(index)) message.element.remove();
    find("empty").hidden = this.messages.length > 0;
    this.changed();
  }

  regenerate(message) {
    const index = this.messages.indexOf(message);
    if (this.running || !this.isReady(this.messages.slice(0, index))) return;
    this.cutAt(index);
    this.generate();
  }

  edit(message) {
    if (this.running) return;
    const area = make("textarea", { value: message.content, "aria-label": "Your message", className: "edit-area" });
    const end = () => {
      form.replaceWith(message.body);
      message.actions.hidden = false;
    };
    const save = () => {
      const text = area.value.trim();
      const index = this.messages.indexOf(message);
      if (this.running || !text || !this.isReady([...this.messages.slice(0, index), { ...message, content: text }])) return;
      end();
      this.cutAt(index + 1);
      message.content = text;
      this.show(message);
      this.draft.focus();
      this.generate();
    };
    const cancel = make("button", { type: "button", className: "quiet", textContent: "Cancel" });
    const form = make(
      "form",
      { className: "edit" },
      area,
      make("div", { className: "actions" }, make("button", { className: "primary", textContent: "Send" }), cancel),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      save();
    });
    cancel.addEventListener("click", () => {
      end();
      message.editButton.focus();
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel.click();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        save();
      }
    });
    message.body.replaceWith(form);
    message.actions.hidden = true;
    area.style.height = `${Math.min(area.scrollHeight + 4, 400)}px`;
    area.focus();
  }

  sendResults(message, areas) {
    if (this.running) return;
    const results = message.calls.map((call, index) => ({
      role: "tool",
      content: areas[index].value,
      callId: call.id,
      name: call.name,
    }));
    const index = this.messages.indexOf(message);
    if (!this.isReady([...this.messages.slice(0, index + 1), ...results])) return;
    this.cutAt(index + 1);
    for (const result of results) this.add(result);
    message.resultForm.hidden = true;
    this.draft.focus();
    this.generate();
  }

  // The answer -----------------------------------------------------------------------------------------------------

  async generate() {
    const messages = [...this.messages];
    const body = { ...this.bodyOf(messages), stream: true, stream_options: { include_usage: true } };
    const message = { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], kind: outputKind(), note: "" };
    this.add(message);
    const controller = new AbortController();
    this.setRunning(controller);
    announce("The model is writing");
    const times = { start: performance.now(), first: 0 };
    let wantsKey = false;
    try {
      for await (const event of streamChat(body, controller.signal)) {
        this.take(message, event, times);
        this.showSoon(message);
      }
      message.note = this.noteOf(message, times);
    } catch (error) {
      if (error.name === "AbortError") message.note = "stopped";
      else if (error instanceof ServerError) {
        wantsKey = error.status === 401;
        message.error = error.message;
      } else throw error;
    } finally {
      message.done = true;
      this.setRunning(null);
      if (this.messages.includes(message)) this.show(message);
    }
    this.tellEnd(message);
    this.changed();
    if (wantsKey && (await this.askForKey()) && !this.running && this.messages.at(-1) === message) this.regenerate(message);
  }

  /** Adds an event of the stream to a message. */
  take(message, event, times) {
    if (event.usage) message.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const delta = choice.delta || {};
    const reasoning = delta.reasoning ?? delta.reasoning_content;
    if (!times.first && (delta.content || reasoning || delta.tool_calls)) times.first = performance.now();
    if (delta.content) message.content += delta.content;
    if (reasoning) message.reasoning += reasoning;
    for (const part of delta.tool_calls || []) {
      const call = (message.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
      if (part.id) call.id = part.id;
      call.name += part.function?.name || "";
      call.arguments += part.function?.arguments || "";
    }
    if (choice.logprobs?.content) message.tokens.push(...choice.logprobs.content);
    if (choice.finish_reason) message.finish = choice.finish_reason;
  }

  noteOf(message, times) {
    const parts = [];
    const count = message.usage?.completion_tokens;
    if (count !== undefined) parts.push(`${count} token${count === 1 ? "" : "s"}`);
    const seconds = (performance.now() - times.first) / 1000;
    // of an answer that came at once there is none
    if (times.first && count > 1 && seconds > 0.05) parts.push(`${Math.round((count - 1) / seconds)} tokens/s`);
    if (times.first) parts.push(`first after ${((times.first - times.start) / 1000).toFixed(2)} s`);
    if (FINISH_NOTES[message.finish]) parts.push(FINISH_NOTES[message.finish]);
    return parts.join(" · ");
  }

  /** Says the whole answer at once: a screen reader could not follow its tokens. */
  tellEnd(message) {
    if (message.error) return; // an alert of its own
    const calls = message.calls.map((call) => `The model calls ${call.name}.`).join(" ");
    announce(`${message.note === "stopped" ? "Stopped. " : ""}${message.content || calls || "The answer is empty."}`);
  }

  setRunning(controller) {
    const hadFocus = document.activeElement;
    this.running = controller;
    find("send").hidden = controller !== null;
    find("stop").hidden = controller === null;
    document.body.classList.toggle("running", controller !== null);
    if (controller && hadFocus === find("send")) find("stop").focus();
    else if (!controller && (hadFocus === find("stop") || hadFocus === document.body)) this.draft.focus();
  }

  // How it is shown ------------------------------------------------------------------------------------------------

  add(message) {
    this.messages.push(message);
    find("empty").hidden = true;
    message.element = make("li", { className: "message", "data-role": message.role });
    find("messages").append(message.element);
    this.show(message);
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** Shows a growing message once per frame. */
  showSoon(message) {
    if (message.frame) return;
    message.frame = requestAnimationFrame(() => {
      message.frame = 0;
      if (!message.done) this.show(message);
    });
  }

  show(message) {
    const follows = this.scroll.scrollHeight - this.scroll.scrollTop - this.scroll.clientHeight < FOLLOW;
    if (!message.body) this.build(message);
    if (message.role === "assistant") this.showAnswer(message);
    else this.showGiven(message);
    if (follows) this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  build(message) {
    const name = message.role === "tool" ? `Result of ${message.name}` : ROLE_NAMES[message.role] || this.model();
    message.body = make("div", { className: "body" });
    message.actions = make("div", { className: "actions" });
    message.element.append(make("h3", { className: "who", textContent: name }), message.body, message.actions);
    const button = (text, act) => {
      const element = make("button", { type: "button", className: "quiet", textContent: text });
      element.addEventListener("click", () => act(element));
      message.actions.append(element);
      return element;
    };
    if (message.role === "user") message.editButton = button("Edit", () => this.edit(message));
    if (message.role !== "assistant") return;
    message.thoughts = make("div", { className: "thoughts-text" });
    message.thoughtsBox = make("details", { className: "thoughts", hidden: true }, make("summary"), message.thoughts);
    message.text = make("div", { className: "text" });
    message.callBox = make("div", { className: "calls" });
    message.alert = make("p", { className: "error", role: "alert", hidden: true });
    message.body.append(message.thoughtsBox, message.text, message.callBox, message.alert);
    message.tokenButton = button("Tokens", () => {
      message.showsTokens = !message.showsTokens;
      this.show(message);
    });
    message.copyButton = button("Copy", (element) => copy(message.content || JSON.stringify(message.calls), element));
    button("Regenerate", () => this.regenerate(message));
    message.noteElement = make("span", { className: "note" });
    message.actions.append(message.noteElement);
    message.showsTokens = true;
  }

  showGiven(message) {
    const images = (message.images || []).map((address) => make("img", { src: address, alt: "Image of the message" }));
    message.body.replaceChildren(...images, make("div", { className: "plain", textContent: message.content }));
  }

  showAnswer(message) {
    message.thoughtsBox.hidden = !message.reasoning;
    if (message.reasoning) {
      const isThinking = !message.done && !message.content && !message.calls.length;
      message.thoughtsBox.firstChild.textContent = isThinking ? "Thinking…" : "Thoughts";
      message.thoughts.textContent = message.reasoning;
    }
    const hasTokens = message.done && message.tokens.length > 0;
    message.tokenButton.hidden = !hasTokens;
    message.tokenButton.setAttribute("aria-pressed", String(message.showsTokens));
    if (hasTokens && message.showsTokens) {
      message.text.replaceChildren(makeTokenView(message.tokens));
      message.text.blocks = [];
    } else this.showText(message);
    this.showCalls(message);
    message.alert.hidden = !message.error;
    // set once: an alert is read when its text comes
    if (message.error && message.alert.textContent !== message.error) message.alert.textContent = message.error;
    message.element.setAttribute("aria-busy", String(!message.done));
    message.copyButton.hidden = !message.content && !message.calls.length;
    message.actions.hidden = !message.done;
    message.noteElement.textContent = message.note;
  }

  showText(message) {
    const { kind, content, text } = message;
    if (kind === "text") {
      if (!text.blocks?.length) text.replaceChildren();
      showMarkdown(text, content);
      return;
    }
    const isJson = kind.startsWith("json");
    const shown = isJson && message.done ? indented(content) : content;
    text.replaceChildren(make("pre", { tabIndex: 0, role: "group", textContent: shown, "aria-label": isJson ? "JSON" : "Answer" }));
  }

  showCalls(message) {
    if (!message.calls.length) return;
    if (!message.done) {
      message.callBox.replaceChildren(...message.calls.map((call) => makeCall(call)));
      return;
    }
    if (message.resultForm) return;
    const areas = message.calls.map(() => make("textarea", { rows: 2, className: "mono" }));
    const boxes = message.calls.map((call, index) =>
      makeCall(call, make("label", { className: "field" }, `Result of ${call.name}`, areas[index])),
    );
    const send = make("button", { className: "primary", textContent: areas.length > 1 ? "Send results" : "Send result" });
    message.resultForm = make("div", { className: "actions" }, send);
    const form = make("form", { className: "call-form" }, ...boxes, message.resultForm);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.sendResults(message, areas);
    });
    message.callBox.replaceChildren(form);
  }

  fitDraft() {
    this.draft.style.height = "auto";
    this.draft.style.height = `${Math.min(this.draft.scrollHeight + 2, innerHeight / 3)}px`;
  }

  // Images ---------------------------------------------------------------------------------------------------------

  async addImages(files) {
    for (const file of files) {
      if (!file.type.startsWith("image/")) continue;
      this.images.push(
        await new Promise((resolve, reject) => {
          const reader = new FileReader();
          reader.onload = () => resolve(reader.result);
          reader.onerror = () => reject(reader.error);
          reader.readAsDataURL(file);
        }),
      );
    }
    this.showImages();
    this.changed();
  }

  showImages() {
    const list = find("images");
    list.hidden = !this.images.length;
    list.replaceChildren(
      ...this.images.map((address, index) => {
        const remove = make("button", { type: "button", className: "quiet", textContent: "Remove", "aria-label": `Remove image ${index + 1}` });
        remove.addEventListener("click", () => {
          this.images.splice(index, 1);
          this.showImages();
          this.changed();
          this.draft.focus();
        });
        return make("li", {}, make("img", { src: address, alt: `Image ${index + 1}` }), remove);
      }),
    );
  }
}

function makeCall(call, ...more) {
  return make(
    "div",
    { className: "call" },
    make("p", { className: "call-name" }, "Calls ", make("code", { textContent: call.name })),
    make("pre", { tabIndex: 0, role: "group", textContent: indented(call.arguments), "aria-label": `Arguments of ${call.name}` }),
    ...more,
  );
}

/** A message of the conversation in the form of the API. */
function toApi(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.content };
  if (message.role === "assistant") {
    if (!message.calls.length) return { role: "assistant", content: message.content };
    const calls = message.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { role: "assistant", content: message.content || null, tool_calls: calls };
  }
  if (!message.images?.length) return { role: "user", content: message.content };
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...images, ...(message.content ? [{ type: "text", text: message.content }] : [])] };
}
