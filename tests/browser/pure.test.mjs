// The page's pure modules under node: `node --test tests/browser/`. pytest runs it too (test_pure_modules.py).

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import { applyDelta } from "../../dashboards/ui/apply_delta.js";
import * as format from "../../dashboards/ui/format.js";

const cases = JSON.parse(readFileSync(new URL("delta_cases.json", import.meta.url)));

for (const each of cases)
  test(`a delta: ${each.name}`, () => {
    const before = structuredClone(each.before);
    assert.deepEqual(applyDelta(before, each.delta), each.after);
    assert.deepEqual(before, each.before, "the state before is left as it was");
  });

test("what did not change keeps its identity, so that it is not drawn again", () => {
  const [{ before, delta }] = cases;
  const after = applyDelta(before, { time: 11, version: 2, used: {}, replicas: { a: { running: 3 } } });
  assert.equal(after.replicas[1], before.replicas[1]);
  assert.equal(after.requests, before.requests);
  assert.notEqual(applyDelta(before, delta).replicas[0], before.replicas[0]);
});

test("a delta that a whole state has overtaken changes nothing", () => {
  const state = { ...cases[0].before, version: 5 };
  assert.equal(applyDelta(state, cases[0].delta), state);
});

test("at most 50 requests are kept, the latest", () => {
  const rows = Array.from({ length: 60 }, (_, index) => ({ rid: `r${index}`, time: index }));
  const state = { version: 1, replicas: [], requests: rows.slice(0, 50), history: { times: [], used: {} } };
  const after = applyDelta(state, { version: 2, time: 60, used: {}, requests: rows.slice(50) });
  assert.deepEqual(after.requests.map((each) => each.time), rows.slice(10).map((each) => each.time).reverse());
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
  assert.equal(format.shortId("0123456789abcdef0123456789abcdef"), "012345…abcdef");
});
