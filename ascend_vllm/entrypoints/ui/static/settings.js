// The panel beside the conversation: sampling, constraints on the output, tools. Turns them into fields of a request.

import { find, make, showError } from "./dom.js";

// field of the request, its name for readers, step, further attributes
const SAMPLING = [
  ["temperature", "Temperature", { step: 0.1, min: 0 }],
  ["seed", "Seed", { step: 1 }],
  ["max_tokens", "Max tokens", { step: 1, min: 1 }],
  ["min_tokens", "Min tokens", { step: 1, min: 0 }],
  ["top_p", "Top p", { step: 0.05, min: 0, max: 1 }],
  ["top_k", "Top k", { step: 1, min: -1 }],
  ["min_p", "Min p", { step: 0.01, min: 0, max: 1 }],
  ["presence_penalty", "Presence penalty", { step: 0.1, min: -2, max: 2 }],
  ["frequency_penalty", "Frequency penalty", { step: 0.1, min: -2, max: 2 }],
  ["repetition_penalty", "Repetition penalty", { step: 0.05, min: 0 }],
];

const SCHEMA = `{
  "type": "object",
  "properties": {
    "name": {"type": "string", "maxLength": 20},
    "age": {"type": "integer", "minimum": 0, "maximum": 120}
  },
  "required": ["name", "age"],
  "additionalProperties": false
}`;

// kind of output → label of its editor, an example, a hint
const CONSTRAINTS = {
  text: null,
  json_object: { hint: "Say in the conversation that you want JSON, and which." },
  json_schema: { label: "JSON schema", example: SCHEMA, hint: "Sent as response_format." },
  regex: { label: "Regular expression", example: "[A-Z][a-z]{2,8} \\d{4}", hint: "The whole answer is matched by it." },
  choice: { label: "Texts, one per line", example: "yes\nno\nmaybe", hint: "The answer is one of them." },
  grammar: { label: "Grammar, in GBNF or Lark", example: 'root ::= "yes" | "no"', hint: "The answer is a text of the grammar." },
};

const TOOLS = `[
  {
    "type": "function",
    "function": {
      "name": "get_weather",
      "description": "The weather of a city now",
      "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": false
      }
    }
  }
]`;

const constraints = {};
let server = {};

/** Thrown for a field that cannot be sent; the panel shows why at the field. */
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export function setUp() {
  for (const [name, label, attributes] of SAMPLING) {
    const input = make("input", { type: "number", id: `sampling-${name}`, inputMode: "decimal", ...attributes });
    if (attributes.step !== 1) input.step = "any";
    find("sampling-fields").append(make("label", { className: "field" }, label, input));
  }
  find("output-kind").addEventListener("change", showConstraint);
  find("constraint").addEventListener("input", () => {
    constraints[find("output-kind").value] = find("constraint").value;
    checkField(readConstraint, "constraint");
  });
  find("tools").addEventListener("input", showToolChoices);
  find("tools-example").addEventListener("click", () => {
    find("tools").value = TOOLS;
    find("tools").dispatchEvent(new Event("input", { bubbles: true }));
  });
  showConstraint();
}

/** Adapts the panel to what the server can do: the answer of ui/server.json. */
export function setServer(facts) {
  server = facts;
  find("top-logprobs").max = facts.max_logprobs;
  find("top-logprobs").value = Math.max(0, Math.min(5, facts.max_logprobs));
  showToolChoices();
}

function showConstraint() {
  const kind = find("output-kind").value;
  const facts = CONSTRAINTS[kind];
  find("constraint-field").hidden = !facts?.label;
  find("constraint-hint").textContent = facts?.hint || "";
  if (facts?.label) {
    find("constraint-label").textContent = facts.label;
    find("constraint").value = constraints[kind] ??= facts.example;
  }
  checkField(readConstraint, "constraint");
}

