// The page's pure modules under node. test_pure_modules.py runs it, with the files as they are served: terms.js is made.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as api from "../../dashboards/ui/api.js";
import { Connection, getJson, merge } from "../../dashboards/ui/connection.js";
import * as talk from "../../dashboards/ui/conversation.js";
import * as decision from "../../dashboards/ui/decision.js";
import { worstFirst } from "../../dashboards/ui/fleet.js";
import * as format from "../../dashboards/ui/format.js";
import * as painted from "../../dashboards/ui/painted.js";
import { isStuck, matches, ordered, scaleOf } from "../../dashboards/ui/requests.js";
import * as river from "../../dashboards/ui/river_layout.js";
import { paintRiver } from "../../dashboards/ui/river_paint.js";
import { tenantsOf } from "../../dashboards/ui/tenants.js";
import { sparkOf } from "../../dashboards/ui/tiles.js";

const answer = (changes) => ({
  time: 10, version: 1, whole: false, links: [], replicas: [], requests: [], history: { names: ["a", "b"], step_s: 1, points: [] }, ...changes,
});
const row = (rid, time, outcome = "ok") => ({ rid, time, outcome });

test("rows that changed replace those with their id, and the newest stands first", () => {
  const before = merge(null, answer({ whole: true, requests: [row("a", 1), row("b", 2, "running"), row("c", 3)] }));
  const after = merge(before, answer({ version: 2, requests: [row("b", 2), row("d", 2.5)] }));
  assert.deepEqual(after.requests.map((each) => each.rid), ["c", "d", "b", "a"]);
  assert.equal(after.requests[2].outcome, "ok");
  assert.deepEqual(before.requests.map((each) => each.outcome), ["ok", "running", "ok"], "the state before is as it was");
});

test("what did not change keeps its identity, so that it is not drawn again", () => {
  const replicas = () => [{ id: "a", running: 1, pools: [{ free: 2 }] }, { id: "b", running: 1 }];
  const before = merge(null, answer({ whole: true, links: [{ from: "a" }], replicas: replicas(), requests: [row("a", 1)] }));
  const [first, second] = replicas();
  const after = merge(before, answer({ version: 2, links: [{ from: "a" }], replicas: [first, { ...second, running: 2 }] }));
  assert.equal(after.replicas[0], before.replicas[0]);
  assert.notEqual(after.replicas[1], before.replicas[1]);
  assert.equal(after.requests, before.requests);
  assert.equal(after.links, before.links);
  assert.equal(after.history, before.history);
  assert.equal(merge(after, answer({ version: 2, replicas: [] })), after, "the same version changes nothing");
});

test("tenants are counted by what their requests took that are open or ended in the last minute, those that are too many as one", () => {
  const of = (tenant, changes) => ({ tenant, time: 95, outcome: "ok", prompt_tokens: 100, cached_tokens: 60, output_tokens: 10, ttft_s: 1, ...changes });
  const rows = tenantsOf([
    of("a", { time: 20, total_s: 25 }), of("a", { time: 30, total_s: 9 }), of("a", { time: 20, outcome: "running" }), of("b", { outcome: "running", ttft_s: null, cached_tokens: null, output_tokens: 0 }),
    of(null), ...Array.from({ length: 12 }, (_, at) => of(`t${at}`, { output_tokens: 1 })),
  ], 100);
  assert.deepEqual(rows[0], { tenant: "a", waiting: 0, running: 1, tokens: 100, share: 100 / 592 });
  assert.equal(rows.length, 13);
  assert.deepEqual(rows.find((each) => each.tenant === "2 others"), { tenant: "2 others", waiting: 1, running: 0, tokens: 41, share: 41 / 592 });
  assert.deepEqual(tenantsOf([of(null)], 100), []);
  assert.deepEqual(tenantsOf([of("__proto__"), of("constructor")], 100).map((each) => [each.tenant, each.tokens]), [["__proto__", 50], ["constructor", 50]]);
});

test("a whole answer drops what was kept", () => {
  const before = merge(null, answer({ whole: true, requests: [row("a", 1)], history: { names: ["a"], points: [[9, 1]] } }));
  const after = merge(before, answer({ version: 7, whole: true, requests: [row("b", 2)], history: { names: ["a"], points: [[10, 2]] } }));
  assert.deepEqual(after.requests.map((each) => each.rid), ["b"]);
  assert.deepEqual(after.history, { times: [10], series: { a: [2] } });
});

test("requests are kept for ten minutes, and 5,000 at most", () => {
  let state = merge(null, answer({ whole: true, time: 1000, requests: [row("old", 390), row("new", 500)] }));
  assert.deepEqual(state.requests.map((each) => each.rid), ["new"]);
  const many = Array.from({ length: 6000 }, (_, at) => row(`r${at}`, 1000 + at / 100));
  state = merge(state, answer({ version: 2, time: 1060, requests: many }));
  assert.deepEqual([state.requests.length, state.requests[0].rid], [5000, "r5999"]);
});

