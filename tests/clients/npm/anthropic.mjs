// The `@anthropic-ai/sdk` package: messages, streamed, with tools, typed; tokens counted.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.BASE, apiKey: "none", maxRetries: 0 });
const model = "m", max_tokens = 500, messages = [{ role: "user", content: "Weather in Oslo?" }];
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "of a city", input_schema }];

const plain = await client.messages.create({ model, max_tokens, messages });
assert.equal(plain.content[0].text, "All is well.");
assert.equal(plain.stop_reason, "end_turn");

const counted = await client.messages.countTokens({ model, messages, tools });
const called = await client.messages.stream({ model, max_tokens, messages, tools }).finalMessage();
assert.equal(called.stop_reason, "tool_use");
assert.equal(counted.input_tokens, called.usage.input_tokens + called.usage.cache_read_input_tokens);
const use = called.content.find(block => block.type === "tool_use");
assert.deepEqual(use.input, { city: "Oslo" });
const later = [
  ...messages,
  { role: "assistant", content: called.content },
  { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "cold" }] },
];
const answer = await client.messages.create({ model, max_tokens, messages: later, tools });
assert.equal(answer.content[0].text, "All is well.");

const schema = { ...input_schema, additionalProperties: false };
const typed = await client.messages.create({
  model, max_tokens, messages, output_config: { format: { type: "json_schema", schema } },
});
assert.deepEqual(JSON.parse(typed.content[0].text), { city: "Oslo" });
await assert.rejects(client.messages.create({ model: "other", max_tokens, messages }), Anthropic.NotFoundError);
console.log("all passed");
