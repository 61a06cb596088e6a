// A request as a command for curl and as a program for Python with the package openai. Neither holds the key itself.

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// arguments of the method of openai's client; everything else goes into `extra_body`
const KNOWN = new Set(
  "model messages temperature top_p seed max_tokens presence_penalty frequency_penalty stop logprobs top_logprobs tools tool_choice response_format".split(" "),
);

export function asCurl(url, body, hasKey) {
  const lines = [`curl ${/^[\w:/.~-]+$/.test(url) ? url : shellQuoted(url)}/chat/completions`];
  if (hasKey) lines.push('  -H "Authorization: Bearer $OPENAI_API_KEY"');
  lines.push("  -H 'Content-Type: application/json'", `  -d ${shellQuoted(JSON.stringify(body, null, 2))}`);
  return lines.join(" \\\n");
}

/** A JSON value as a Python expression. */
function asPythonValue(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  // texts of JSON and its numbers are those of Python
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => asPythonValue(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${asPythonValue(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const short = `${open}${items.join(", ")}${close}`;
  if (short.length + indent.length < 80 && !short.includes("\n")) return short;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}

export function asPython(url, body, hasKey) {
  const named = Object.entries(body).filter(([name]) => KNOWN.has(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.has(name)));
  if (Object.keys(others).length) named.push(["extra_body", others]);
  const lines = named.map(([name, value]) => `    ${name}=${asPythonValue(value, "    ")},\n`).join("");
  const shown = body.tools || body.logprobs ? "response.model_dump_json(indent=2)" : "response.choices[0].message.content";
  const imports = hasKey ? "import os\n\nfrom openai import OpenAI" : "from openai import OpenAI";
  const key = hasKey ? 'os.environ["OPENAI_API_KEY"]' : '"none"';
  return `${imports}

client = OpenAI(base_url=${JSON.stringify(url)}, api_key=${key})
response = client.chat.completions.create(
${lines})
print(${shown})
`;
}