test("history holds 300 s by series, with gaps for a series that has just come", () => {
  const history = (points, names = ["a", "b"]) => ({ names, step_s: 1, points });
  let state = merge(null, answer({ whole: true, history: history([[1, 0.1], [2, 0.2]], ["a"]) }));
  state = merge(state, answer({ version: 2, history: history([[301, 0.3, 7]]) }));
  assert.deepEqual(state.history, { times: [2, 301], series: { a: [0.2, 0.3], b: [null, 7] } });
  state = merge(state, answer({ version: 3, history: history([[100, 0.4, 8]]) }));
  assert.deepEqual(state.history, { times: [100], series: { a: [0.4], b: [8] } }, "after a clock that went back it begins anew");
});

test("numbers read as people write them", () => {
  assert.equal(format.count(9999), "9,999");
  assert.equal(format.count(65536), "65.5k");
  assert.equal(format.count(4000000), "4.0M");
  assert.equal(format.seconds(0.0123), "12.3 ms");
  assert.equal(format.seconds(0.9999), "1.00 s");
  assert.equal(format.seconds(600), "10 min");
  assert.equal(format.millis(0.0042), "4.2");
  assert.equal(format.millis(1.2304), "1,230");
  assert.equal(format.percent(0.415), "42 %");
  assert.equal(format.bytes(41e6), "41 MB");
  assert.equal(format.rate(0.04), "0.04");
  for (const each of ["count", "seconds", "millis", "percent", "bytes", "rate"]) assert.equal(format[each](null), "–");
});

test("long ids are shortened", () => {
  assert.equal(format.shortId("ModelReplica#a1b2c3d4"), "a1b2c3d4");
  assert.equal(format.shortId("prefill-a1"), "prefill-a1");
  format.takeNames([{ id: "ModelReplica#named", name: "replica 3" }]);
  assert.deepEqual([format.nameOf("ModelReplica#named"), format.nameOf("ModelReplica#a1b2c3d4")], ["replica 3", "a1b2c3d4"]);
  assert.equal(format.shortId("0123456789abcdef0123456789abcdef"), "012345…abcdef");
});

test("an observatory that has started anew numbers replicas anew", () => {
  const names = () => ["R#old", "R#new"].map(format.nameOf);
  format.takeNames([{ id: "R#old", name: "replica 1" }], true);
  format.takeNames([{ id: "R#new", name: "replica 2" }], false);
  assert.deepEqual(names(), ["replica 1", "replica 2"], "one that has left is still told of");
  format.takeNames([{ id: "R#new", name: "replica 1" }], true);
  assert.deepEqual(names(), ["old", "replica 1"]);
});

test("replicas in trouble come first, and the order does not follow the load", () => {
  const all = [["e", "accepting"], ["d", "starting"], ["c", "draining"], ["b", "unhealthy"], ["a", "accepting", 9]]
    .map(([id, state, report_age_s = 0]) => ({ id, state, report_age_s, node: "n", running: id.charCodeAt(0) }));
  assert.deepEqual(worstFirst(all).map((each) => each.id), ["b", "a", "c", "d", "e"]);
  const on = (id, node, state = "accepting") => ({ id, node, state });
  assert.deepEqual(worstFirst([on("x", "n"), on("y", "m"), on("z", "n")]).map((each) => each.id), ["x", "y", "z"], "as they come");
});

test("requests are found by words, outcome, replica and kind, all at once", () => {
  const one = { rid: "req-7", outcome: "ok", replica: "R#x", prefill: "P#y", endpoint: "chat", tries: 2, missed: ["itl"], cached_tokens: 16, predicted_tokens: 32 };
  for (const filter of [{}, { text: "REQ-7 chat" }, { outcome: "ok", replica: "P#y" }, { kinds: ["slow", "retried", "mispredicted"] }])
    assert.ok(matches(one, filter), JSON.stringify(filter));
  for (const filter of [{ text: "req-7 embeddings" }, { outcome: "error" }, { replica: "R#z" }]) assert.ok(!matches(one, filter), JSON.stringify(filter));
  format.takeNames([{ id: "R#x", name: "decode 10" }, { id: "P#y", name: "prefill 1" }], true);
  for (const text of ["decode 10", "Prefill 1 ok", "prefill", "open req-7"]) assert.ok(matches({ ...one, outcome: text.startsWith("open") ? "running" : "ok" }, { text }), text);
  for (const text of ["decode 1", "prefill 7", "open"]) assert.ok(!matches(one, { text }), text);
  assert.ok(!matches({ ...one, missed: [], tries: 1 }, { kinds: ["slow"] }));
  assert.ok(!matches({ ...one, cached_tokens: null }, { kinds: ["mispredicted"] }), "not known yet is not missed");
});

