// Shared by the clients' scripts for Node: the address of the system, and reports of checks. Uses Node's own modules only.

import { appendFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname } from "node:path";

export const URL = process.env.URL;
export const MESSAGES = [{ role: "user", content: "Name a city and its country." }];

// Packages are in the environment of the client, not beside this file, where `import` would search them.
export const packaged = createRequire(`${dirname(process.env.BIN)}/`);

/** Run a function, and report its result, or its error. */
export async function check(name, run) {
  let found, ok = true;
  try {
    found = await run();
  } catch (error) {
    [found, ok] = [`${error.name}: ${error.message}`, false];
  }
  const words = String(found ?? "").split(/\s+/).join(" ").trim().slice(0, 300);
  appendFileSync(process.env.RESULTS, JSON.stringify({ check: name, ok, found: words }) + "\n");
}
