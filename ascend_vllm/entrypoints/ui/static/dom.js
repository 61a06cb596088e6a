// Small helpers to build the page. Text of models and servers is only ever set as text, never as HTML.

export const find = (id) => document.getElementById(id);

/** An element with properties, `data-` and `aria-` attributes among them, and children: nodes or texts. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Says something to screen readers. */
export function announce(text) {
  find("live").textContent = text;
}

/** Shows a text below a field, or hides it: the field is marked as wrong meanwhile. */
export function showError(field, place, text) {
  place.textContent = text;
  place.hidden = text === "";
  field.setAttribute("aria-invalid", String(text !== ""));
}

/** Copies a text and says so on the button. */
export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // pages without TLS may not use the clipboard's interface
    const area = make("textarea", { value: text, className: "visually-hidden" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  announce("Copied");
  setTimeout(() => (button.textContent = label), 1500);
}

/** Tabs of the ARIA pattern: arrow keys, Home and End move between them. Calls `chosen(tab)` for each choice. */
export function makeTabs(list, chosen) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const choose = (tab) => {
    for (const other of tabs) {
      const isChosen = other === tab;
      other.setAttribute("aria-selected", String(isChosen));
      other.tabIndex = isChosen ? 0 : -1;
      find(other.getAttribute("aria-controls")).hidden = !isChosen;
    }
    chosen(tab);
  };
  const steps = { ArrowRight: 1, ArrowLeft: -1 };
  for (const tab of tabs) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      let index = tabs.indexOf(tab);
      if (event.key in steps) index = (index + steps[event.key] + tabs.length) % tabs.length;
      else if (event.key === "Home") index = 0;
      else if (event.key === "End") index = tabs.length - 1;
      else return;
      event.preventDefault();
      tabs[index].focus();
      choose(tabs[index]);
    });
  }
  return choose;
}