test("requests are ordered by a column, those without a value last, and by time as they are", () => {
  const rows = [["d", null, 0.2, null], ["c", 100, null, 50], ["b", 300, 0.1, 30], ["a", 200, 0.3, 200]]
    .map(([rid, prompt_tokens, ttft_s, cached_tokens], at) => ({ rid, time: 9 - at, prompt_tokens, ttft_s, cached_tokens }));
  const names = (...order) => ordered(rows, order).map((each) => each.rid).join("");
  assert.deepEqual([names("time", -1), names("time", 1), names("prompt", -1), names("prompt", 1), names("TTFT", -1), names("TTFT", 1), names("cached", -1)],
    ["dcba", "abcd", "bacd", "cabd", "adbc", "bdac", "acbd"]);
  assert.equal(rows[0].rid, "d", "what is held is not changed");
  format.takeNames([2, 10, 1].map((number) => ({ id: `R#${number}`, name: `replica ${number}` })), true);
  const replicas = [2, 10, 1].map((number) => ({ replica: `R#${number}` }));
  assert.deepEqual([1, -1].map((sign) => ordered(replicas, ["replica", sign]).map((each) => each.replica.slice(2)).join(" ")), ["1 2 10", "10 2 1"]);
});

test("a request is stuck when its last token is old beside its own gaps, never when it is quick or over", () => {
  const runs = { outcome: "running", time: 100, last_s: 3, itl_s: 0.1 };
  for (const [row, now, stuck] of [[runs, 104, false], [runs, 105.1, true], [{ ...runs, itl_s: 4 }, 110, false], [{ ...runs, itl_s: 4 }, 124, true],
    [{ ...runs, last_s: null }, 999, false], [{ ...runs, outcome: "ok" }, 999, false]])
    assert.equal(isStuck(row, now), stuck, JSON.stringify([row, now]));
  assert.ok(matches(runs, { kinds: ["stuck"] }, 106) && !matches(runs, { kinds: ["stuck"] }, 104));
});

test("one very long request does not make the bars of all others thin", () => {
  const rows = [60, ...Array(39).fill(1)].map((total_s) => ({ total_s, outcome: "ok" }));
  assert.equal(scaleOf(rows, 0), 1);
  assert.equal(scaleOf([{ total_s: null, outcome: "running", time: 10 }], 13), 3);
});

test("a sparkline has gaps where nothing was measured, and its objective only where that is near", () => {
  const given = { times: [1, 299, 300, 301], points: [0.5, 1, null, 2], time: 301, highest: 2 };
  const { line, level } = sparkOf({ ...given, objective: 1.5 });
  assert.equal(line, "M0.0 27.6L298.0 20.2M300.0 5.4h1");
  assert.ok(level > 5 && level < 20);
  assert.equal(sparkOf({ ...given, objective: 50 }).level, null);
});

test("lengths of time and plurals read as people write them", () => {
  assert.deepEqual([59, 61, 3700, 90000].map(format.span), ["59 s", "1 min", "1 h 1 min", "1 d 1 h"]);
  assert.deepEqual([format.plural(1, "node"), format.plural(0, "node")], ["1 node", "0 nodes"]);
  assert.deepEqual([0.004, 0.42, 0].map(format.share), ["0.4 %", "42 %", "0 %"]);
});

const running = { outcome: "running", time: 100, ttft_s: null, stages: { route_s: 0.5, queue_s: 0, prefill_s: 0, transfer_s: 0, decode_s: 0 } };

test("the stage that a running request is in goes on until now", () => {
  assert.deepEqual(river.stagesAt(running, 103), [["route", 0, 0.5], ["queue", 0.5, 3]]);
  const begun = { ...running, ttft_s: 2, stages: { ...running.stages, prefill_s: 1.5 } };
  assert.deepEqual(river.stagesAt(begun, 103), [["route", 0, 0.5], ["prefill", 0.5, 2], ["decode", 2, 3]]);
  assert.deepEqual(river.stagesAt({ ...begun, outcome: "ok" }, 103), [["route", 0, 0.5], ["prefill", 0.5, 2]]);
});

test("a replica fetches before it computes, and hands over after", () => {
  const row = { ...running, ttft_s: 2, stages: { ...running.stages, prefill_s: 1, transfer_s: 0.5 } };
  const names = (prefill) => river.stagesAt({ ...row, prefill }, 2).map(([name]) => name);
  assert.deepEqual([names(null), names("p0")], [["route", "transfer", "prefill"], ["route", "prefill", "transfer"]]);
});

const ended = (rid, time, long, more = {}) => ({
  rid, time, replica: "a", prefill: null, outcome: "ok", ttft_s: long / 2, total_s: long, prompt_tokens: 10, cached_tokens: 5,
  stages: { route_s: 0, queue_s: 0, prefill_s: long / 2, transfer_s: 0, decode_s: long / 2 },
  tries_at: [{ replica: "a", prefill: null, start_s: 0, end_s: long, failure: null }], ...more });
