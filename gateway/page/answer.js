// One answer on the page: its tokens colored by origin, its figures, and its steps as bars.

const SPECIAL = /^<[|｜].*[|｜]>$/; // special tokens such as ends of turns
const NAMES = { plain: "plain step", accepted: "draft token, accepted", bonus: "bonus token", rejected: "rejected" };

// A token's bytes. Tokens are texts; parts of a character are written as "bytes:\xe2\x82".
function bytesOf(piece) {
  if (!piece.startsWith("bytes:")) return new TextEncoder().encode(piece);
  return Uint8Array.from(piece.matchAll(/\\x(..)/g), ([, hex]) => parseInt(hex, 16));
}

export class Answer {
  constructor(parent, title, withRejected) {
    this.text = "";
    this.rate = 0;
    this.began = performance.now();
    this.first = 0;
    this.counts = { tokens: 0, steps: 0, drafts: 0, verified: 0, accepted: 0 };
    this.steps = []; // [tokens, accepted draft tokens, verified draft tokens] of each step
    this.decoder = new TextDecoder();
    const box = document.createElement("article");
    box.className = "answer";
    box.innerHTML = '<h2></h2><div class="text"></div><div class="figures"></div><canvas class="steps"></canvas>';
    box.querySelector("h2").textContent = title;
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
      this.step(report.texts[i], report.accepted[i], report.verified[i], report.draft_texts[i]);
    }
    this.show();
  }

  step(texts, accepted, verified, draft) {
    if (!this.first) this.first = performance.now();
    texts.forEach((text, i) => this.token(text, !verified ? "plain" : i < accepted ? "accepted" : "bonus"));
    const bonus = texts[accepted];
    if (draft.length > accepted && draft[accepted] !== bonus) this.token(draft.slice(accepted).join(""), "rejected");
    this.counts.tokens += texts.length;
    this.counts.steps += 1;
    this.counts.drafts += verified > 0;
    this.counts.verified += verified;
    this.counts.accepted += accepted;
    this.steps.push([texts.length, accepted, verified]);
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
    const { tokens, steps, verified, accepted } = this.counts;
    const seconds = (performance.now() - this.first) / 1000;
    this.rate = tokens > 1 && seconds > 0 ? (tokens - this.steps[0][0]) / seconds : 0;
    const figures = [
      ["tokens", tokens],
      ["tokens/s", this.rate.toFixed(0)],
      ["first token", `${(this.first - this.began).toFixed(0)} ms`],
      ["tokens/step", steps ? (tokens / steps).toFixed(2) : "-"],
      ["accepted", verified ? `${accepted} of ${verified}` : "-"],
    ];
    const nodes = figures.map(([name, value]) => {
      const span = document.createElement("span");
      const strong = document.createElement("b");
      strong.textContent = value;
      span.append(`${name} `, strong);
      return span;
    });
    this.box.querySelector(".figures").replaceChildren(...nodes);
    this.draw();
    this.output.parentElement.scrollIntoView({ block: "end" });
  }

  // One bar per step: accepted draft tokens below, the bonus token on top.
  draw() {
    const canvas = this.box.querySelector("canvas");
    const scale = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth * scale, canvas.clientHeight * scale];
    Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d");
    const plain = getComputedStyle(this.box).borderTopColor;
    const colour = (kind) => getComputedStyle(document.querySelector(`.legend .${kind}`)).backgroundColor;
    const largest = Math.max(4, ...this.steps.map(([count]) => count));
    const wide = Math.min(8 * scale, width / Math.max(this.steps.length, 1));
    this.steps.forEach(([count, accepted, verified], i) => {
      const unit = height / largest;
      pen.fillStyle = colour("accepted");
      pen.fillRect(i * wide, height - accepted * unit, wide * 0.85, accepted * unit);
      pen.fillStyle = verified ? colour("bonus") : plain;
      pen.fillRect(i * wide, height - count * unit, wide * 0.85, (count - accepted) * unit);
    });
  }

  fail(message) {
    const line = document.createElement("p");
    line.className = "error";
    line.textContent = message;
    this.box.append(line);
  }

  end() {
    this.box.dataset.done = "true";
  }
}
