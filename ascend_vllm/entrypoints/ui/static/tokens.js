// The view of an answer's tokens: each one coloured by its probability, its alternatives shown on hover and focus.

import { find, make } from "./dom.js";

// below these probabilities a token is marked, ever more strongly
const LEVELS = [0.9, 0.6, 0.3, 0.1];

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100 %" : share >= 0.1 ? `${share.toFixed(1)} %` : share > 0 ? "< 0.1 %" : "0 %";
};

const visible = (token) => token.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(nothing)";

/** What a screen reader says of a token. */
const spoken = (token) => (token.trim() ? `“${token.trim()}”` : token ? visible(token) : "no text");

export function makeTokenView(tokens) {
  const list = make("div", {
    className: "tokens",
    role: "listbox",
    "aria-label": "Tokens and their probabilities. Arrow keys move between them.",
    "aria-orientation": "horizontal",
  });
  const elements = tokens.map((token, index) => {
    const probability = Math.exp(token.logprob);
    const level = LEVELS.filter((bound) => probability < bound).length;
    return make("span", {
      // the end-of-sequence token has no text
      textContent: token.token.replaceAll("\n", "↵\n") || "∅",
      className: `token level-${level}`,
      tabIndex: index === 0 ? 0 : -1,
      role: "option",
      "aria-selected": "false",
      "aria-label": `${spoken(token.token)}, ${percent(token.logprob)}`,
    });
  });
  list.append(...elements);

  const at = (target) => elements.indexOf(target);
  const moveTo = (index) => {
    for (const element of elements) if (element.tabIndex === 0) element.tabIndex = -1;
    elements[index].tabIndex = 0;
    elements[index].focus();
  };
  list.addEventListener("keydown", (event) => {
    const index = at(event.target);
    if (index < 0) return;
    const targets = {
      ArrowRight: index + 1,
      ArrowDown: index + 1,
      ArrowLeft: index - 1,
      ArrowUp: index - 1,
      Home: 0,
      End: elements.length - 1,
    };
    if (event.key === "Escape") hideAlternatives(elements);
    if (!(event.key in targets)) return;
    event.preventDefault();
    moveTo(Math.max(0, Math.min(elements.length - 1, targets[event.key])));
  });
  list.addEventListener("focusin", (event) => show(elements, tokens, at(event.target)));
  list.addEventListener("focusout", () => hideAlternatives(elements));
  list.addEventListener("pointerover", (event) => show(elements, tokens, at(event.target)));
  list.addEventListener("pointerleave", () => {
    const focused = at(document.activeElement);
    if (focused >= 0) show(elements, tokens, focused);
    else hideAlternatives(elements);
  });
  list.addEventListener("click", (event) => at(event.target) >= 0 && moveTo(at(event.target)));
  return list;
}

function hideAlternatives(elements) {
  find("alternatives").hidden = true;
  for (const element of elements) {
    element.setAttribute("aria-selected", "false");
    element.removeAttribute("aria-describedby");
  }
}

function show(elements, tokens, index) {
  if (index < 0) return;
  hideAlternatives(elements);
  const element = elements[index];
  const token = tokens[index];
  element.setAttribute("aria-selected", "true");
  element.setAttribute("aria-describedby", "alternatives");
  const rows = [...(token.top_logprobs || [])];
  // a token that was drawn may not be among the most likely ones
  if (!rows.some((row) => row.token === token.token && row.logprob === token.logprob)) rows.push(token);
  const box = find("alternatives");
  box.replaceChildren(
    make("p", { className: "alternatives-title" }, `Token ${index + 1} of ${tokens.length}`),
    make(
      "ol",
      {},
      ...rows.map((row) => {
        const bar = make("span", { className: "bar-fill" });
        bar.style.width = `${100 * Math.exp(row.logprob)}%`;
        const isChosen = row.token === token.token;
        return make(
          "li",
          { className: isChosen ? "chosen" : "" },
          make("span", { className: "alternative-text" }, visible(row.token)),
          make("span", { className: "bar-track", "aria-hidden": "true" }, bar),
          make("span", { className: "alternative-share" }, percent(row.logprob)),
          ...(isChosen ? [make("span", { className: "visually-hidden" }, " (written)")] : []),
        );
      }),
    ),
  );
  box.hidden = false;
  place(box, element.getClientRects()[0]);
}

/** Below the token, or above it if there is no room, always within the window. */
function place(box, rectangle) {
  const gap = 6;
  const left = Math.max(gap, Math.min(rectangle.left, innerWidth - box.offsetWidth - gap));
  const below = rectangle.bottom + gap;
  const fits = below + box.offsetHeight < innerHeight - gap;
  const top = fits ? below : Math.max(gap, rectangle.top - gap - box.offsetHeight);
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}
