// Draft sources by their names in the API, and the modes in which the page runs a prompt.

export const SOURCES = {
  draft: "draft service",
  lookup: "prompt lookup",
  head: "local EAGLE head",
  quantized: "quantized self-draft",
};
const OWN = ["lookup", "head", "quantized"]; // of the target process: self-speculation

export const MODES = {
  auto: { title: "automatic", sources: Object.keys(SOURCES), speculation: {} },
  draft: { title: "draft service", sources: ["draft"], speculation: { sources: ["draft"] } },
  self: { title: "self-speculation", sources: OWN, speculation: { sources: OWN } },
  off: { title: "off", sources: [], speculation: { enabled: false } },
};

// The modes of each choice of the page. The draft service comes first: it may learn from the answers of the others.
export const CHOICES = { compare: ["draft", "self", "off"], auto: ["auto"], draft: ["draft"], self: ["self"], off: ["off"] };

// What drafts in a mode, in words. running: titles by the names of the sources that run; null if that is unknown.
export function describe(mode, running) {
  const { sources } = MODES[mode];
  if (!sources.length) return "plain decoding";
  if (!running) return "";
  const found = sources.filter((name) => running.has(name)).map((name) => running.get(name));
  return found.length ? found.join(", ") : "not running, so decoding is plain";
}
