// OpenAI's SDK for Node: chat, Responses API, tools, structured outputs, completions, embeddings.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [server, poolingServer, question] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${server}/v1`, apiKey: "none" });
const messages = [{ role: "user", content: question }];
const greedy = { model: "demo", temperature: 0 };
const Answer = z.object({ word: z.enum(["yes", "no"]), sure: z.boolean() });
const weather = {
  type: "function",
  function: {
    name: "weather",
    description: "The weather of a city.",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Oslo", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

const seen = { models: [] };
for await (const model of await client.models.list()) seen.models.push(model.id);
const answer = await client.chat.completions.create({ ...greedy, messages, max_tokens: 40 });
seen.chat = answer.choices[0].message.content;
seen.stream = [];
for await (const chunk of await client.chat.completions.create({ ...greedy, messages, max_tokens: 40, stream: true }))
  seen.stream.push(chunk.choices[0].delta.content ?? "");
seen.responses = (await client.responses.create({ ...greedy, input: question, max_output_tokens: 40 })).output_text;
seen.completion = (await client.completions.create({ ...greedy, prompt: question, max_tokens: 8 })).choices[0].text;
const called = await client.chat.completions
  .stream({
    ...greedy,
    messages,
    max_tokens: 400,
    tools: [weather],
    tool_choice: { type: "function", function: { name: "weather" } },
  })
  .finalChatCompletion();
const call = called.choices[0].message.tool_calls[0].function;
seen.tool = { name: call.name, arguments: JSON.parse(call.arguments) };
const parsed = await client.chat.completions.parse({
  ...greedy,
  messages,
  max_tokens: 400,
  response_format: zodResponseFormat(Answer, "answer"),
});
seen.structured = [parsed.choices[0].message.parsed];
if (poolingServer) {
  const pooling = new OpenAI({ baseURL: `${poolingServer}/v1`, apiKey: "none" });
  // the SDK asks for base64 and decodes it
  seen.embedding = (await pooling.embeddings.create({ model: "demo", input: question })).data[0].embedding;
}
console.log(JSON.stringify(seen));
