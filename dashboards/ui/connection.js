// Brings the state and keeps it up to date.
// Owns:      the event stream, and when to try again. A hidden page has no stream: a browser opens six connections to a
//            server at most, for all its tabs together.
// Never:     draws. `onState(state)` and `onLink(link)` tell what is new; link is
//            { status: "connecting" | "live" | "snapshot" | "lost", since, retryAt, why }.
// Life:      connecting -> live -> lost -> (fetch, with back-off) -> live; hidden -> connecting. A fetch goes before each stream, since a
//            stream does not say why it is refused. 401 leads to the login page.

import { applyDelta } from "./apply_delta.js";

const LONGEST_WAIT_S = 15;
const SILENCE_S = 10; // a live stream brings something every second

export class Connection {
  constructor({ onState, onLink, snapshot }) {
    this.onState = onState;
    this.onLink = onLink;
    this.snapshot = snapshot;
    this.state = null;
    this.failures = 0;
    this.lostSince = null;
    onLink({ status: "connecting" });
    if (!snapshot) document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.open()));
    this.open();
  }

  async open() {
    clearTimeout(this.retry);
    try {
      this.take(await getJson("api/state"));
      this.lostSince = null; // what is shown is new, though the stream may be refused
    } catch (error) {
      this.lose(error.message);
      return;
    }
    if (this.snapshot) this.onLink({ status: "snapshot" });
    else if (!document.hidden) this.listen();
  }

  rest() {
    this.close();
    clearTimeout(this.retry);
    this.onLink({ status: "connecting" }); // what it is when the page is shown again
  }

  close() {
    this.source?.close();
    this.source = null;
    this.isLive = false;
    clearTimeout(this.silence);
  }

  listen() {
    this.source?.close();
    const source = (this.source = new EventSource("api/events"));
    const on = (name, act) =>
      source.addEventListener(name, (event) => {
        if (source !== this.source) return;
        act(JSON.parse(event.data));
        this.alive();
      });
    on("state", (state) => this.take(state));
    on("delta", (delta) => this.take(applyDelta(this.state, delta)));
    source.onerror = () => source === this.source && this.lose("the event stream ended");
    this.watch();
  }

  take(state) {
    if (state === this.state) return;
    this.state = state;
    this.onState(state);
  }

  alive() {
    if (!this.isLive) {
      this.failures = 0;
      this.isLive = true;
      this.onLink({ status: "live" });
    }
    this.watch();
  }

  watch() {
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.lose(`nothing came for ${SILENCE_S} s`), SILENCE_S * 1e3);
  }

  lose(why) {
    this.close();
    const step = this.failures === 0 ? 0.3 : Math.min(LONGEST_WAIT_S, 2 ** (this.failures - 1)); // a stream ends each hour
    const wait = step * (0.8 + 0.4 * Math.random()) * 1e3; // so that viewers do not come all at once
    this.failures += 1;
    this.lostSince ??= Date.now();
    this.onLink({ status: "lost", since: this.lostSince, retryAt: Date.now() + wait, why });
    clearTimeout(this.retry);
    this.retry = setTimeout(() => this.open(), wait);
  }
}

let inFlight = 0;
let waiting = [];

// The JSON at a path relative to the page. 401 leads to the login page; another failure is an Error with `status`.
export async function getJson(path) {
  inFlight += 1;
  try {
    const answer = await fetch(path, { signal: AbortSignal.timeout(10000), cache: "no-store" }).catch(() => {
      throw new Error("no answer");
    });
    if (answer.status === 401) {
      location.assign("login");
      throw new Error("the admin key is asked for");
    }
    const body = await answer.json().catch(() => null);
    if (!answer.ok) throw Object.assign(new Error(body?.error?.message ?? `answer ${answer.status}`), { status: answer.status });
    return body;
  } finally {
    inFlight -= 1;
    setTimeout(settle); // what the answer brings is drawn before
  }
}

// Calls `act` once nothing is being asked for and all has been drawn.
export function onIdle(act) {
  waiting.push(act);
  setTimeout(settle);
}

function settle() {
  if (inFlight > 0) return;
  const acts = waiting;
  waiting = [];
  for (const act of acts) requestAnimationFrame(() => requestAnimationFrame(act));
}