const replicas = (...ids) => ids.map((id) => ({ id, role: "unified", state: "accepting" }));
const slots = (layout) => Object.fromEntries([...layout.requests].map(([rid, { pieces }]) => [rid, pieces.map((each) => each.slot)]));

test("requests at the same time have rows of their own, and a row that is free is used again", () => {
  const layout = new river.Layout();
  const rows = [ended("a", 100, 5), ended("b", 101, 1), ended("c", 103, 9), ended("d", 104, 1)];
  layout.take({ time: 110, replicas: replicas("a"), requests: rows.toReversed() });
  layout.check();
  assert.deepEqual(slots(layout), { a: [0], b: [1], c: [1], d: [2] });
  assert.deepEqual(layout.view(100, 110).rows, [4]);
  assert.deepEqual(layout.view(120, 130).rows, [0], "a lane without a request needs none");
});

test("a request keeps its row when it ends, and another may have it from then on", () => {
  const layout = new river.Layout();
  const runs = (rid, time) => ended(rid, time, 1, { outcome: "running", ttft_s: null, total_s: null, tries_at: [{ replica: "a", prefill: null, start_s: 0, end_s: null, failure: null }] });
  const [a, b] = [runs("a", 100), runs("b", 101)];
  layout.take({ time: 102, replicas: replicas("a"), requests: [b, a] });
  assert.deepEqual(slots(layout), { a: [0], b: [1] });
  layout.take({ time: 105, replicas: replicas("a"), requests: [ended("c", 103, 1), b, ended("a", 100, 2.5)] });
  layout.check();
  assert.deepEqual(slots(layout), { b: [1], a: [0], c: [0] });
  layout.take({ time: 106, replicas: replicas("a"), requests: [ended("d", 105, 1)] }); // the rest is no longer kept
  layout.check();
  assert.deepEqual(slots(layout), { d: [0] });
});

test("a request whose replica dies goes on in another lane, and the lane ends in red when it was lost", () => {
  const layout = new river.Layout();
  const tries = [{ replica: "a", prefill: null, start_s: 0, end_s: 2, failure: "ReplicaGone: a died" }, { replica: "b", prefill: null, start_s: 2.5, end_s: 4, failure: null }];
  const first = { ...ended("x", 100, 4), outcome: "running", total_s: null, tries_at: [{ ...tries[0], end_s: null, failure: null }] };
  layout.take({ time: 101, replicas: replicas("a", "b"), requests: [first] });
  layout.take({ time: 105, replicas: replicas("b"), requests: [ended("x", 100, 4, { tries_at: tries })] });
  layout.check();
  const { pieces } = layout.requests.get("x");
  assert.deepEqual(pieces.map(({ replica, start, end, why }) => [replica, start, end, why]), [["a", 100, 102, "retry"], ["b", 102.5, 104, null]]);
  const [lane] = layout.view(90, 110).lanes;
  assert.deepEqual([lane.id, lane.until, lane.dead], ["a", 102, true]);
  assert.deepEqual(layout.view(104.5, 110).lanes.map((each) => each.id), ["b"], "a lane that ended is shown while its requests are");
});

test("a replica that drained before it left is not shown as lost", () => {
  const layout = new river.Layout();
  layout.take({ time: 100, replicas: replicas("a"), requests: [ended("x", 98, 1)] });
  layout.take({ time: 101, replicas: [{ ...replicas("a")[0], state: "draining" }], requests: [] });
  layout.take({ time: 102, replicas: [], requests: [] });
  assert.deepEqual([layout.lanes.get("a").until, layout.lanes.get("a").dead], [102, false]);
});

test("a prompt that is handed over is in the prefill lane until it is computed", () => {
  const stages = { route_s: 0.1, queue_s: 0.2, prefill_s: 0.7, transfer_s: 0.5, decode_s: 2.5 };
  const tries_at = [{ replica: "d", prefill: "p", start_s: 0.1, end_s: 4, failure: null }];
  const pieces = river.piecesOf(ended("x", 100, 4, { replica: "d", prefill: "p", ttft_s: 1.5, stages, tries_at }));
  assert.deepEqual(pieces.map(({ replica, start, end, why }) => [replica, start, end, why]), [["p", 100, 101, "transfer"], ["d", 101, 104, null]]);
  const waiting = { ...ended("y", 100, 4, { tries_at: [{ ...tries_at[0], end_s: null }] }), outcome: "running", ttft_s: null, total_s: null };
  assert.deepEqual(river.piecesOf(waiting).map(({ replica, end }) => [replica, end]), [["p", Infinity]]);
});

