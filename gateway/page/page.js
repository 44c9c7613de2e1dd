// The chat: sends requests to the gateway, and shows the speculation of every answer.

import { Answer } from "./answer.js";
import { chunksOf, Refused } from "./stream.js";

const at = (id) => document.getElementById(id);
const messages = []; // the conversation so far, in the API's form
let running = null; // AbortController of the running request

const MODES = {
  on: { title: "with speculation", speculation: { report: true } },
  off: { title: "plain decoding", speculation: { enabled: false, report: true } },
};

function headers() {
  const key = at("key").value || sessionStorage.getItem("key") || "";
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function checkHealth() {
  const health = at("health");
  try {
    const models = await fetch("v1/models", { headers: headers() });
    if (models.status === 401) askForKey();
    const listed = models.ok ? (await models.json()).data[0].id : "";
    at("model").textContent = listed;
    const found = await fetch("health");
    const { status } = await found.json();
    health.textContent = { ok: "", degraded: "plain decoding: no draft service is up" }[status] ?? "not ready";
    health.classList.toggle("wrong", !found.ok);
  } catch {
    health.textContent = "cannot be reached";
    health.classList.add("wrong");
  }
}

function askForKey() {
  document.querySelector(".key").hidden = false;
  at("key").focus();
}

async function answerTo(turn, mode) {
  const answer = new Answer(turn.querySelector(".answers"), MODES[mode].title, at("rejected").checked);
  const body = {
    model: "default",
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("tokens").value),
    seed: Number(at("seed").value),
    speculation: MODES[mode].speculation,
  };
  try {
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal };
    for await (const chunk of chunksOf(await fetch("v1/chat/completions", options))) answer.add(chunk);
    if (at("key").value) sessionStorage.setItem("key", at("key").value);
  } catch (error) {
    if (error instanceof Refused && error.status === 401) askForKey();
    answer.fail(error.name === "AbortError" ? "stopped" : error.message);
  }
  answer.end();
  return answer;
}

function newTurn(text) {
  const turn = document.createElement("section");
  turn.className = "turn";
  const question = document.createElement("p");
  question.className = "question";
  question.textContent = text;
  const answers = document.createElement("div");
  answers.className = "answers";
  turn.append(question, answers);
  at("talk").append(turn);
  return turn;
}

function compare(turn, on, off) {
  const verdict = document.createElement("p");
  verdict.className = "verdict";
  const same = on.text === off.text ? "The same text" : "Different texts (integer formats may round differently)";
  const ratio = on.rate && off.rate ? `, ${(on.rate / off.rate).toFixed(2)} times the speed of plain decoding` : "";
  verdict.textContent = `${same}${ratio}.`;
  turn.append(verdict);
  verdict.scrollIntoView({ block: "end" });
}

async function ask(text) {
  running = new AbortController();
  setBusy(true);
  const turn = newTurn(text);
  messages.push({ role: "user", content: text });
  // One after the other, because concurrent requests would share the machine.
  const on = await answerTo(turn, "on");
  if (at("compare").checked && !running.signal.aborted) compare(turn, on, await answerTo(turn, "off"));
  if (on.text) messages.push({ role: "assistant", content: on.text });
  else messages.pop();
  running = null;
  setBusy(false);
  at("prompt").focus();
}

function setBusy(busy) {
  at("send").disabled = at("clear").disabled = busy;
  at("stop").disabled = !busy;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value.trim();
  if (!text || running) return;
  at("prompt").value = "";
  ask(text);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("clear").addEventListener("click", () => {
  messages.length = 0;
  at("talk").replaceChildren();
});
at("rejected").addEventListener("change", (event) => {
  for (const text of document.querySelectorAll(".text")) text.classList.toggle("with-rejected", event.target.checked);
});
checkHealth();
