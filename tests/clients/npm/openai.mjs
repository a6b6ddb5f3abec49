// The `openai` package: chats and responses, streamed, with tools, typed, cancelled.
import assert from "node:assert";
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: process.env.BASE + "/v1", apiKey: "none", maxRetries: 0 });
const model = "m", ask = "Weather in Oslo?";
const parameters = {
  type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false,
};

const plain = await client.responses.create({ model, input: ask });
assert.equal(plain.output_text, "All is well.");

let text = "", last = null;
for await (const event of await client.responses.create({ model, input: ask, stream: true })) {
  if (event.type === "response.output_text.delta") text += event.delta;
  last = event;
}
assert.equal(text, "All is well.");
assert.equal(last.type, "response.completed");

const tools = [{ type: "function", name: "get_weather", parameters, strict: true }];
const input = [{ role: "user", content: ask }];
const called = await client.responses.create({ model, input, tools });
const call = called.output.find(item => item.type === "function_call");
assert.equal(JSON.parse(call.arguments).city, "Oslo");
input.push(...called.output, { type: "function_call_output", call_id: call.call_id, output: "cold" });
assert.equal((await client.responses.create({ model, input, tools })).output_text, "All is well.");

const format = zodTextFormat(z.object({ city: z.string(), warm: z.boolean() }), "weather");
const typed = await client.responses.parse({ model, input: ask, text: { format } });
assert.equal(typed.output_parsed.city, "Oslo");

const runner = client.chat.completions.runTools({
  model, stream: true, messages: [{ role: "user", content: ask }],
  tools: [{ type: "function", function: { name: "get_weather", parameters, parse: JSON.parse, function: () => "cold" } }],
});
assert.equal(await runner.finalContent(), "All is well.");

const control = new AbortController();
const stream = await client.responses.create({ model, input: ask, stream: true }, { signal: control.signal });
for await (const event of stream) { control.abort(); break; }
console.log("all passed");
