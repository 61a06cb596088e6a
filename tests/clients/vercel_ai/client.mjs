// Vercel's AI SDK with its provider for OpenAI-compatible servers: text, streams, tools, objects, embeddings.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, generateText, streamText, tool } from "ai";
import { z } from "zod";

const [server, poolingServer, question] = process.argv.slice(2);
const provider = (url) =>
  createOpenAICompatible({
    name: "ascend-vllm",
    baseURL: `${url}/v1`,
    // without it the SDK asks for json_object, and the schema does not bind the answer
    supportsStructuredOutputs: true,
    // without it the usage of streams is not known
    includeUsage: true,
  });
const greedy = { model: provider(server)("demo"), prompt: question, temperature: 0 };
const Answer = z.object({ word: z.enum(["yes", "no"]), sure: z.boolean() });

const seen = { stream: [] };
seen.chat = (await generateText({ ...greedy, maxOutputTokens: 40 })).text;
const stream = streamText({ ...greedy, maxOutputTokens: 40 });
for await (const text of stream.textStream) seen.stream.push(text);
if (!((await stream.usage).outputTokens > 0)) throw new Error("a stream without usage");
const called = await generateText({
  ...greedy,
  maxOutputTokens: 400,
  tools: {
    weather: tool({
      description: "The weather of a city.",
      inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }),
    }),
  },
  toolChoice: { type: "tool", toolName: "weather" },
});
seen.tool = { name: called.toolCalls[0].toolName, arguments: called.toolCalls[0].input };
const { output } = await generateText({ ...greedy, maxOutputTokens: 400, output: Output.object({ schema: Answer }) });
seen.structured = [output];
if (poolingServer)
  seen.embedding = (await embed({ model: provider(poolingServer).embeddingModel("demo"), value: question })).embedding;
console.log(JSON.stringify(seen));
