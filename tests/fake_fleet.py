"""A fleet that does not exist, in the observatory's JSON forms (its README.md), for tests of the page.

Owns:      one state and its history; `tick` makes the next second of it; `answer` says what changed since a version.
Never:     knows HTTP (fake_observatory.py does), a clock, or a replica.
Invariant: pools sum to their capacity, stages to their total; the same seed gives the same fleet.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Any

from dashboards.alerts import FIGURES, FIRING, PENDING, SERIES
from deployments.watch.observatory.events import Names, short_name
from tests.fake_route import explained

Json = dict[str, Any]
START_S = 1_763_722_000.0
CAPACITY = 65_536  # tokens of a pool
SYSTEMS = ("agent", "code", "rag")
MODEL = "SmolLM2-135M-Instruct"
OBJECTIVES = {"ttft_objective_s": 2.0, "itl_objective_s": 0.1}
HISTORY_S = 300
MOST_ROWS = 1000
ROUTER = "router#5f1d"
BURN: Json = {
    "name": "ItlObjectiveBurn", "severity": "warning", "state": "firing",
    "summary": "45 % of the requests miss the ITL objective of 100 ms.", "runbook": "runbook#itlobjectiveburn",
    "figure": "itl", "replica": None,
}  # fmt: skip
SHED: Json = {
    "name": "RequestsShed", "severity": "warning", "state": "pending",
    "summary": "6 % of the requests are refused: the queues are too long.", "runbook": "runbook#requestsshed",
    "figure": "errors", "replica": None,
}  # fmt: skip
UNHEALTHY: Json = {
    "name": "ReplicaUnhealthy", "severity": "critical", "state": "seen", "runbook": "runbook#replicaunhealthy",
    "figure": None,
}  # fmt: skip
LOG = "{level} 2026-11-23 16:00:{number:02} replica.py:{number} step {number} took 0.021 s, 3 requests ran"
LEVELS = ("INFO",) * 7 + ("WARNING", "ERROR")
STACKS = """Thread 0x00007fd0dd1b86c0 (most recent call first):
  File "replicas/runner/runner.py", line 214 in run
  File "replicas/engine/loop.py", line 97 in _run

Current thread 0x00007fc640d33b80 (most recent call first):
  File "ray/_private/workers/default_worker.py", line 323 in <module>