/** Shows at a field why it cannot be sent, if so. */
function checkField(read, id) {
  let text = "";
  try {
    read();
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    text = error.message;
  }
  showError(find(id), find(`${id}-error`), text);
}

function showToolChoices() {
  checkField(readTools, "tools");
  let tools = [];
  try {
    tools = readTools();
  } catch {
    return;
  }
  const select = find("tool-choice");
  const before = select.value;
  const names = tools.map((tool) => tool.function.name);
  const options = [
    ["auto", server.auto_tool_choice ? "auto" : "auto (needs --enable-auto-tool-choice)"],
    ["required", "required"],
    ["none", "none"],
    ...names.map((name) => [`function ${name}`, name]),
  ];
  select.replaceChildren(...options.map(([value, text]) => make("option", { value, textContent: text })));
  select.options[0].disabled = !server.auto_tool_choice;
  const values = options.map(([value]) => value);
  const usual = server.auto_tool_choice ? "auto" : (values[3] ?? "required");
  select.value = values.includes(before) && !select.options[values.indexOf(before)].disabled ? before : usual;
  if (!names.length) select.value = usual;
}

function parseJson(text, field) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new FieldError(field, `This is not JSON: ${error.message}.`);
  }
}

function readTools() {
  const text = find("tools").value.trim();
  if (!text) return [];
  const tools = parseJson(text, "tools");
  if (!Array.isArray(tools)) throw new FieldError("tools", "Tools are a list, in square brackets.");
  for (const tool of tools) {
    if (typeof tool?.function?.name !== "string") throw new FieldError("tools", "Each tool has a function with a name.");
  }
  return tools;
}

function readConstraint() {
  const kind = find("output-kind").value;
  const text = constraints[kind] ?? "";
  switch (kind) {
    case "json_object":
      return { response_format: { type: "json_object" } };
    case "json_schema": {
      const schema = parseJson(text, "constraint");
      if (schema === null || typeof schema !== "object") throw new FieldError("constraint", "A schema is an object.");
      return { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } };
    }
    case "choice": {
      const choice = text.split("\n").filter((line) => line.trim());
      if (!choice.length) throw new FieldError("constraint", "Write at least one text.");
      return { structured_outputs: { choice } };
    }
    case "regex":
    case "grammar":
      if (!text.trim()) throw new FieldError("constraint", "Write it here, or choose text above.");
      return { structured_outputs: { [kind]: text } };
    default:
      return {};
  }
}

export const outputKind = () => find("output-kind").value;

/** The fields of a request beside its model and messages. `afterResult`: the last message is a tool's result. */
export function readFields(afterResult) {
  const fields = {};
  for (const [name, label] of SAMPLING) {
    const input = find(`sampling-${name}`);
    if (input.validity.badInput) throw new FieldError(input.id, `${label} must be a number.`);
    if (input.value !== "") fields[name] = Number(input.value);
  }
  const stop = find("stop-texts").value.split("\n").filter((line) => line);
  if (stop.length) fields.stop = stop;
  if (find("logprobs").checked) {
    fields.logprobs = true;
    fields.top_logprobs = Number(find("top-logprobs").value) || 0;
  }
  Object.assign(fields, readConstraint());
  const tools = readTools();
  if (tools.length) {
    fields.tools = tools;
    fields.tool_choice = toolChoice(afterResult);
  }
  return fields;
}

function toolChoice(afterResult) {
  const choice = find("tool-choice").value;
  // a call that is forced again after its result would never end
  if (afterResult && choice !== "auto") return server.auto_tool_choice ? "auto" : "none";
  const name = /^function (.*)$/s.exec(choice);
  return name ? { type: "function", function: { name: name[1] } } : choice;
}

/** Brings the tab with a field into view and focuses it. */
export function reveal(field) {
  const panel = find(field).closest("[role=tabpanel]");
  find(panel.getAttribute("aria-labelledby")).click();
  find(field).focus();
}
