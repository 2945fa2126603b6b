// The geometry of the request river (river.js): which lane and row each part of a request has, and when.
// Owns:      the lanes, of replicas or of what requests have in common, and the row of each piece; a piece keeps its row
//            for as long as its request is known.
// Never:     draws, or reads a clock. Times are seconds since 1970, or where a name says so from a request's arrival.
// Invariant: no two pieces of one lane and row overlap in time.

export const STAGES = ["route", "queue", "prefill", "transfer", "decode"];
const FETCHING = ["route", "queue", "transfer", "prefill", "decode"]; // on one replica: it fetches, then computes the rest
export const ROW = 18; // px, the highest row
const IDLE = 22; // px, a lane without requests
const ROLES = ["prefill", "decode", "unified"];
const SCALES = [4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256]; // rows a lane: steps, so that heights seldom change
const NOTICED_S = 30; // a replica that is missing and failed a request this shortly before was lost then
const KEPT_S = 660; // a lane after its end
const TICKS_S = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300];

// The stages of a row until `now`: [[name, start, end], ...] in seconds from its arrival, without empty ones. While a
// request runs, the stage that it is in goes on: decode after the first token, before it the queue.
export function stagesAt(row, now) {
  const grows = row.outcome !== "running" ? null : row.ttft_s == null ? "queue" : "decode";
  let at = 0;
  const spans = [];
  for (const name of row.prefill ? STAGES : FETCHING) {
    let end = at + (row.stages?.[`${name}_s`] ?? 0);
    if (name === grows) end = Math.max(end, now - row.time);
    if (end > at) spans.push([name, at, end]);
    at = end;
  }
  return spans;
}

// What a request looks like: a piece for each replica that it was at, in order. A try with a KV transfer that worked has
// two: until the prompt was computed, and from there. `why` says how a piece leads to the next: "transfer" or "retry".
// `moved`: why a request that waited there was given back. `fetch`: of pages that came to it, and from which replica.
// `end` of a piece that goes on is Infinity.
export function piecesOf(row) {
  const { time } = row;
  const told = (row.stages ? Object.values(row.stages) : []).reduce((sum, each) => sum + each, 0);
  const whole = row.outcome === "running" ? Infinity : (row.total_s ?? told);
  const tries = row.tries_at?.length ? row.tries_at : [{ replica: row.replica, prefill: row.prefill, start_s: 0, end_s: null, failure: null }];
  const pieces = [];
  const add = (replica, start, end, why, failure, moved = null) =>
    pieces.push({ rid: row.rid, row, replica, start: time + start, end: time + end, why, failure, moved, slot: -1 });
  tries.forEach((each, index) => {
    const start = index ? each.start_s : 0;
    const end = Math.max(start, each.end_s ?? whole);
    const why = index < tries.length - 1 ? "retry" : null;
    const first = pieces.length;
    const handed = row.stages && row.ttft_s != null ? row.stages.route_s + row.stages.queue_s + row.stages.prefill_s : null;
    const begins = row.ttft_s != null && row.ttft_s >= start && row.ttft_s <= end; // its first token came in this try
    if (each.prefill && begins && handed > start) {
      add(each.prefill, start, Math.min(handed, end), "transfer", null);
      add(each.replica, Math.min(handed, end), end, why, each.failure);
    } else {
      const waits = each.prefill && row.ttft_s == null && (each.failure == null || each.failure.startsWith("PrefillLost"));
      add(waits ? each.prefill : each.replica, start, end, why, each.failure, each.moved);
    }
    if (each.fetch) pieces[first].fetch = { from: each.fetch.from, start: time + each.fetch.start_s, end: time + each.fetch.end_s };
  });
  return pieces;
}

// What lanes may be of instead of replicas; a request is one piece then.
export const GROUPS = {
  session: (row) => row.session ?? "no session",
  "API key": (row) => row.caller ?? "no key",
};

// When a request missed its objectives, in seconds from its arrival: [[from, to], ...]. Pure.
export function missesOf({ time, outcome, missed, ttft_s: first, total_s: total }, { ttft, itl }, now) {
  const [runs, end] = [outcome === "running", total ?? now - time];
  const late = ttft != null && (missed?.includes("ttft") || (runs && first == null)) && (first ?? end) > ttft;
  return [...(late ? [[ttft, first ?? end]] : []), ...(itl != null && missed?.includes("itl") ? [[first ?? 0, end]] : [])];
}

export class Layout {
  constructor(groupOf = null) {
    this.groupOf = groupOf; // row -> its lane, where that is none of a replica
    this.requests = new Map(); // rid -> { row, pieces }
    this.lanes = new Map(); // replica -> { id, role, state, from, until, dead, slots: [the last piece of each row] }
    this.isNew = true;
  }

