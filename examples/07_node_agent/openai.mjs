// The clerk of the shop, with the npm package `openai`.
//
// In:   a customer's question on stdin; the model's address in OPENAI_BASE_URL and HONE_MODEL
// Out:  the clerk's answer on stdout
//
// Nothing here knows about training: the same program answers customers in production.

import { readFileSync } from "node:fs";
import OpenAI from "openai";
import { instructions, lookUp, parameters, tools } from "./shop.mjs";

const client = new OpenAI(); // reads OPENAI_BASE_URL and OPENAI_API_KEY
const messages = [
  { role: "system", content: instructions },
  { role: "user", content: readFileSync(0, "utf8") },
];

for (let turn = 0; turn < 3; turn++) {
  const completion = await client.chat.completions.create({
    model: process.env.HONE_MODEL,
    messages,
    tools,
    tool_choice: turn === 0 ? "required" : "auto",
    ...parameters,
  });
  const message = completion.choices[0].message;
  messages.push(message);
  if (!message.tool_calls?.length) {
    console.log(message.content);
    break;
  }
  for (const call of message.tool_calls) {
    const content = lookUp(call.function.name, itemOf(call.function.arguments));
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
}

/** The item that the model asks for; undefined if its arguments are not JSON. */
function itemOf(text) {
  try {
    return JSON.parse(text).item;
  } catch {
    return undefined;
  }
}
