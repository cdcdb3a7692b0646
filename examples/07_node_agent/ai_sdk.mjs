// The same clerk, with the Vercel AI SDK.
//
// In:   a customer's question on stdin; the model's address in OPENAI_BASE_URL and HONE_MODEL
// Out:  the clerk's answer on stdout

import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";
import { descriptions, instructions, lookUp, parameters } from "./shop.mjs";

const provider = createOpenAICompatible({
  name: "hone",
  baseURL: process.env.OPENAI_BASE_URL,
  apiKey: process.env.OPENAI_API_KEY,
});
const inputSchema = z.object({ item: z.string() });
const tools = Object.fromEntries(
  Object.entries(descriptions).map(([name, description]) => [
    name,
    tool({ description, inputSchema, execute: async ({ item }) => lookUp(name, item) }),
  ]),
);

const { text } = await generateText({
  model: provider(process.env.HONE_MODEL),
  system: instructions,
  prompt: readFileSync(0, "utf8"),
  tools,
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  stopWhen: stepCountIs(3),
  temperature: parameters.temperature,
  maxOutputTokens: parameters.max_tokens,
});
console.log(text);