  // Takes `state` as the page has it; rows that are the same objects as before cost nothing.
  take({ requests, replicas, time }) {
    const news = [];
    for (const row of requests) {
      const known = this.requests.get(row.rid);
      if (known?.row === row) continue;
      const pieces = this.groupOf ? [this.whole(row)] : piecesOf(row);
      for (const [at, piece] of pieces.entries()) if (!this.keeps(known?.pieces[at], piece)) news.push(piece);
      known?.pieces.forEach(leave);
      this.requests.set(row.rid, { row, pieces });
    }
    if (this.requests.size > requests.length) {
      const kept = new Set(requests.map((each) => each.rid));
      for (const [rid, { pieces }] of this.requests) if (!kept.has(rid)) this.requests.delete(rid), pieces.forEach(leave);
    }
    if (!this.groupOf) this.meet(replicas, time);
    news.sort((a, b) => a.start - b.start);
    for (const piece of news) this.place(piece);
    this.isNew = false;
    if (this.groupOf) for (const [id, { slots }] of this.lanes) if (slots.every((each) => each.end === -Infinity)) this.lanes.delete(id);
  }

  // A request as one piece, in the lane of its group.
  whole(row) {
    const end = row.outcome === "running" ? Infinity : row.time + (row.total_s ?? 0);
    return { rid: row.rid, row, replica: this.groupOf(row), start: row.time, end, why: null, failure: null, moved: null, slot: -1 };
  }

  // Gives `piece` the row of `before`, if that is an older form of it.
  keeps(before, piece) {
    if (before?.replica !== piece.replica || before.start !== piece.start || before.end < piece.end) return false;
    const { slots } = this.lanes.get(piece.replica);
    piece.slot = before.slot;
    if (slots[before.slot] === before) slots[before.slot] = piece;
    return true;
  }

  // Puts `piece` into the first row of its lane that is free by then.
  place(piece) {
    const lane = this.lanes.get(piece.replica) ?? this.lane(piece.replica, this.groupOf ? { state: "group", from: -Infinity, until: Infinity } : { from: -Infinity, until: piece.end });
    if (!this.groupOf && !Number.isFinite(lane.seen)) {
      lane.until = Math.max(lane.until, Number.isFinite(piece.end) ? piece.end : piece.start);
      lane.dead ||= piece.failure != null;
    }
    let slot = lane.slots.findIndex((last) => last.end <= piece.start);
    if (slot < 0) slot = lane.slots.length;
    lane.slots[slot] = piece;
    piece.slot = slot;
  }

  lane(id, { role = "unified", state = "gone", from, until }) {
    const lane = { id, role, state, from, until, dead: false, seen: -Infinity, slots: [] };
    this.lanes.set(id, lane);
    return lane;
  }

  // Lanes begin when a replica is first seen and end when it is missing; without a drain before, in red.
  meet(replicas, time) {
    for (const { id, role, state } of replicas) {
      const lane = this.lanes.get(id) ?? this.lane(id, { from: this.isNew ? -Infinity : time });
      Object.assign(lane, { role, state, until: Infinity, seen: time, dead: ["silent", "unhealthy"].includes(state) });
    }
    for (const lane of this.lanes.values()) {
      if (lane.seen === time || lane.until !== Infinity) continue;
      const lost = this.lost(lane.id);
      const fell = time - lost < NOTICED_S;
      lane.until = fell ? lost : time;
      lane.dead = fell || !["draining", "released", "starting"].includes(lane.state);
      lane.state = "gone";
    }
    for (const lane of this.lanes.values()) if (lane.until < time - KEPT_S) this.lanes.delete(lane.id);
  }

  // When the last try that failed on a replica ended; 0: none did.
  lost(replica) {
    let last = 0;
    for (const { pieces } of this.requests.values())
      for (const piece of pieces) if (piece.replica === replica && piece.failure != null) last = Math.max(last, piece.end);
    return last;
  }