test("pages that a request fetched lead to it from the lane of their replica", () => {
  const fetch = { from: "b", start_s: 0.2, end_s: 0.6 };
  const [piece] = river.piecesOf(ended("x", 100, 4, { tries_at: [{ replica: "a", prefill: null, start_s: 0, end_s: 4, failure: null, fetch }] }));
  assert.deepEqual([piece.replica, piece.fetch], ["a", { from: "b", start: 100.2, end: 100.6 }]);
});

test("many replicas: those in trouble and those with requests are shown", () => {
  const layout = new river.Layout();
  const many = replicas(...Array.from({ length: 100 }, (_, at) => `r${String(at).padStart(3, "0")}`));
  many[90].state = "unhealthy";
  layout.take({ time: 100, replicas: many, requests: [ended("x", 98, 1, { tries_at: [{ replica: "r077", prefill: null, start_s: 0, end_s: 1, failure: null }] })] });
  assert.deepEqual(layout.view(90, 100, 3).lanes.map((each) => each.id), ["r000", "r077", "r090"]);
  const kept = new Set(["r055"]);
  assert.deepEqual(layout.view(90, 100, 3, kept).lanes.map((each) => each.id), ["r055", "r077", "r090"], "those shown before stay");
  layout.take({ time: 101, replicas: [...replicas("new"), ...many], requests: [] });
  assert.equal(layout.view(90, 101).lanes.at(-1).id, "new", "a new one pushes none aside");
});

test("a stage narrower than a pixel is not painted where the next one covers it", () => {
  globalThis.Path2D = class {};
  const layout = new river.Layout();
  const stages = { route_s: 0.001, queue_s: 0.002, prefill_s: 0.997, transfer_s: 0, decode_s: 1 };
  layout.take({ time: 110, replicas: replicas("a"), requests: [ended("x", 100, 2, { stages })] });
  const seen = (scale) => {
    const view = Object.assign(layout.view(99, 103), { from: 99, until: 103, scale, tops: [0], heights: [76], places: new Map([["a", 0]]), objectives: {} });
    const styles = new Set();
    const paint = { fillRect() { styles.add(this.fillStyle); }, fillText() {}, stroke() {}, fill() {} };
    paintRiver(paint, view, Object.fromEntries(river.STAGES.map((name) => [name, name])), () => []);
    return river.STAGES.filter((name) => styles.has(name));
  };
  assert.deepEqual(seen(15), ["prefill", "decode"]);
  assert.deepEqual(seen(10000), ["route", "queue", "prefill", "decode"]);
});

test("lanes share the height by their rows, and those without a request are low", () => {
  assert.deepEqual(river.laneHeights([0, 0]), [22, 22], "the river folds when it is idle");
  assert.deepEqual(river.laneHeights([4, 4]), [76, 76]);
  assert.deepEqual(river.laneHeights([16, 8]), [138, 69], "of 208 px");
  assert.deepEqual(river.laneHeights([32, 0]), [186, 22]);
  assert.equal(river.laneHeights(Array(48).fill(4)).reduce((sum, each) => sum + each), 480);
});

test("an objective is missed from a moment on: at the first token that is late, and while tokens come slowly", () => {
  const objectives = { ttft: 2, itl: 0.1 };
  const one = { time: 100, outcome: "ok", ttft_s: 3, total_s: 9, missed: ["ttft", "itl"] };
  assert.deepEqual(river.missesOf(one, objectives, 200), [[2, 3], [3, 9]]);
  assert.deepEqual(river.missesOf({ ...one, missed: [] }, objectives, 200), []);
  assert.deepEqual(river.missesOf(one, {}, 200), [], "no objective is known");
  const waits = { ...one, outcome: "running", ttft_s: null, total_s: null, missed: [] };
  assert.deepEqual(river.missesOf(waits, objectives, 101.5), []);
  assert.deepEqual(river.missesOf(waits, objectives, 105), [[2, 5]], "late, though nobody has judged it yet");
  const layout = new river.Layout();
  layout.take({ time: 110, replicas: replicas("a"), requests: [ended("x", 100.5, 9, { ttft_s: 3, missed: ["ttft"] })] });
  assert.deepEqual(layout.arrivals(100, 1, 4, objectives, 110), [[1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0]]);
});

test("lanes may be of sessions: a request is one piece, and a lane goes with its last request", () => {
  const layout = new river.Layout(river.GROUPS.session);
  const of = (rid, time, session) => ended(rid, time, 2, { session });
  layout.take({ time: 110, replicas: replicas("a"), requests: [of("z", 101, null), of("y", 101, "s1"), of("x", 100, "s1")] });
  layout.check();
  assert.deepEqual(layout.view(90, 110).lanes.map((each) => each.id), ["s1", "no session"]);
  assert.deepEqual(slots(layout), { x: [0], y: [1], z: [0] });
  assert.deepEqual(layout.view(104, 110).lanes, [], "only those with requests");
  layout.take({ time: 800, replicas: replicas("a"), requests: [of("w", 799, "s2")] });
  assert.deepEqual([...layout.lanes.keys()], ["s2"]);
});

