// The server-sent events of an answer, as objects.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function messageOf(body, otherwise) {
  return body?.error?.message ?? otherwise;
}

export async function* chunksOf(response) {
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Refused(response.status, messageOf(body, `the gateway answers with ${response.status}`));
  }
  let rest = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader(); // not every browser can iterate over streams
  for (let part; !(part = await reader.read()).done; ) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Refused(200, messageOf(chunk));
      yield chunk;
    }
  }
}
