// The official `openai` SDK for Node.

import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";
import { MESSAGES, URL, check, packaged } from "./checks.mjs";

const OpenAI = packaged("openai");
const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const CHAT = { model: "default", messages: MESSAGES, max_tokens: 24, temperature: 0 };
const RUNNING = /^outrider_running_requests (\S+)/m;
const PLACE = {
  type: "object",
  properties: { city: { type: "string", maxLength: 20 }, country: { type: "string", maxLength: 20 } },
  required: ["city", "country"],
  additionalProperties: false,
};
const TOOL = { name: "tell", description: "Tells a place.", parameters: PLACE };

await check("models.list and models.retrieve", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.equal(names.length, 1);
  assert.equal((await client.models.retrieve(names[0])).id, names[0]);
  return names[0];
});

await check("chat, whole and streamed, is the same text", async () => {
  const whole = await client.chat.completions.create(CHAT);
  const options = { stream: true, stream_options: { include_usage: true } };
  const stream = await client.chat.completions.create({ ...CHAT, ...options });
  let text = "", usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  assert.match(whole._request_id, /./);
  return JSON.stringify(text);
});

await check("the streaming helper", async () => {
  const parts = [];
  const stream = client.chat.completions.stream({ ...CHAT, logprobs: true }).on("content", (part) => parts.push(part));
  const last = await stream.finalChatCompletion();
  assert.equal(last.choices[0].message.content, parts.join(""));
  return `${last.choices[0].finish_reason}; ${last.choices[0].logprobs.content.length} log-probabilities`;
});

await check("an answer that follows a schema", async () => {
  const format = { type: "json_schema", json_schema: { name: "place", strict: true, schema: PLACE } };
  const answer = await client.chat.completions.create({ ...CHAT, max_tokens: 200, response_format: format });
  const place = JSON.parse(answer.choices[0].message.content);
  assert.deepEqual(Object.keys(place), ["city", "country"]);
  return JSON.stringify(place);
});

await check("a tool that must be called, whole and streamed", async () => {
  const asked = { ...CHAT, max_tokens: 200, tools: [{ type: "function", function: TOOL }], tool_choice: "required" };
  const whole = (await client.chat.completions.create(asked)).choices[0];
  const streamed = (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0];
  const [calls, others] = [whole, streamed].map((choice) => choice.message.tool_calls.map((call) => call.function));
  assert.equal(calls.length, 1);
  assert.deepEqual(others.map(({ name, arguments: text }) => [name, text]), [[calls[0].name, calls[0].arguments]]);
  assert.equal(streamed.finish_reason, whole.finish_reason);
  return `${calls[0].name}(${JSON.stringify(JSON.parse(calls[0].arguments))}), ${whole.finish_reason}`;
});

await check("runTools, and the answer of the model to the result of the tool", async () => {
  const places = [];
  const answer = (place) => (places.push(place), "It is there.");
  const tools = [{ type: "function", function: { ...TOOL, function: answer, parse: JSON.parse } }];
  const choice = { type: "function", function: { name: TOOL.name } };
  const runner = client.chat.completions.runTools({ ...CHAT, max_tokens: 200, tools, tool_choice: choice });
  await runner.done(); // of a named tool it is called once, and the model not asked again
  assert.equal(places.length, 1);
  assert.deepEqual(runner.messages.map((message) => message.role), ["user", "assistant", "tool"]);
  const last = await client.chat.completions.create({ ...CHAT, messages: runner.messages });
  return JSON.stringify(last.choices[0].message.content);
});

await check("completions of two prompts, streamed", async () => {
  const asked = { model: "default", prompt: ["One, two,", "Red, green,"], max_tokens: 6, temperature: 0 };
  const whole = (await client.completions.create(asked)).choices.map((choice) => choice.text);
  const texts = ["", ""];
  for await (const chunk of await client.completions.create({ ...asked, stream: true }))
    for (const choice of chunk.choices) texts[choice.index] += choice.text;
  assert.deepEqual(texts, whole);
  return JSON.stringify(texts);
});

await check("responses, whole and streamed, are the same text", async () => {
  const asked = { model: "default", input: "Hello", max_output_tokens: 12, temperature: 0 };
  const whole = await client.responses.create(asked);
  const kinds = new Set();
  const stream = client.responses.stream(asked);
  for await (const event of stream) kinds.add(event.type);
  assert.equal((await stream.finalResponse()).output_text, whole.output_text);
  return `${JSON.stringify(whole.output_text)}; ${[...kinds].join(", ")}`;
});

await check("error classes: NotFoundError, BadRequestError, also of a stream", async () => {
  for (const stream of [false, true])
    for (const [wrong, kind] of [
      [{ model: "other" }, OpenAI.NotFoundError],
      [{ temperature: 9 }, OpenAI.BadRequestError],
    ])
      await assert.rejects(client.chat.completions.create({ ...CHAT, ...wrong, stream }), (error) => {
        assert.ok(error instanceof kind, error);
        return Boolean(error.type && error.requestID);
      });
});

await check("abort of a stream ends the request", async () => {
  const running = async () => Number(RUNNING.exec(await (await fetch(`${URL}/metrics`)).text())[1]);
  const before = await running();
  const stream = await client.chat.completions.create({ ...CHAT, max_tokens: 4000, stream: true, ignore_eos: true });
  let chunks = 0;
  for await (const _ of stream) if (++chunks === 3) stream.controller.abort();
  for (let tries = 0; tries < 50 && (await running()) > before; tries++) await sleep(100);
  assert.equal(await running(), before);
  return `after ${chunks} chunks`;
});
