// Anthropic's SDK for Node: messages, streams, tools, counted tokens.
import Anthropic from "@anthropic-ai/sdk";

const [server, , question] = process.argv.slice(2);
// the SDK adds /v1 itself
const client = new Anthropic({ baseURL: server, apiKey: "none" });
const messages = [{ role: "user", content: question }];
const greedy = { model: "demo", messages, temperature: 0 };
const weather = {
  name: "weather",
  description: "The weather of a city.",
  input_schema: {
    type: "object",
    properties: { city: { enum: ["Oslo", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};

const seen = { stream: [] };
seen.chat = (await client.messages.create({ ...greedy, max_tokens: 40 })).content[0].text;
const stream = client.messages.stream({ ...greedy, max_tokens: 40 }).on("text", (text) => seen.stream.push(text));
await stream.finalMessage();
const called = await client.messages
  .stream({ ...greedy, max_tokens: 400, tools: [weather], tool_choice: { type: "tool", name: "weather" } })
  .finalMessage();
const use = called.content.find((block) => block.type === "tool_use");
seen.tool = { name: use.name, arguments: use.input };
seen.counted = (await client.messages.countTokens({ model: "demo", messages })).input_tokens;
console.log(JSON.stringify(seen));