test("arrow keys go from request to request and from lane to lane", () => {
  const layout = new river.Layout();
  const on = (rid, time, replica) => ended(rid, time, 1, { tries_at: [{ replica, prefill: null, start_s: 0, end_s: 1, failure: null }] });
  layout.take({ time: 110, replicas: replicas("a", "b", "c"), requests: [on("z", 108, "c"), on("y", 104, "a"), on("x", 100, "a")] });
  const view = layout.view(90, 110);
  const at = (rid) => view.pieces.find((each) => each.rid === rid);
  assert.equal(river.neighbour(view, at("x"), "ArrowRight").rid, "y");
  assert.equal(river.neighbour(view, at("x"), "ArrowLeft"), null);
  assert.equal(river.neighbour(view, at("y"), "ArrowDown").rid, "z", "an empty lane is passed over");
  assert.equal(river.pieceAt(view.pieces, "a", 104.5, 0, 0.1).rid, "y");
  assert.equal(river.pieceAt(view.pieces, "a", 106, 0, 0.1), null);
});

test("a time range stays within what is known", () => {
  assert.deepEqual(river.clamped({ from: 5, to: 25 }, 10, 100), { from: 10, to: 30 });
  assert.deepEqual(river.clamped({ from: 90, to: 110 }, 10, 100), { from: 80, to: 100 });
  assert.deepEqual(river.clamped({ from: 0, to: 900 }, 10, 100), { from: 10, to: 100 });
  assert.deepEqual(river.ticks(100.5, 121, 20).times, [105, 110, 115, 120]);
});

test("a prompt is cut at its pages and where what was reused ends", () => {
  const texts = ["a", "b", "c", "d", "e", "f", "g"];
  const cut = (cached) => painted.pieces(texts, 3, cached).map(({ page, kind, text }) => `${page} ${kind} ${text}`);
  assert.deepEqual(cut({ device: 2, host: 1, store: 2 }), ["0 device ab", "0 host c", "1 store de", "1 computed f", "2 computed g"]);
  assert.deepEqual(cut(null), ["0 unknown abc", "1 unknown def", "2 unknown g"]);
  assert.deepEqual(painted.pieces(4, 3, { device: 4, host: 0, store: 0 }).map((each) => each.to), [3, 4], "a number of tokens without texts");
  assert.equal(painted.summary(painted.pieces(texts, 3, { device: 3, host: 0, store: 0 }), 3), "3 pages of 3 tokens: 3 tokens reused, 4 tokens computed");
});

test("the route header tells how many tokens came from which tier", () => {
  const route = api.routeOf("replica=M#a; overlap_predicted=64; overlap_actual=48; tiers_actual=16+32+0; policy=estimated_ttft; tries=1");
  assert.deepEqual([route.replica, route.overlap_actual, route.tries], ["M#a", 48, 1]);
  assert.deepEqual(painted.cachedOf(route), { device: 16, host: 32, store: 0 });
  assert.deepEqual(painted.cachedOf(api.routeOf("replica=M#a; overlap_actual=48")), { device: 48, host: 0, store: 0 });
  assert.equal(painted.cachedOf(api.routeOf(null)), null);
});

test("events are read however the stream is cut", () => {
  const split = api.splitter();
  assert.deepEqual([..."data: 1\n\ndata: [DO", 'NE]\n\n: nothing\n\n'].flatMap((part) => split(part)), ["1", "[DONE]"]);
});

test("what came in one event of several tokens is a piece of its own", () => {
  const arrivals = [[900, 0, 1], [950, 2, 1], [990, 4, 3], [999, 9, 2], [1020, 11, 1], [1030, 12, 1]];
  assert.deepEqual(talk.inEvents("abcdefghijklmn", arrivals), [["abcd", 1], ["efghi", 3], ["jk", 2], ["lmn", 1]]);
  assert.deepEqual(talk.inEvents("abc", [[900, 0, 1], [950, 1, 1]]), [["abc", 1]]);
  assert.deepEqual(talk.inEvents("", []), []);
});

test("the mark stands where the next replica's first text begins", () => {
  const tries = [{ replica: "a", start_s: 0, failure: "ReplicaGone: a died" }, { replica: "b", start_s: 1.5, failure: null }];
  const arrivals = [[900, 0], [1400, 5], [2100, 9], [2200, 12]];
  const lost = { from: "a", how: "was lost", to: "b" };
  assert.deepEqual(talk.jumps(arrivals, tries), [{ at: 9, ...lost }]);
  assert.deepEqual(talk.jumps(arrivals.slice(0, 2), tries), [{ at: null, ...lost }], "nothing has come from it yet");
  const failed = (failure) => talk.jumps(arrivals, [{ ...tries[0], prefill: "p", failure }, tries[1]])[0];
  assert.equal(failed("PrefillLost: p died").from, "p");
  assert.equal(failed("Overloaded: the queue is full").how, "refused it", "a full queue is no loss");
  assert.deepEqual(talk.jumps(arrivals, undefined), []);
});

