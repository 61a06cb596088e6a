// Puts the page together: views, key, model, theme, and the request as code.

import { absolute, currentKey, getJson, ServerError, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { announce, copy, find, make, makeTabs } from "./dom.js";
import { EngineView } from "./engine.js";
import { FieldError, setServer, setUp } from "./settings.js";
import { asCurl, asPython } from "./snippets.js";

let models = [];

// The key ------------------------------------------------------------------------------------------------------------

/** Asks for a key; false: the reader gave none. */
function askForKey(error = "") {
  const dialog = find("key-dialog");
  if (dialog.open) return Promise.resolve(false);
  find("key-error").textContent = error;
  find("key-error").hidden = !error;
  find("key").value = "";
  find("key-forget").hidden = !currentKey();
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}

function setUpKey() {
  const dialog = find("key-dialog");
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(find("key").value.trim());
    find("key").value = "";
    dialog.close("given");
  });
  find("key-cancel").addEventListener("click", () => dialog.close(""));
  find("key-forget").addEventListener("click", () => {
    setKey("");
    dialog.close("given");
  });
  find("open-key").addEventListener("click", async () => {
    if (await askForKey()) connect();
  });
}

// The server ---------------------------------------------------------------------------------------------------------

function notice(text) {
  find("notice").textContent = text;
  find("notice").hidden = !text;
}

/** Asks the server what it serves, for a key first if it needs one. */
async function connect() {
  let error = "";
  for (;;) {
    try {
      const [list, server] = await Promise.all([getJson("v1/models"), getJson("ui/server.json")]);
      models = list.data.map((card) => card.id);
      setServer(server);
      showServer(server);
      notice("");
      break;
    } catch (problem) {
      if (!(problem instanceof ServerError)) throw problem;
      if (problem.status !== 401) {
        notice(problem.message);
        break;
      }
      error = currentKey() ? problem.message : "";
      if (!(await askForKey(error))) {
        notice("Without its key the server answers no messages. The engine can be watched.");
        break;
      }
    }
  }
  find("open-key").hidden = !currentKey() && find("notice").hidden;
  showCode();
}

function showServer(server) {
  find("model").replaceChildren(...models.map((name) => make("option", { value: name, textContent: name })));
  find("model").hidden = models.length < 2;
  find("model-name").hidden = models.length > 1;
  find("model-name").textContent = models[0];
  find("empty-model").textContent = models[0];
  document.title = `${models[0]} – ascend-vllm`;
  find("attach").hidden = !server.input_modalities.includes("image");
  if (!server.generates) {
    find("tab-chat").hidden = true;
    find("tab-engine").click();
    notice("This model does not write texts: it is asked by programs, for embeddings or scores.");
  }
}

// The views ----------------------------------------------------------------------------------------------------------

const engine = new EngineView();
const chat = new Chat(() => find("model").value, () => askForKey("The server does not accept this key."), showCode);

function setUpPanel() {
  const panel = find("panel");
  const toggle = find("toggle-panel");
  const setOpen = (isOpen, moves) => {
    document.body.classList.toggle("panel-open", isOpen);
    toggle.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) showCode();
    if (moves) (isOpen ? panel.querySelector("[role=tab][aria-selected=true]") : toggle).focus();
  };
  const isNarrow = matchMedia("(max-width: 56rem)");
  setOpen(!isNarrow.matches, false);
  isNarrow.addEventListener("change", () => setOpen(!isNarrow.matches, false));
  toggle.addEventListener("click", () => setOpen(!document.body.classList.contains("panel-open"), isNarrow.matches));
  toggle.addEventListener("open-panel", () => setOpen(true, false));
  find("close-panel").addEventListener("click", () => setOpen(false, true));
  panel.addEventListener("keydown", (event) => event.key === "Escape" && isNarrow.matches && setOpen(false, true));
  panel.addEventListener("input", showCode);
  panel.addEventListener("change", showCode);
}

// The request as code ------------------------------------------------------------------------------------------------

function showCode() {
  // nobody sees it
  if (find("panel-code").hidden || !document.body.classList.contains("panel-open") || !models.length) return;
  const write = document.querySelector("[name=language]:checked").value === "curl" ? asCurl : asPython;
  const hasKey = currentKey() !== "";
  try {
    find("code").textContent = write(absolute("v1"), chat.nextBody(), hasKey);
    find("copy-code").disabled = false;
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    find("code").textContent = error.message;
    find("copy-code").disabled = true;
  }
  const key = hasKey ? " It reads the key from the variable OPENAI_API_KEY." : "";
  find("code-hint").textContent = `The next request, answered at once instead of in a stream.${key}`;
}

// The theme ----------------------------------------------------------------------------------------------------------

const THEMES = { auto: "automatic", light: "light", dark: "dark" };

function setUpTheme() {
  const button = find("theme");
  const root = document.documentElement;
  const show = () => {
    button.setAttribute("aria-label", `Theme: ${THEMES[root.dataset.theme] || THEMES.auto}`);
    button.title = button.getAttribute("aria-label");
  };
  button.addEventListener("click", () => {
    const names = Object.keys(THEMES);
    root.dataset.theme = names[(names.indexOf(root.dataset.theme) + 1) % names.length];
    try {
      localStorage.setItem("ascend-vllm-theme", root.dataset.theme);
    } catch {
      // storage is forbidden in this browser: the choice ends with the page
    }
    show();
    announce(button.title);
  });
  show();
}

setUp();
setUpKey();
setUpTheme();
makeTabs(document.querySelector(".bar .tabs"), (tab) => engine.setShown(tab.id === "tab-engine"));
makeTabs(document.querySelector(".panel .tabs"), showCode);
setUpPanel();
find("model").addEventListener("change", showCode);
find("copy-code").addEventListener("click", (event) => copy(find("code").textContent, event.currentTarget));
for (const input of document.getElementsByName("language")) input.addEventListener("change", showCode);
find("draft").focus();
connect();
