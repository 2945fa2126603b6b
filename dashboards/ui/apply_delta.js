// The state after a delta. Pure; the forms of both stand in deployments/watch/observatory/README.md.
// What did not change keeps its identity, so that a panel can tell by === whether it must be drawn again.

const WINDOW_S = 300; // what `history` holds
const KEPT_REQUESTS = 50;
const MERGED = new Set(["replicas", "requests", "used"]);

export function applyDelta(state, delta) {
  if (delta.version <= state.version) return state; // overtaken by a whole state
  const after = { ...state };
  for (const [key, value] of Object.entries(delta)) if (!MERGED.has(key)) after[key] = value;
  if (delta.replicas) after.replicas = mergeReplicas(state.replicas, delta.replicas);
  if (delta.requests) after.requests = mergeRequests(state.requests, delta.requests);
  if (delta.used) after.history = appendHistory(state.history, delta.time, delta.used);
  return after;
}

function mergeReplicas(before, changes) {
  const known = new Map(before.map((each) => [each.id, each]));
  for (const [id, change] of Object.entries(changes)) {
    if (change === null) known.delete(id);
    else known.set(id, { ...known.get(id), ...change, id });
  }
  return [...known.values()].sort((a, b) => compare(a.role, b.role) || compare(a.id, b.id));
}

function mergeRequests(before, rows) {
  const known = new Map(before.map((each) => [each.rid, each]));
  for (const row of rows) known.set(row.rid, row);
  return [...known.values()].sort((a, b) => b.time - a.time || compare(a.rid, b.rid)).slice(0, KEPT_REQUESTS); // the newest first
}

function appendHistory(before, time, newest) {
  const wentBack = before.times.at(-1) > time; // the observatory's clock: all begins anew
  const first = wentBack ? -1 : before.times.findIndex((each) => time - each < WINDOW_S);
  const dropped = first < 0 ? before.times.length : first;
  const times = [...before.times.slice(dropped), time];
  const used = {};
  for (const id of new Set([...Object.keys(before.used), ...Object.keys(newest)])) {
    const line = before.used[id] ?? before.times.map(() => null); // a replica that has just come
    const points = [...line.slice(dropped), newest[id] ?? null];
    if (points.some((each) => each !== null)) used[id] = points; // else it left long ago
  }
  return { times, used };
}

function compare(a, b) {
  return a < b ? -1 : a > b ? 1 : 0;
}
