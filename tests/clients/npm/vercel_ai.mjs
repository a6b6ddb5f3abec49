// Vercel's `ai` with the providers of both APIs: text, streams, tools, typed answers.
import assert from "node:assert";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const options = { baseURL: process.env.BASE + "/v1", apiKey: "none" };
const openai = createOpenAI(options), anthropic = createAnthropic(options);
const prompt = "Weather in Oslo?", schema = z.object({ city: z.string() });
const tools = {
  get_weather: tool({ description: "of a city", inputSchema: schema, execute: async () => "cold" }),
};
for (const model of [openai("m"), openai.chat("m"), anthropic("m")]) {
  assert.equal((await generateText({ model, prompt })).text, "All is well.");
  let text = "";
  for await (const part of streamText({ model, prompt }).textStream) text += part;
  assert.equal(text, "All is well.");
  const stopWhen = stepCountIs(4);
  const looped = await generateText({ model, prompt, tools, stopWhen });
  assert.equal(looped.steps.length, 2);
  assert.equal(looped.text, "All is well.");
}
for (const model of [openai("m"), openai.chat("m")]) {
  assert.equal((await generateObject({ model, prompt, schema })).object.city, "Oslo");
}
console.log("all passed");