  // What is to be seen from `from` to `to`: { lanes, pieces, rows, all }. `lanes` in their order, at most `most`: those
  // in trouble, then those with requests, of these first the ones in `kept`; `all`: how many there are. `pieces` of these;
  // `rows` that each lane needs, in steps, 0 without a request.
  view(from, to, most = Infinity, kept = new Set()) {
    const pieces = [];
    const busy = new Map(); // lane -> rows
    for (const each of this.requests.values())
      for (const piece of each.pieces) {
        if (piece.end < from || piece.start > to) continue;
        pieces.push(piece);
        busy.set(piece.replica, Math.max(busy.get(piece.replica) ?? 0, piece.slot + 1));
      }
    const order = (a, b) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role); // then as they came: a new one pushes none aside
    let lanes = [...this.lanes.values()].filter((lane) => (lane.until === Infinity && !this.groupOf) || busy.has(lane.id));
    const all = lanes.length;
    if (all > most) {
      const weight = ({ id, dead }) => (dead ? 4 : 0) + (busy.has(id) ? 2 : 0) + (kept.has(id) ? 1 : 0);
      lanes = lanes.sort((a, b) => weight(b) - weight(a)).slice(0, most);
    }
    const shown = new Set(lanes.map((lane) => lane.id));
    const sorted = [...this.lanes.values()].filter((lane) => shown.has(lane.id)).sort(order);
    return {
      lanes: sorted,
      pieces: lanes.length < busy.size ? pieces.filter((piece) => shown.has(piece.replica)) : pieces,
      rows: sorted.map(({ id }) => (busy.has(id) ? (SCALES.find((each) => each >= busy.get(id)) ?? busy.get(id)) : 0)),
      all,
    };
  }

  // Requests of each of `count` steps of `step` seconds from `from`: that came, by how they ended, and that began to miss
  // an objective then: [[good, bad, missed], ...].
  arrivals(from, step, count, objectives, now) {
    const counts = Array.from({ length: count }, () => [0, 0, 0]);
    const add = (time, kind) => {
      const bucket = counts[Math.floor((time - from) / step)];
      if (bucket) bucket[kind] += 1;
    };
    for (const { row } of this.requests.values()) {
      add(row.time, isBad(row) ? 1 : 0);
      const [first] = missesOf(row, objectives, now);
      if (first) add(row.time + first[0], 2);
    }
    return counts;
  }

  check() {
    const taken = new Map();
    for (const { pieces } of this.requests.values())
      for (const piece of pieces) {
        const key = `${piece.replica} ${piece.slot}`;
        taken.set(key, [...(taken.get(key) ?? []), piece]);
      }
    for (const [key, each] of taken) {
      each.sort((a, b) => a.start - b.start || a.end - b.end);
      each.forEach((piece, at) => {
        if (at && each[at - 1].end > piece.start) throw new Error(`${key}: ${each[at - 1].rid} overlaps ${piece.rid}`);
      });
    }
  }
}

// A piece that is no longer drawn leaves its row free.
function leave(piece) {
  piece.end = -Infinity;
}

export function isBad(row) {
  return row.outcome === "error" || row.outcome === "timeout" || row.outcome === "shed" || row.outcome === "unknown";
}

// Heights of lanes in px, by the rows that each needs, so that few fill the frame and many fit into it: those without
// requests are low, and the others share the rest by their rows.
export function laneHeights(rows) {
  const each = [[2, 104], [4, 76], [8, 46], [16, 28], [32, 16]].find(([most]) => rows.length <= most)?.[1] ?? 10;
  const low = Math.min(IDLE, each);
  const needed = rows.reduce((sum, own) => sum + own, 0);
  const room = each * rows.length - low * rows.filter((own) => !own).length;
  return rows.map((own) => (own ? Math.max(low, Math.min(ROW * own + 4, Math.floor((room * own) / needed))) : low));
}

// Ticks of a time axis that stand at least `apart` px from each other: [time, ...], and the step.
export function ticks(from, to, pixelsPerSecond, apart = 84) {
  const step = TICKS_S.find((each) => each * pixelsPerSecond >= apart) ?? 600;
  const times = [];
  for (let at = Math.ceil(from / step); at * step <= to; at += 1) times.push(at * step);
  return { step, times };
}

// The piece at a time in a lane; of several rows the one at `row`, else the nearest in time within `reach` seconds.
export function pieceAt(pieces, lane, time, row, reach) {
  let best = null;
  let least = Infinity;
  for (const piece of pieces) {
    if (piece.replica !== lane) continue;
    const aside = Math.max(piece.start - time, time - piece.end, 0);
    const away = aside / reach + Math.abs(piece.slot - row);
    if (aside <= reach && Math.abs(piece.slot - row) < 1.5 && away < least) [best, least] = [piece, away];
  }
  return best;
}

// The request before or after one in time, or at about its time in the lane above or below.
export function neighbour(view, piece, key) {
  const lanes = view.lanes.map((lane) => lane.id);
  const aside = { ArrowLeft: -1, ArrowRight: 1 }[key];
  const along = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (aside) {
    const later = (each) => (each.start - piece.start || (each.rid < piece.rid ? -1 : 1)) * aside;
    return nearest(view.pieces.filter((each) => each.replica === piece.replica && each.rid !== piece.rid && later(each) > 0), piece);
  }
  for (let at = lanes.indexOf(piece.replica) + along; lanes[at]; at += along) {
    const found = nearest(view.pieces.filter((each) => each.replica === lanes[at]), piece);
    if (found) return found;
  }
  return null;
}

function nearest(pieces, to) {
  const away = (each) => Math.abs(each.start - to.start);
  return pieces.reduce((best, each) => (best && away(best) <= away(each) ? best : each), null);
}

// A time range that lies within what is known, at least `least` long.
export function clamped({ from, to }, first, last, least = 0.5) {
  const span = Math.min(Math.max(to - from, least), Math.max(last - first, least));
  const start = Math.min(Math.max(from, first), last - span);
  return { from: start, to: start + span };
}