const said = (...turns) => {
  const conversation = new talk.Conversation(() => {});
  conversation.turns = turns.map(([user, status, again = false]) => ({ user, status, again, answer: user.toLowerCase() }));
  return conversation.messages("?").filter(({ role }) => role === "user").map(({ content }) => content).join("");
};

test("a turn counts once, and still when asking it again failed", () => {
  assert.equal(said(["A", "done"], ["A", "done", true], ["B", "stopped"]), "AB?");
  assert.equal(said(["A", "done"], ["A", "failed", true]), "A?");
  assert.equal(said(["A", "done"], ["A", "failed", true], ["A", "done", true]), "A?");
  assert.equal(said(["A", "done"], ["B", "failed"], ["B", "done", true]), "AB?");
});

test("a prompt that was not answered is the draft again, unless another has been typed; the next one takes the notice away", async (t) => {
  Object.assign(globalThis, { requestAnimationFrame: () => 1, sessionStorage: { getItem: () => null } });
  t.mock.method(globalThis, "fetch", async () => new Response("{}", { status: 503 }));
  const conversation = new talk.Conversation(() => {});
  conversation.draft = "first";
  await conversation.send(() => {});
  assert.deepEqual([conversation.draft, conversation.failure, conversation.turns.length], ["first", "the API answered 503", 0]);
  const sent = conversation.send(() => {});
  assert.equal(conversation.failure, null);
  conversation.draft = "second";
  await sent;
  clearTimeout(conversation.timer);
  assert.deepEqual([conversation.draft, conversation.turns.map((turn) => `${turn.user} ${turn.status}`)], ["second", ["first failed"]]);
  delete globalThis.sessionStorage;
});

test("a prompt that was refused may be sent as soon as it is another", () => {
  const conversation = new talk.Conversation(() => {});
  for (const [guess, kept] of [[{ error: "too long", status: 400 }, null], [{ body: {} }, { body: {} }]]) {
    conversation.guess = guess;
    conversation.type("shorter");
    clearTimeout(conversation.timer);
    assert.deepEqual(conversation.guess, kept);
  }
});

test("an answer that breaks off is told, and a state that cannot be drawn does not end the polls", async (t) => {
  const body = t.mock.method(globalThis, "fetch", async () => new Response('{"version": 1, "ti'));
  await assert.rejects(getJson("api/state"), /the answer was cut short/);
  body.mock.mockImplementation(async () => new Response(JSON.stringify({ ...answer({ whole: true }), period_s: 1 })));
  globalThis.document = { hidden: false, addEventListener() {} };
  const connection = new Connection({ onLink() {}, onState() { throw new Error("not drawn"); } });
  await assert.rejects(connection.asking, /not drawn/);
  assert.ok(connection.timer, "the next poll is set");
  clearTimeout(connection.timer);
  delete globalThis.document;
});

test("what the cache saved is what its tokens would have taken to compute, less their loading", () => {
  const candidates = [{ chosen: false, prefill_tokens_per_s: 1 }, { chosen: true, prefill_tokens_per_s: 100 }];
  const made = { predicted: { ttft_s: 0.3, load_s: 0.5 }, actual: { ttft_s: 0.4 }, num_tokens: 250, candidates };
  const usage = { prompt_tokens: 250, completion_tokens: 5 };
  const figures = talk.figuresOf({ arrivals: [[500, 0], [1500, 3]], usage, explained: { tries: [made] }, route: { overlap_actual: 200 } });
  assert.deepEqual(figures, { ttft: 0.4, predicted: 0.3, saved: 1.5, cached: 200, prompt: 250, output: 5, rate: 4 });
});

test("a request is copied as a command that a shell reads as it was", () => {
  const line = api.asCurl("http://h/v1", { messages: [{ role: "user", content: "it's" }] });
  const [, quoted] = line.match(/-d '(.*)'$/s);
  const parts = quoted.split("'\\''");
  assert.ok(parts.every((each) => !each.includes("'")), "no quote ends the argument");
  assert.deepEqual(JSON.parse(parts.join("'")), { messages: [{ role: "user", content: "it's" }] });
  assert.match(api.asPython("http://h/v1", { model: "m", messages: [], max_tokens: 5, stream: true }), /max_tokens=5,\n {4}stream=True,\n\)/);
});

