// The chat: sends requests to the gateway, and shows the speculation of every answer.

import { Answer } from "./answer.js";
import { CHOICES, describe, MODES, SOURCES } from "./sources.js";
import { chunksOf, Refused } from "./stream.js";

const at = (id) => document.getElementById(id);
const messages = []; // the conversation so far, in the API's form
let running = null; // AbortController of the running request
let sources = null; // titles by the names of the draft sources that run; null as long as that is unknown

function headers() {
  const key = at("key").value || sessionStorage.getItem("key") || "";
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

// The model of requests: the chosen one of several; the only one has no choice.
const chosen = () => at("models").value || "default";

function offerModels(names) {
  const known = [...at("models").options].map((option) => option.value);
  if (names.length < 2 || names.join() === known.join()) return;
  const before = chosen();
  at("models").replaceChildren(...names.map((name) => new Option(name)));
  if (names.includes(before)) at("models").value = before;
  at("choice").hidden = false;
  at("model").hidden = true;
}

async function checkHealth() {
  const health = at("health");
  try {
    const models = await fetch("v1/models", { headers: headers() });
    if (models.status === 401) askForKey();
    const listed = models.ok ? (await models.json()).data[0].id : "";
    at("model").textContent = listed;
    const state = await (await fetch("health")).json();
    offerModels(Object.keys(state.models ?? {}));
    const { status } = state.models?.[chosen()] ?? state;
    const words = { ok: "", degraded: "plain decoding: no draft service is up" };
    health.textContent = words[status] ?? "not ready";
    health.classList.toggle("wrong", !(status in words));
  } catch {
    health.textContent = "cannot be reached";
    health.classList.add("wrong");
  }
}

// Which draft sources run, from the gateway's own report.
async function checkSources() {
  const query = at("models").value ? `?model=${encodeURIComponent(chosen())}` : "";
  const found = await fetch(`get_server_info${query}`, { headers: headers() }).catch(() => null);
  if (!found?.ok) return;
  const info = await found.json();
  sources = new Map(Object.entries(SOURCES).filter(([name]) => info.draft_sources?.[name].running));
  const drafters = info.drafts.filter((draft) => draft.up).flatMap((draft) => draft.drafters ?? []);
  if (sources.has("draft")) sources.set("draft", [...new Set(drafters)].join(", "));
  at("sources").textContent = `draft service: ${describe("draft", sources)} · self-speculation: ${describe("self", sources)}`;
}

function askForKey() {
  document.querySelector(".key").hidden = false;
  at("key").focus();
}

async function answerTo(turn, mode) {
  const { title, speculation } = MODES[mode];
  const answer = new Answer(turn.querySelector(".answers"), title, describe(mode, sources), at("rejected").checked);
  const body = {
    model: chosen(),
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("tokens").value),
    seed: Number(at("seed").value),
    speculation: { ...speculation, report: true },
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

function verdictOn(turn, answers) {
  const plain = answers.off;
  const others = Object.keys(answers).filter((mode) => mode !== "off");
  for (const mode of others) answers[mode].compare(plain);
  const same = others.every((mode) => answers[mode].text === plain.text);
  const speeds = others
    .filter((mode) => answers[mode].rate && plain.rate)
    .map((mode) => `${MODES[mode].title} ${(answers[mode].rate / plain.rate).toFixed(2)} times`);
  const verdict = document.createElement("p");
  verdict.className = "verdict";
  verdict.setAttribute("role", "status");
  verdict.textContent =
    (same ? "✓ The texts are equal. " : "✗ The texts differ (number formats may round differently). ") +
    (speeds.length ? `Speed over plain decoding: ${speeds.join(", ")}.` : "");
  turn.append(verdict);
  verdict.scrollIntoView({ block: "end" });
}

async function ask(text) {
  running = new AbortController();
  setBusy(true);
  const turn = newTurn(text);
  messages.push({ role: "user", content: text });
  await checkSources();
  const modes = CHOICES[at("mode").value];
  const answers = {};
  // One after the other, because concurrent requests would share the machine.
  for (const mode of modes) {
    if (!running.signal.aborted) answers[mode] = await answerTo(turn, mode);
  }
  if (modes.length > 1 && !running.signal.aborted) verdictOn(turn, answers);
  const [first] = Object.values(answers);
  if (first.text) messages.push({ role: "assistant", content: first.text });
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
at("models").addEventListener("change", () => {
  checkHealth();
  checkSources();
});
at("rejected").addEventListener("change", (event) => {
  for (const text of document.querySelectorAll(".text")) text.classList.toggle("with-rejected", event.target.checked);
});
checkHealth().then(checkSources);
