// Calls of the API of the application that this page watches, at the same origin.
// Owns:  the API key, for this tab only (sessionStorage).
// Never: puts a prompt anywhere but into the body of these calls.

const KEY = "manta-api-key";

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  sessionStorage.setItem(KEY, key.trim());
}

// The answer to a POST of `body`. Throws an Error with `status` and `code` if it is not 2xx, an AbortError if `signal` ends it.
export async function post(path, body, { signal, headers } = {}) {
  const key = apiKey();
  const sent = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }), ...headers };
  const answer = await fetch(path, { method: "POST", headers: sent, body: JSON.stringify(body), signal }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("the API does not answer");
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  const message = told?.error?.message.replace(/^request \S+: /, "").replace(/\.$/, "");
  throw Object.assign(new Error(message ?? `the API answered ${answer.status}`), { status: answer.status, code: told?.error?.code });
}

// The payloads of a stream of server-sent events. Throws the Error that the stream ends with, if it does.
export async function* eventsOf(answer) {
  const split = splitter();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error("the connection to the API was lost");
    });
    if (done) return;
    for (const data of split(value)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// A function that takes the next part of a stream and gives the data of the events that it completes. Pure but for what it holds.
export function splitter() {
  let held = "";
  return (part) => {
    const blocks = (held + part).split("\n\n");
    held = blocks.pop();
    return blocks.map((block) => block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n"))
      .filter(Boolean);
  };
}

// { replica, overlap_actual, ... } of an x-manta-route header, of its first part if there are several.
export function routeOf(header) {
  const parts = (header ?? "").split(", ")[0].split("; ").map((part) => part.split("=")).filter((part) => part.length === 2);
  return Object.fromEntries(parts.map(([name, value]) => [name, /^-?[\d.]+$/.test(value) ? Number(value) : value]));
}

// A request as a command and as a program that anybody can run.
export function asCurl(url, body) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${url}/chat/completions \\\n  -H 'Content-Type: application/json' \\\n${keyed("  -H 'Authorization: Bearer YOUR_KEY' \\\n")}  -d '${quoted}'`;
}

export function asPython(url, { messages, model, ...options }) {
  const given = Object.entries(options).filter(([name]) => !name.startsWith("stream")).map(([name, value]) => `    ${name}=${JSON.stringify(value)},\n`);
  return `from openai import OpenAI

client = OpenAI(base_url=${JSON.stringify(url)}, api_key=${keyed('"YOUR_KEY"') || '"none"'})
stream = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=${JSON.stringify(messages, null, 4).replaceAll("\n", "\n    ")},
${given.join("")}    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function keyed(text) {
  return globalThis.sessionStorage && apiKey() ? text : "";
}