"""
NODES = ({"node": "e5f60718", "host": "10.0.3.17"}, {"node": "a1b2c3d4", "host": "10.0.3.18"})
BATCH = {"id": "batch_6f1d2c3b4a59", "router": "router_1", "status": "in_progress", "total": 400, "completed": 90,
         "failed": 10, "created_at": START_S - 300, "expires_at": START_S + 86_100}  # fmt: skip
CALLERS = ("3f81c2d0", "3f81c2d0", "9b07aa41")  # hashes of API keys
SILENCE = "it has said nothing for 6.2 s"
CUDA = "CUDA error: an illegal memory access was encountered"


class FakeFleet:
    """``prefill`` replicas compute prompts for ``unified`` that decode; 0: all do everything.

    ``slow``: ITL misses its objective and an alert fires; ``sick``: so many replicas are unhealthy; ``dies_every``:
    seconds between deaths of a replica, each replaced after eight; ``overloaded``: prompts wait for seconds.
    """

    def __init__(
        self,
        *,
        unified: int = 2,
        prefill: int = 0,
        requests_per_tick: int = 1,
        ticks: int = 0,
        slow: bool = False,
        sick: int = 0,
        dies_every: int = 0,
        num_nodes: int = 2,
        overloaded: bool = False,
        tenants: Sequence[str] = (),
    ) -> None:
        self.random = random.Random(7)
        self.tenants = tenants
        self.slow, self.dies_every, self.num_nodes, self.overloaded = slow, dies_every, num_nodes, overloaded
        roles = ["decode"] * unified + ["prefill"] * prefill if prefill else ["unified"] * unified
        ids = [f"ModelReplica#{self.random.getrandbits(32):08x}" for _ in roles]
        self.roles = dict(sorted(zip(ids, roles, strict=True), key=lambda each: (each[1], each[0])))
        self.sick = set(list(self.roles)[len(roles) // 3 :][:sick])
        self.draining: set[str] = set()
        self.silent: set[str] = set()  # as replicas whose process is stopped
        self.names = Names()
        self._past: dict[str, list[list[float | None]]] = {}
        self.requests_per_tick = requests_per_tick
        self.num_requests = 0
        self._open: list[Json] = []  # requests as they will have ended
        self._changed: dict[str, int] = {}  # rid -> version of its last change
        self._points: list[tuple[int, list[float | None]]] = []  # version, point
        self.state: Json = {
            "time": START_S, "version": 1, "period_s": 1.0, "model": MODEL,
            "mode": "disaggregated" if prefill else "unified", "started": START_S - 2520, "api": "/",
            "facts": {"version": "0.1.0", "dtype": "float32", "quantization": None, "context_len": 8192,
                      "page_size": 16, "tp": 1, "device": "cpu", "attention": "cpu", "grafana": "http://grafana:3000/"},
            "keys": {"admin": True},
            "routers": [{"id": ROUTER, "node": "a1b2c3d4", "answering": True, "open": 3}] if roles else [],
            "batches": [BATCH] if tenants else [],
            "replicas": self._replicas(START_S, ()),
            "links": [], "requests": [], "figures": [], "alerts": [],
            "events": [], "ended": [],
            "autoscaling": {"targets": [_target(role, roles.count(role)) for role in sorted(set(roles))], "log": []},
        }  # fmt: skip
        self._measure()
        for _ in range(ticks):
            self.tick()

    def tick(self) -> None:
        """The next second."""
        now = self.state["time"] + 1
        self.state = self.state | {"time": now, "version": self.state["version"] + 1}
        if self.dies_every:
            self._die_and_come(self.state["version"] % self.dies_every)
        self.state["replicas"] = self._replicas(now, self.state["ended"])
        count = self.requests_per_tick if any(self._takes("unified", "decode")) else 0
        new = [self.request() for _ in range(count)]
        self._open += [row for row in new if row["total_s"] > now - row["time"]]
        changed = {row["rid"]: _as_of(row, now) for row in [*new, *self._open]}
        self._open = [row for row in self._open if row["total_s"] > now - row["time"]]
        known = {row["rid"]: row for row in reversed(self.state["requests"])}
        changed = {rid: row for rid, row in changed.items() if known.get(rid) != row}
        rows = sorted((known | changed).values(), key=lambda row: -row["time"])[:MOST_ROWS]
        self.state["requests"] = rows
        self._changed = {row["rid"]: self._changed.get(row["rid"], 0) for row in rows}
        self._changed.update(dict.fromkeys(changed.keys() & self._changed.keys(), self.state["version"]))
        self.state["links"] = self._links() if self.state["mode"] == "disaggregated" else []
        self._measure()

    def answer(self, since: int) -> Json:
        """As api/state answers; 0: all of it."""
        version = self.state["version"]
        whole = not 0 < since <= version
        after = 0 if whole else since
        rows = [row for row in reversed(self.state["requests"]) if whole or self._changed[row["rid"]] > after]
        points = [point for number, point in self._points if number > after]
        history = {"names": list(SERIES), "step_s": 1, "points": points}
        past = {"past": self._past} if whole else {}
        return self.state | {"whole": whole, "requests": rows, "history": history} | past

    def hour(self) -> Json:
        """As api/history answers."""
        now, kept = self.state["time"], [point for _, point in self._points]
        points = [[now - 15 * ago, *kept[-1 - ago % len(kept)][1:]] for ago in reversed(range(240))] if kept else []
        return {"names": list(SERIES), "step_s": 15, "points": points}

    def become_starting(self) -> None:
        """As before the first report: names and states only."""
        known = ("id", "name", "role", "node", "host")
        rows = [dict.fromkeys(row) | {name: row[name] for name in known} for row in self.state["replicas"]]
        rates = dict.fromkeys(("prefill_tokens_per_s", "cached_tokens_per_s", "decode_tokens_per_s"), 0.0)
        self.state["replicas"] = [row | {"state": "starting", "pools": [], "rates": rates} for row in rows]

    def kill(self, name: str) -> None:
        """End a replica: what runs on it goes on at another."""
        now = self.state["time"]
        role = self.roles.pop(name)
        moved = sum(row["replica"] == name for row in self._open)
        text = f"{self.names.called(name)} is lost; {moved} requests went on elsewhere"
        self.state["events"] = [*self.state["events"], {
            "seq": len(self.state["events"]) + 1, "time": now, "kind": "lost", "replica": name, "role": role,
            "text": text, "requests": moved,
        }][-8:]  # fmt: skip
        ended = {"id": name, "name": self.names.name(name), "role": role, "time": now, "died": True}
        self.state["ended"] = [ended, *self.state["ended"]]
        for row in self._open:
            if row["replica"] == name:
                other = self.random.choice(list(self._takes("unified", "decode")))
                at = now - row["time"]
                row["tries_at"][-1] |= {"end_s": at, "failure": f"replica {name} died, or its connection was lost"}
                row["stages"]["decode_s"] += 0.6
                row |= {"replica": other, "tries": 2, "total_s": row["total_s"] + 0.6}
                row["tries_at"].append({"replica": other, "prefill": None, "start_s": at + 0.02,
                                        "end_s": row["total_s"], "failure": None})  # fmt: skip

    def request(self) -> Json:
        """Row of a new request, as it will have ended."""
        draw, number = self.random, self.num_requests
        self.num_requests += 1
        last, first = list(self._takes("unified", "decode")), list(self._takes("prefill"))
        prompt = draw.randrange(1500, 3500)
        cached = draw.randrange(0, 8) * prompt // 10
        output = draw.choice((16, 64, 64, 64, 200))
        itl_s = (0.06 + 0.09 * draw.random()) if self.slow else 0.006 + 0.015 * draw.random()
        waits_s = draw.random() * (12.0 if self.overloaded else 0.02)
        stages = {"route_s": 0.002, "queue_s": waits_s, "prefill_s": (prompt - cached) / 18_000}
        stages |= {"transfer_s": 0.012 if first else 0.0, "decode_s": itl_s * (output - 1)}
        ttft_s, total_s = sum(stages.values()) - stages["decode_s"], sum(stages.values())
        outcome = "ok" if draw.random() > 0.02 or number < 60 else draw.choice(("error", "cancelled"))
        replica, prefill = draw.choice(last), draw.choice(first) if first else None
        others = [] if first or number % 5 else [each for each in last if each != replica]
        fetch = {"from": others[0], "start_s": 0.002, "end_s": 0.1} if others else None
        return {
            "rid": f"req-{number}", "router": ROUTER, "time": self.state["time"] - draw.random(),
            "endpoint": "chat", "outcome": outcome, "replica": replica, "prefill": prefill,
            "finish": ("stop", "length")[number % 3 % 2] if outcome == "ok" else None,
            "caller": CALLERS[number % 3], "session": f"{number * 7 % 6:08x}",
            "tenant": self.tenants[number % len(self.tenants)] if self.tenants else None,
            "policy": "estimated_ttft", "reason": "lowest_cost" if first else "soonest_first_token", "tries": 1,
            "tries_at": [{"replica": replica, "prefill": prefill, "start_s": 0.002, "end_s": total_s,
                          "failure": "the engine stopped" if outcome == "error" else None, "fetch": fetch}],
            "prompt_tokens": prompt, "output_tokens": output, "cached_tokens": cached, "predicted_tokens": cached,
            "best_tokens": cached + 160, "miss": "elsewhere", "ttft_s": ttft_s,
            "itl_s": itl_s, "last_s": total_s, "total_s": total_s,
            "stages": stages,
            "missed": [
                slo for slo, took_s in (("ttft", ttft_s), ("itl", itl_s)) if took_s > OBJECTIVES[f"{slo}_objective_s"]
            ],
        }  # fmt: skip

    def details(self, rid: str) -> Json | None:
        """As api/requests/{rid} answers; None where no router keeps it."""
        row = next((each for each in self.state["requests"] if each["rid"] == rid), None)
        if row is None:
            return None
        keys = [_key("system", SYSTEMS[0]), *(f"{index:016x}" for index in range(9)), _key("document", SYSTEMS[0], 1)]
        return {"row": row, "page_keys": keys, "route": explained(row, self.roles)}

    def process(self, replica: str, what: str | None) -> Json | None:
        """As api/replicas/{id} answers, or its logs or stacks; None for one that there never was."""
        if what == "logs":
            return {"file": f"replica_{replica}.log", "lines": [LOG.format(number=at, level=LEVELS[at % 9])
                    for at in range(200)]}  # fmt: skip
        if what == "stacks":
            return {"pid": 4711, "stacks": STACKS}
        if replica not in self.roles:
            return None
        return {
            "id": replica, "node_id": "e5f60718", "address": "10.0.3.17", "started": START_S - 2400, "running": True,
            "host": "gpu-box-3", "pid": 4711, "device": "cpu", "dtype": "float32", "weights": None, "tp": 1,
            "context_len": 8192, "page_size": 16, "pool": "65,536 tokens, 4,096 pages, 2,880 MiB", "host_bytes": None,
            "num_threads": 2, "cpu_s": 1.2 * self.state["version"], "rss_bytes": 3_900_000_000,
        }  # fmt: skip

    def act(self, replica: str, action: str) -> str:
        """Do it, and say so."""
        if action == "kill":
            self.kill(replica)
        elif action == "drain":
            self.draining.add(replica)
        return {"flush": "its cache is empty", "drain": "it takes no new requests", "kill": "it has ended"}[action]

    def tree(self, replica: str, depth: int) -> Json | None:
        if replica not in self.roles:
            return None
        systems = [_system(name, 800 - 160 * index) for index, name in enumerate(SYSTEMS)]
        root = _cut(_node("", 0, systems) | {"key": None}, depth)
        tokens, nodes = root["subtree_tokens"], root["subtree_nodes"]
        return {"replica": replica, "time": self.state["time"], "page_size": 16, "tokens": tokens, "nodes": nodes,
                "shown": min(nodes, 400), "root": root}  # fmt: skip

    def _die_and_come(self, second: int) -> None:
        if second == 0:
            self.kill(self._takes("unified", "decode")[0])
        elif second == 8 and self.state["ended"]:
            self.roles[f"ModelReplica#{self.random.getrandbits(32):08x}"] = "unified"

    def _takes(self, *roles: str) -> list[str]:
        away = self.sick | self.draining | self.silent
        return [each for each, role in self.roles.items() if role in roles and each not in away]

    def _replicas(self, now: float, ended: Sequence[Json]) -> list[Json]:
        rows = [self._replica(each, index) for index, each in enumerate(self.roles)]
        self.names.take(rows, {each["id"]: each["role"] for each in ended})
        rows = [row | {"name": self.names.name(row["id"])} for row in rows]
        for row in rows:
            points = self._past.setdefault(row["id"], [])
            if now % 5 == 0:
                own = [row["running"], row["waiting"], row["queued_tokens"], _used(row)]
                points.append([now, *own, *row["rates"].values()])
        return rows

    def _replica(self, name: str, index: int) -> Json:
        draw = self.random
        parts = {"protected": draw.randrange(2, 12), "reserved": draw.randrange(1, 9), "quarantined": int(index == 1)}
        parts["evictable"] = draw.randrange(30, 60)
        shares = parts | {"free": 100 - sum(parts.values())}
        pool = {state: CAPACITY * share // 100 for state, share in shares.items()}
        pool["free"] += CAPACITY - sum(pool.values())
        running = 0 if name in self.sick else 64 if self.overloaded else draw.randrange(0, 12)
        return {
            "id": name, "role": self.roles[name], **NODES[index % 2 if self.num_nodes > 1 else 0],
            "state": "unhealthy" if name in self.sick else "silent" if name in self.silent
            else "draining" if name in self.draining else "accepting",
            "error": CUDA if name in self.sick else SILENCE if name in self.silent else None,
            "running": running, "running_limit": 64,
            "waiting": running // 5,
            "preallocating": 0, "receiving": running // 4, "handing_off": running // 4,
            "queued_tokens": running * 130, "prefill_tokens_per_s": 1500.0, "decode_step_s": 0.021,
            "report_age_s": draw.choice([0.1, 0.2]), "blocked": None,
            "pools": [{"tier": "L1", "capacity": CAPACITY, **pool}],
            "tiers": None,
            "adapters": None,
            "cache_nodes": 69, "page_size": 16, "attention": "cpu", "attention_why": "the fast one of this device",
            "rates": {"prefill_tokens_per_s": 820.0 + running, "cached_tokens_per_s": 2400.0,
                      "decode_tokens_per_s": 95.0},
        }  # fmt: skip

    def _links(self) -> list[Json]:
        roles = self.roles
        pairs = [(a, b) for a in roles for b in roles if (roles[a], roles[b]) == ("prefill", "decode")]
        return [{"from": a, "to": b, "bytes_per_s": 4e6 * (1 + index), "kv_transfers_per_s": 0.5 * (1 + index),
                 "failed_per_s": 0.0} for index, (a, b) in enumerate(pairs)]  # fmt: skip

    def _measure(self) -> None:
        """Sum up: the figures, the newest point of the history, the alerts."""
        now, replicas = self.state["time"], self.state["replicas"]
        recent = [row for row in self.state["requests"] if row["time"] > now - 30]
        ended = [row for row in recent if row["outcome"] != "running"]
        prompt = sum(row["prompt_tokens"] for row in recent)
        used = [_used(row) for row in replicas if row["pools"]]
        fullest = max((row for row in replicas if row["pools"]), key=_used, default=None)
        failed = sum(row["outcome"] == "error" for row in ended)
        values: Json = {
            **_quantiles("ttft", [row["ttft_s"] for row in recent if row["ttft_s"] is not None]),
            **_quantiles("itl", [row["itl_s"] for row in ended if row["itl_s"] is not None]),
            **{name: sum(row["rates"][f"{of}_tokens_per_s"] for row in replicas) if replicas else None
               for name, of in {"output": "decode", "prefill": "prefill", "cached": "cached"}.items()},
            "hit": sum(row["cached_tokens"] or 0 for row in recent) / prompt if prompt else None,
            "errors": failed / len(ended) if ended else None, "shed": 0.0 if ended else None,
            "queue": sum(row["waiting"] for row in replicas), "running": sum(row["running"] for row in replicas),
            "kv_max": max(used, default=None), "kv_mean": sum(used) / len(used) if used else None,
        }  # fmt: skip
        more: Json = {
            "hit": {"cached_tokens": sum(row["cached_tokens"] or 0 for row in recent), "prompt_tokens": prompt},
            "errors": {"count": failed, "requests_per_s": len(ended) / 30},
            "queue": {"tokens": sum(row["queued_tokens"] for row in replicas), "running": values["running"]},
            "kv": {"mean": values["kv_mean"], "replica": fullest and fullest["id"], "without_room": 0},
        }
        alerts = []
        if self.slow:
            alerts += [BURN | {"since": START_S - 360}, SHED | {"since": START_S - 20}]
        for name in self.sick:
            said = f"A unified replica of {MODEL} is unhealthy ({self.names.name(name)}, {short_name(name)}): {CUDA}."
            alerts.append(UNHEALTHY | {"since": START_S - 130, "summary": said, "replica": name})
        for name in self.silent:
            said = f"A unified replica of {MODEL} is silent ({self.names.name(name)}, {short_name(name)}): {SILENCE}."
            alerts.append(UNHEALTHY | {"name": "ReplicaSilent", "runbook": "runbook#replicasilent", "summary": said,
                                       "since": now - 6, "replica": name})  # fmt: skip
        if self.overloaded:
            said = f"83 % of the requests to {MODEL} miss the TTFT objective of 2 s."
            alerts.append(BURN | {"name": "TtftObjectiveBurn", "since": now - 90, "summary": said, "figure": "ttft",
                                  "runbook": "runbook#ttftobjectiveburn"})  # fmt: skip
        met = {slo: 1 - sum(slo in row["missed"] for row in ended) / len(ended) for slo in ("ttft", "itl") if ended}
        firing = {alert["figure"]: alert["severity"] for alert in alerts if alert["state"] == FIRING}
        self.state["alerts"] = sorted(alerts, key=lambda alert: (alert["state"] == PENDING, alert["severity"]))
        self.state["figures"] = [
            {"name": each.name, "title": each.title, "unit": each.unit, "value": values[each.series[0]],
             "more": more.get(each.name, {name.rpartition("_")[2]: values[name] for name in each.series}),
             "most": each.most, "met": met.get(each.name),
             "objective": OBJECTIVES.get(each.objective or ""), "series": list(each.series),
             "level": _level(values[each.series[0]], OBJECTIVES.get(each.objective or ""), firing.get(each.name, "ok"))}
            for each in FIGURES
        ]  # fmt: skip
        if self.roles:
            self._points.append((self.state["version"], [now, *(values[name] for name in SERIES)]))
            del self._points[:-HISTORY_S]


def _level(value: float | None, objective: float | None, alert: str) -> str:
    """As figures_body: by the value where there is an objective, else by what fires."""
    if objective is not None:
        alert = "ok" if value is None or value <= objective else "warning"
    return "idle" if value is None and alert == "ok" else alert


def _as_of(row: Json, now: float) -> Json:
    """``row``, which says how a request will end, as of its last change before ``now``."""
    passed = now - row["time"]
    if passed >= row["total_s"]:
        return row
    tries = [each | {"end_s": None, "failure": None} if each["end_s"] > passed else each for each in row["tries_at"]]
    shown = row | {"outcome": "running", "tries_at": tries, "missed": []}
    shown |= dict.fromkeys(("finish", "total_s", "itl_s"))
    if passed >= row["ttft_s"]:
        itl_s = row["stages"]["decode_s"] / max(row["output_tokens"] - 1, 1)
        made = int((passed - row["ttft_s"]) / itl_s) if itl_s else 0
        grown = {"output_tokens": 1 + made, "itl_s": itl_s if made else None, "last_s": row["ttft_s"] + made * itl_s}
        return shown | grown | {"stages": row["stages"] | {"decode_s": 0.0}}
    nothing = dict.fromkeys(row["stages"], 0.0)
    early = {"output_tokens": 0, "cached_tokens": None, "ttft_s": None, "last_s": None}
    return shown | early | {"stages": nothing | {"route_s": row["stages"]["route_s"]}}


def _quantiles(name: str, values: list[float]) -> Json:
    ranked = sorted(values)
    return {
        f"{name}_p{share}": ranked[min(share * len(ranked) // 100, len(ranked) - 1)] if ranked else None
        for share in (50, 95, 99)
    }


def _used(replica: Json) -> float:
    pool = replica["pools"][0]
    return round((pool["protected"] + pool["reserved"] + pool["quarantined"]) / CAPACITY, 4)


def _target(role: str, number: int) -> Json:
    return {"role": role, "running": number, "desired": number, "minimum": 1, "maximum": 4,
            "pressure": {"queue": 0.42, "kv_pool": 1.2, "slots": None}}  # fmt: skip


def _key(*parts: object) -> str:
    return hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def _node(name: str, tokens: int, children: list[Json], *, locked: bool = False, idle_s: float = 3.0) -> Json:
    return {
        "tokens": tokens, "subtree_tokens": tokens + sum(each["subtree_tokens"] for each in children),
        "subtree_nodes": 1 + sum(each["subtree_nodes"] for each in children), "hits": 9, "protected": locked,
        "idle_s": idle_s, "key": _key(*name.split()), "children": children, "left_out": None,
    }  # fmt: skip


def _system(name: str, tokens: int) -> Json:
    documents = []
    for number in range(5):
        talks = [_node(f"talk {name} {number} {at}", 240 - 40 * at, [], idle_s=30.0 * at * at) for at in range(4)]
        in_use = name == "code" and number == 0
        idle_s = 0.0 if in_use else 40.0 * number
        documents.append(_node(f"document {name} {number}", 640, talks, locked=in_use, idle_s=idle_s))
    system = _node(f"system {name}", tokens, documents, locked=name == "code", idle_s=0.0)
    system["left_out"] = {"nodes": 7, "tokens": 320}
    system["subtree_tokens"] += 320
    system["subtree_nodes"] += 7
    return system


def _cut(node: Json, depth: int) -> Json:
    """``node`` with ``depth`` levels below it."""
    if depth == 0 and node["children"]:
        rest = {"nodes": node["subtree_nodes"] - 1, "tokens": node["subtree_tokens"] - node["tokens"]}
        return node | {"children": [], "left_out": rest}
    return node | {"children": [_cut(each, depth - 1) for each in node["children"]]}
