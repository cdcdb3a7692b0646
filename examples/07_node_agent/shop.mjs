// The shop: its goods, the two tools that look them up, and the clerk's instructions.

import { readFileSync } from "node:fs";

const read = (name) => readFileSync(new URL(`../04_langgraph/${name}`, import.meta.url), "utf8");

const goods = JSON.parse(read("shop.json"));

export const instructions = read("instructions.txt").trim();

export const descriptions = { price: "What an item costs.", stock: "How many of an item are left." };

export const tools = Object.entries(descriptions).map(([name, description]) => ({
  type: "function",
  function: {
    name,
    description,
    parameters: {
      type: "object",
      properties: { item: { type: "string" } },
      required: ["item"],
      additionalProperties: false,
    },
  },
}));

/** Sampling parameters of `llms.policy` in config.yml. */
export const parameters = JSON.parse(process.env.HONE_MODEL_PARAMS ?? "{}");

/** The price or the stock of an item, as text for the model. */
export function lookUp(tool, item) {
  return String(goods[item]?.[tool] ?? "no such item");
}
