// What a client's script for Node shares: where the system is, and how a check is told. Node's own modules alone.

import { appendFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname } from "node:path";

export const URL = process.env.URL;
export const TELLER = [{ role: "user", content: "Name a city and its country." }];

// Packages lie in the client's environment, not beside this file, where `import` would look for them.
export const packaged = createRequire(`${dirname(process.env.BIN)}/`);

/** Run a function, and tell what it returned, or how it failed. */
export async function check(name, run) {
  let found, ok = true;
  try {
    found = await run();
  } catch (error) {
    [found, ok] = [`${error.name}: ${error.message}`, false];
  }
  const words = String(found ?? "").split(/\s+/).join(" ").trim().slice(0, 300);
  appendFileSync(process.env.TOLD, JSON.stringify({ check: name, ok, found: words }) + "\n");
}