const TERMS = { queue_s: 0, load_s: 0, own_s: 0, decode_s: 0, pressure_s: 0, behind_s: 0 };
const candidate = (replica, terms, cached = 0) => ({ replica, cached_tokens: cached, ...TERMS, ...terms, ttft_s: Object.values({ ...terms, behind_s: 0 }).reduce((a, b) => a + b) });
const decided = (changes) => ({
  replica: "M#5ajczu5z", policy: "estimated_ttft", reason: "soonest_first_token", num_tokens: 277,
  predicted: { cached_tokens: 256, ttft_s: 0.541 }, best_overlap: { replica: "M#5ajczu5z", cached_tokens: 256, given_up: 0 },
  candidates: [candidate("M#ewcd3h4q", { own_s: 1.8, decode_s: 0.03 }), candidate("M#5ajczu5z", { queue_s: 0.4, own_s: 0.141 }, 256)],
  ...changes,
});

test("a decision is one sentence in plain words with round figures", () => {
  assert.equal(decision.verdict(decided()), "Sent to 5ajczu5z: 256 of 277 prompt tokens are cached there, so its first token was expected after 541 ms; ewcd3h4q would have needed 1.83 s.");
  const alone = decided({ reason: "only_candidate", candidates: decided().candidates.slice(1) });
  assert.equal(decision.verdict(alone), "Sent to 5ajczu5z: it was the only replica that could take the request; 256 of 277 prompt tokens are cached there, and its first token was expected after 541 ms.");
  const given = decided({ predicted: { cached_tokens: 0, ttft_s: 0.541 }, best_overlap: { replica: "M#ewcd3h4q", cached_tokens: 160, given_up: 160 } });
  assert.equal(decision.verdict(given), "Sent to 5ajczu5z: nothing of its prompt is cached there, and its first token was expected after 541 ms; ewcd3h4q holds 160 tokens more, but would have needed 1.83 s.");
  assert.match(decision.verdict(decided({ reason: "drawn_at_random", predicted: { cached_tokens: 0, ttft_s: 2.5 } })), /it was drawn at random; .* ewcd3h4q would have needed only 1.83 s\.$/);
  assert.match(decision.verdict(decided({ reason: "a_new_reason" })), /: a new reason; /, "a reason that the page does not know is shown as it is");
});

test("the chosen candidate comes first, then the cheapest, each with what it costs more", () => {
  const third = candidate("M#c", { own_s: 0.5, behind_s: 0.1 });
  const rows = decision.costsOf(decided({ candidates: [...decided().candidates, third] }));
  assert.deepEqual(rows.map(({ one, more }) => [one.replica, Math.round(more * 1e3)]), [["M#5ajczu5z", 0], ["M#c", 59], ["M#ewcd3h4q", 1289]]);
  assert.deepEqual(rows[0].bar, [["queue_s", 0, 0.4], ["own_s", 0.4, 0.541]], "empty parts are left out, the others follow one another");
  assert.deepEqual(rows[1].bar.map(([field]) => field), ["own_s", "behind_s"], "what others pay is compared too");
});

test("with prefill and decode apart, both ways are bars, and the one taken comes first", () => {
  const costs = { replica_id: "d", ttft_s: 0.3, stall_s: 0.9, slower_s: 0.1, transfer_s: 0.01, overhead_s: 0.02, load_s: 0, pressure_s: 0 };
  const pair = { prefill: "p", decode: "d", best_prefill: "p", reason: "kv_transfer_costs_less", why: null, prefill_s: 0.12, decode_replicas: [costs] };
  const ways = decision.waysOf(pair);
  assert.deepEqual(ways.map(({ name, chosen, total, more }) => [name, chosen, total.toFixed(2), more.toFixed(2)]), [["handed over", true, "0.25", "0.00"], ["in one place", false, "1.30", "1.05"]]);
  const local = decision.waysOf({ ...pair, prefill: null, reason: "local_costs_less" });
  assert.deepEqual(local.map(({ name, chosen }) => [name, chosen]), [["in one place", true], ["handed over", false]]);
  assert.equal(decision.waysOf({ ...pair, prefill: null, best_prefill: null }).length, 1, "without a prefill replica there is one way");
  assert.equal(decision.verdict(decided({ pair: { ...pair, decode: "M#5ajczu5z" } })), "Prompt computed on p, answer decoded on 5ajczu5z: handing the prompt over costs less. Its first token was expected after 541 ms.");
});

test("a prediction is held against what came, and an axis has two to five round marks", () => {
  assert.equal(decision.against(1.24, 0.541), "2.3 × slower than predicted");
  assert.equal(decision.against(0.2, 0.5), "2.5 × faster than predicted");
  assert.equal(decision.against(0.5, 0.541), "as predicted");
  assert.equal(decision.against(null, 0.5), "");
  for (const end of [0.0003, 0.19, 0.2, 0.49, 0.96, 1, 1.3, 4.4, 9.99, 77]) {
    const ticks = decision.ticksOf(end);
    assert.ok(ticks.length >= 2 && ticks.length <= 4 && ticks.at(-1) <= end * 1.001, `${end}: ${ticks}`);
  }
  assert.deepEqual(decision.ticksOf(0), []);
});
