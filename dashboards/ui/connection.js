// Asks the observatory for its state once a second, and keeps what it sent.
// Owns:      the polls, what is kept of their answers (`merge`), and when to try again. A hidden page asks nothing.
// Never:     draws. `onState(state)` and `onLink(link)` tell what is new; link is
//            { status: "connecting" | "live" | "snapshot" | "lost", since, retryAt, why }.
// Life:      connecting -> live -> lost -> (with back-off) -> live; hidden -> connecting. 401 leads to the login page.

const LONGEST_WAIT_S = 15;
const PATIENCE_S = 10; // for an answer
const LATE_S = 4; // for what changed: a proxy may hold a poll while the observatory is started again
const KEPT_S = 600; // requests
const MOST_REQUESTS = 5000;
const HISTORY_S = 300;
const MERGED = new Set(["replicas", "requests", "history"]);

export class Connection {
  constructor({ onState, onLink, snapshot }) {
    this.onState = onState;
    this.onLink = onLink;
    this.snapshot = snapshot;
    this.state = null;
    this.status = null;
    this.failures = 0;
    this.lostSince = null;
    this.tell({ status: "connecting" });
    if (!snapshot) document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.open()));
    this.open();
  }

  // Asks now, and from then on once a period.
  open() {
    clearTimeout(this.timer);
    return (this.asking ??= this.ask().finally(() => (this.asking = null)));
  }

  async ask() {
    const started = performance.now();
    try {
      this.state = merge(this.state, await getJson(`api/state?since=${this.state?.version ?? 0}`, this.state ? LATE_S : PATIENCE_S));
    } catch (error) {
      if (!document.hidden) this.lose(error.message);
      return;
    }
    this.failures = 0;
    this.lostSince = null;
    this.tell({ status: this.snapshot ? "snapshot" : document.hidden ? "connecting" : "live" });
    if (!this.snapshot && !document.hidden) this.again(this.state.period_s * 1e3 - (performance.now() - started));
    this.onState(this.state); // last: a state that cannot be drawn does not end the polls
  }

  rest() {
    clearTimeout(this.timer);
    this.tell({ status: "connecting" }); // what it is when the page is shown again
  }

  lose(why) {
    const step = this.failures === 0 ? 0.5 : Math.min(LONGEST_WAIT_S, 2 ** (this.failures - 1));
    const wait = step * (0.8 + 0.4 * Math.random()) * 1e3; // so that viewers do not come all at once
    this.failures += 1;
    this.lostSince ??= Date.now();
    this.tell({ status: "lost", since: this.lostSince, retryAt: Date.now() + wait, why });
    this.again(wait);
  }

  again(wait) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), Math.max(wait, 50));
  }

  tell(link) {
    if (link.status === this.status && link.status !== "lost") return;
    this.status = link.status;
    this.onLink(link);
  }
}

// The state after an answer to `since=` its version: requests newest first, and history by series. Pure. What did not
// change keeps its identity, so that a panel can tell by === whether it must be drawn again.
export function merge(before, answer) {
  const known = answer.whole ? null : before;
  if (known && answer.version === known.version) return known;
  const state = { ...answer };
  for (const key of Object.keys(known ?? {})) if (!MERGED.has(key) && same(known[key], state[key])) state[key] = known[key];
  state.replicas = mergeReplicas(known?.replicas ?? [], answer.replicas);
  state.requests = mergeRequests(known?.requests ?? [], answer.requests, answer.time);
  state.history = mergeHistory(known?.history, answer.history);
  return state;
}

function mergeReplicas(before, rows) {
  const known = new Map(before.map((each) => [each.id, each]));
  return rows.map((row) => (same(known.get(row.id), row) ? known.get(row.id) : row));
}

function mergeRequests(before, rows, time) {
  if (!rows.length && !(before.at(-1)?.time < time - KEPT_S)) return before;
  const changed = new Map(rows.map((row) => [row.rid, row]));
  const rest = before.filter((row) => !changed.has(row.rid));
  const fresh = [...changed.values()].sort((a, b) => b.time - a.time);
  const all = [];
  let at = 0;
  for (const row of fresh) {
    while (at < rest.length && rest[at].time > row.time) all.push(rest[at++]);
    all.push(row);
  }
  while (at < rest.length) all.push(rest[at++]);
  while (all.length > MOST_REQUESTS || all.at(-1)?.time < time - KEPT_S) all.pop();
  return all;
}

function mergeHistory(before, { names, points }) {
  if (before && !points.length) return before;
  const kept = before && before.times.at(-1) < points[0][0] ? before : { times: [], series: {} };
  const newest = points.at(-1)?.[0] ?? 0;
  const from = kept.times.findIndex((time) => newest - time < HISTORY_S);
  const old = from < 0 ? kept.times.length : from;
  const times = [...kept.times.slice(old), ...points.map((point) => point[0])];
  const missing = new Array(kept.times.length).fill(null); // of a series that has just come
  const column = (name, at) => [...(kept.series[name] ?? missing).slice(old), ...points.map((point) => point[at + 1])];
  return { times, series: Object.fromEntries(names.map((name, at) => [name, column(name, at)])) };
}

function same(a, b) {
  return a === b || (typeof a === "object" && typeof b === "object" && JSON.stringify(a) === JSON.stringify(b));
}

let inFlight = 0;
let waiting = [];

// The JSON at a path relative to the page. 401 leads to the login page; another failure is an Error with `status`.
export function getJson(path, patience = PATIENCE_S) {
  return askJson(path, { cache: "no-store" }, patience);
}

// The JSON that a POST of `body` is answered with; failures are those of `getJson`.
export function postJson(path, body = {}) {
  return askJson(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

async function askJson(path, options, patience = PATIENCE_S) {
  inFlight += 1;
  try {
    const answer = await fetch(path, { signal: AbortSignal.timeout(patience * 1e3), ...options }).catch(() => {
      throw new Error("no answer");
    });
    if (answer.status === 401) {
      location.assign("login");
      throw new Error("the admin key is asked for");
    }
    const body = await answer.json().catch(() => null);
    if (!answer.ok) throw Object.assign(new Error(body?.error?.message ?? `answer ${answer.status}`), { status: answer.status });
    if (body === null) throw new Error("the answer was cut short");
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
