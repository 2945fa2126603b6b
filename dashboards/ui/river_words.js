// What the request river (river.js) says in words: of the last minute, a lane, a request.

import { count, nameOf, outcomeWord, seconds } from "./format.js";
import { isBad, stagesAt } from "./river_layout.js";

export function noteOf({ id, state, dead }, running) {
  if (state === "gone") return dead ? "lost" : "left";
  return state === "accepting" ? `${count(running.get(id))} running` : state;
}

// The last minute in words.
export function summary({ requests, time }, lanes) {
  const since = requests.filter((each) => each.time > time - 60);
  if (since.length === 0) return "no request in the last minute";
  const open = requests.filter((each) => each.outcome === "running").length;
  const moved = since.filter((each) => each.tries > 1).length;
  const failed = since.filter(isBad).length;
  const lost = lanes.filter((each) => each.state === "gone" && each.dead).length;
  return [`last minute: ${count(since.length)} ${since.length === 1 ? "request" : "requests"}`, `${count(open)} open`,
    moved && `${count(moved)} went on with another replica`, failed && `${count(failed)} failed`,
    lost && `${count(lost)} ${lost === 1 ? "replica" : "replicas"} lost`].filter(Boolean).join(", ");
}

export function describe({ row, replica: lane, failure, moved }, now, grouped) {
  const replica = grouped ? row.replica : lane;
  const stages = stagesAt(row, now).filter(([, start, end]) => end - start >= 0.0005);
  return [
    `${row.rid}: ${outcomeWord(row.outcome)}${row.missed?.length ? `, missed ${row.missed.join(" and ").toUpperCase()}` : ""}`,
    failure == null ? `${replica && nameOf(replica)}${row.tries > 1 ? `, ${row.tries} tries` : ""}${moved ? `, where it waited until it moved (${moved})` : ""}` : `${nameOf(replica)} failed: ${failure}`,
    `${count(row.cached_tokens)} of ${count(row.prompt_tokens)} prompt tokens cached, ${count(row.output_tokens)} made`,
    `TTFT ${seconds(row.ttft_s)}${row.total_s == null ? "" : `, ${seconds(row.total_s)} in all`}`,
    stages.map(([name, start, end]) => `${name} ${seconds(end - start)}`).join(", "),
  ];
}
