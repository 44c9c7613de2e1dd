// One answer on the page: its tokens colored by origin, its figures, and its steps as bars.

import { SOURCES } from "./sources.js";

const SPECIAL = /^<[|｜].*[|｜]>$/; // special tokens such as ends of turns
const NAMES = { plain: "plain step", bonus: "bonus token", rejected: "rejected draft token" };
for (const [name, title] of Object.entries(SOURCES)) NAMES[name] = `accepted draft token: ${title}`;

// A token's bytes. Tokens are texts; parts of a character are written as "bytes:\xe2\x82".
function bytesOf(piece) {
  if (!piece.startsWith("bytes:")) return new TextEncoder().encode(piece);
  return Uint8Array.from(piece.matchAll(/\\x(..)/g), ([, hex]) => parseInt(hex, 16));
}

export class Answer {
  // about: what drafts for it, in words.
  constructor(parent, title, about, withRejected) {
    this.text = "";
    this.rate = 0;
    this.began = performance.now();
    this.first = 0;
    this.counts = { tokens: 0, steps: 0, plain: 0, verified: 0, accepted: 0 };
    this.sources = {}; // verified and accepted draft tokens by source
    this.steps = []; // tokens, accepted draft tokens and source of each step; no source for a plain one
    this.decoder = new TextDecoder();
    const box = document.createElement("article");
    box.className = "answer";
    box.innerHTML =
      '<h2><span></span><small></small><span class="rate"></span></h2><div class="text"></div>' +
      '<div class="figures"></div><canvas class="steps" role="img" aria-label="tokens of each step"></canvas>';
    box.querySelector("h2 span").textContent = title;
    box.querySelector("small").textContent = about;
    this.box = box;
    this.output = box.querySelector(".text");
    this.output.classList.toggle("with-rejected", withRejected);
    parent.append(box);
  }

  add(chunk) {
    const [choice] = chunk.choices;
    if (!choice) return;
    this.text += choice.delta?.content ?? "";
    const report = choice.speculation;
    for (let i = 0; i < (report?.tokens.length ?? 0); i++) {
      this.step(report.texts[i], report.accepted[i], report.verified[i], report.sources[i], report.draft_texts[i]);
    }
    this.show();
  }

  step(texts, accepted, verified, source, draft) {
    if (!this.first) this.first = performance.now();
    texts.forEach((text, i) => this.token(text, !verified ? "plain" : i < accepted ? source : "bonus"));
    const bonus = texts[accepted];
    if (draft.length > accepted && draft[accepted] !== bonus) this.token(draft.slice(accepted).join(""), "rejected");
    this.counts.tokens += texts.length;
    this.counts.steps += 1;
    this.counts.plain += !verified;
    this.counts.verified += verified;
    this.counts.accepted += accepted;
    if (verified) {
      const counts = (this.sources[source] ??= [0, 0]);
      counts[0] += verified;
      counts[1] += accepted;
    }
    this.steps.push([texts.length, accepted, verified ? source : null]);
  }

  token(text, kind) {
    if (SPECIAL.test(text)) return;
    const shown = kind === "rejected" ? text.replaceAll("\n", "⏎") : this.decoder.decode(bytesOf(text), { stream: true });
    if (!shown) return;
    const span = document.createElement("span");
    span.className = `token ${kind}`;
    span.title = NAMES[kind];
    span.textContent = shown;
    this.output.append(span);
  }

  show() {
    const { tokens, steps, plain, verified, accepted } = this.counts;
    const seconds = (performance.now() - this.first) / 1000;
    this.rate = tokens > 1 && seconds > 0 ? (tokens - this.steps[0][0]) / seconds : 0;
    const unit = document.createElement("i");
    unit.textContent = " tokens/s";
    this.box.querySelector(".rate").replaceChildren(this.rate.toFixed(0), unit);
    const figures = [
      ["tokens", tokens],
      ["accept length", steps ? (tokens / steps).toFixed(2) : "-"],
      ["plain steps", `${plain} of ${steps}`],
      ["first token", `${(this.first - this.began).toFixed(0)} ms`],
      ["accepted", verified ? `${accepted} of ${verified} draft tokens` : "no draft tokens", "share"],
    ];
    for (const [name, title] of Object.entries(SOURCES)) {
      if (this.sources[name]) figures.push([title, `${this.sources[name][1]} of ${this.sources[name][0]}`, name]);
    }
    const nodes = figures.map(([name, value, kind]) => {
      const span = document.createElement("span");
      const [label, strong] = [document.createElement("span"), document.createElement("b")];
      label.textContent = name;
      strong.textContent = value;
      if (kind === "share") span.className = "share";
      else if (kind) label.className = `token ${kind}`;
      span.append(label, " ", strong);
      return span;
    });
    this.box.querySelector(".figures").replaceChildren(...nodes);
    this.draw();
    this.output.parentElement.scrollIntoView({ block: "end" });
  }

  // One bar per step: accepted draft tokens below in their source's colour, the other token on top.
  draw() {
    const canvas = this.box.querySelector("canvas");
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
    Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d");
    const plain = getComputedStyle(this.box).borderTopColor;
    const colour = (kind) => getComputedStyle(document.querySelector(`.legend .${kind}`)).borderBottomColor;
    const largest = Math.max(4, ...this.steps.map(([count]) => count));
    const wide = Math.min(8 * scale, width / Math.max(this.steps.length, 1));
    this.steps.forEach(([count, accepted, source], i) => {
      const unit = height / largest;
      if (source) pen.fillStyle = colour(source);
      pen.fillRect(i * wide, height - accepted * unit, wide * 0.85, accepted * unit);
      pen.fillStyle = plain;
      pen.fillRect(i * wide, height - count * unit, wide * 0.85, (count - accepted) * unit);
    });
  }

  fail(message) {
    const line = document.createElement("p");
    line.className = "error";
    line.textContent = message;
    this.box.append(line);
  }

  // Says whether the text equals that of plain decoding.
  compare(plain) {
    const line = document.createElement("p");
    const same = this.text === plain.text;
    line.className = same ? "same" : "same other";
    line.textContent = same ? "same text as without speculation" : "another text than without speculation";
    this.box.append(line);
  }

  end() {
    this.box.dataset.done = "true";
  }
}
