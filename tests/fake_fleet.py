"""A fleet that does not exist, in the observatory's JSON forms (its README.md), for tests of the page.

Owns:      one state and its history; `tick` makes the next second of it.
Never:     knows HTTP (fake_observatory.py does), a clock, or a replica.
Invariant: pools sum to their capacity, stages to their total; the same seed gives the same fleet.
"""

import hashlib
import random
from typing import Any

from deployments.watch.observatory.deltas import History, changes
from tests.fake_route import explained

Json = dict[str, Any]
START_S = 1_763_722_000.0
CAPACITY = 65_536  # tokens of a pool
SYSTEMS = ("agent", "code", "rag")
MODEL = "SmolLM2-135M-Instruct"


class FakeFleet:
    """``prefill`` replicas compute prompts for ``unified`` that decode; 0: all do everything."""

    def __init__(self, *, unified: int = 2, prefill: int = 0, requests_per_tick: int = 1, ticks: int = 0) -> None:
        self.random = random.Random(7)
        self.mode = "disaggregated" if prefill else "unified"
        roles = ["decode"] * unified + ["prefill"] * prefill if prefill else ["unified"] * unified
        ids = [f"ModelReplica#{self.random.getrandbits(32):08x}" for _ in roles]
        self.roles = dict(sorted(zip(ids, roles, strict=True), key=lambda each: (each[1], each[0])))
        self.requests_per_tick = requests_per_tick
        self.num_requests = 0
        self.history = History()
        self.state: Json = {
            "time": START_S, "version": 1, "model": MODEL, "mode": self.mode, "period_s": 1.0,
            "routers": [{"id": "router#5f1d", "node": "a1b2c3d4", "answering": True, "open": 3}] if roles else [],
            "replicas": [self._replica(each, index) for index, each in enumerate(self.roles)],
            "links": [], "totals": _totals([]), "requests": [],
            "autoscaling": {"targets": [_target(role, roles.count(role)) for role in sorted(set(roles))], "log": []},
            "history": self.history.series(),
        }  # fmt: skip
        for _ in range(ticks):
            self.tick()

    def tick(self) -> Json:
        """The next second. Returns the delta that led to it."""
        old = self.state
        new = dict(old) | {"time": old["time"] + 1, "version": old["version"] + 1}
        new["replicas"] = [self._replica(each, index) for index, each in enumerate(self.roles)]
        rows = [self.request() for _ in range(self.requests_per_tick if self.roles else 0)]
        new["requests"] = (rows + old["requests"])[:50]
        new["totals"] = _totals(new["requests"])
        new["links"] = self._links() if self.mode == "disaggregated" else []
        used = {row["id"]: _used(row) for row in new["replicas"]}
        self.history.add(new["time"], used)
        new["history"] = self.history.series()
        self.state = new
        return changes(old, new, used)

    def become_starting(self) -> None:
        """As before the first report: names and states only."""
        known = ("id", "role", "node")
        rows = [dict.fromkeys(row) | {name: row[name] for name in known} for row in self.state["replicas"]]
        rates = dict.fromkeys(("prefill_tokens_per_s", "cached_tokens_per_s", "decode_tokens_per_s"), 0.0)
        self.state["replicas"] = [row | {"state": "starting", "pools": [], "rates": rates} for row in rows]

    def request(self) -> Json:
        """Row of a new request that has finished."""
        draw, number = self.random, self.num_requests
        self.num_requests += 1
        last = [each for each, role in self.roles.items() if role != "prefill"]
        first = [each for each, role in self.roles.items() if role == "prefill"]
        prompt = draw.randrange(1500, 3500)
        cached = draw.randrange(0, 8) * prompt // 10
        stages = {"route_s": 0.002, "queue_s": draw.random() * 0.02, "prefill_s": (prompt - cached) / 18_000}
        stages |= {"transfer_s": 0.012 if first else 0.0, "decode_s": 0.4 + draw.random()}
        ttft_s = sum(stages.values()) - stages["decode_s"]
        return {
            "rid": f"req-{number}", "router": "router#5f1d", "time": self.state["time"] - 1.0,
            "endpoint": "chat", "outcome": "finished", "replica": draw.choice(last),
            "prefill": draw.choice(first) if first else None, "policy": "estimated_ttft",
            "reason": "lowest_cost" if first else "soonest_first_token", "tries": 1, "prompt_tokens": prompt,
            "output_tokens": 64, "cached_tokens": cached, "predicted_tokens": cached, "best_tokens": cached + 160,
            "ttft_s": ttft_s, "total_s": sum(stages.values()), "stages": stages,
        }  # fmt: skip

    def details(self, rid: str) -> Json | None:
        """As api/requests/{rid} answers; None where no router keeps it."""
        row = next((each for each in self.state["requests"] if each["rid"] == rid), None)
        if row is None:
            return None
        keys = [_key("system", SYSTEMS[0]), *(f"{index:016x}" for index in range(9)), _key("document", SYSTEMS[0], 1)]
        return {"row": row, "page_keys": keys, "route": explained(row, self.roles)}

    def tree(self, replica: str, depth: int) -> Json | None:
        if replica not in self.roles:
            return None
        systems = [_system(name, 800 - 160 * index) for index, name in enumerate(SYSTEMS)]
        root = _cut(_node("", 0, systems) | {"key": None}, depth)
        tokens, nodes = root["subtree_tokens"], root["subtree_nodes"]
        return {"replica": replica, "time": self.state["time"], "page_size": 16, "tokens": tokens, "nodes": nodes,
                "shown": min(nodes, 400), "root": root}  # fmt: skip

    def _replica(self, name: str, index: int) -> Json:
        draw = self.random
        parts = {"protected": draw.randrange(2, 12), "reserved": draw.randrange(1, 9), "quarantined": int(index == 1)}
        parts["evictable"] = draw.randrange(30, 60)
        shares = parts | {"free": 100 - sum(parts.values())}
        pool = {state: CAPACITY * share // 100 for state, share in shares.items()}
        pool["free"] += CAPACITY - sum(pool.values())
        running = draw.randrange(0, 12)
        return {
            "id": name, "role": self.roles[name], "node": f"{'a1b2c3d4' if index % 2 else 'e5f60718'}",
            "state": "accepting", "error": None, "running": running, "running_limit": 64, "waiting": running // 5,
            "preallocating": 0, "receiving": running // 4, "handing_off": running // 4,
            "queued_tokens": running * 130, "prefill_tokens_per_s": 1500.0, "decode_step_s": 0.021,
            "report_age_s": draw.choice([0.1, 0.2]), "pools": [{"tier": "L1", "capacity": CAPACITY, **pool}],
            "tiers": None,
            "cache_nodes": 69, "page_size": 16, "attention": "cpu", "attention_why": "the fast one of this device",
            "rates": {"prefill_tokens_per_s": 820.0 + running, "cached_tokens_per_s": 2400.0,
                      "decode_tokens_per_s": 95.0},
        }  # fmt: skip

    def _links(self) -> list[Json]:
        roles = self.roles
        pairs = [(a, b) for a in roles for b in roles if (roles[a], roles[b]) == ("prefill", "decode")]
        return [{"from": a, "to": b, "bytes_per_s": 4e6 * (1 + index), "hand_offs_per_s": 0.5 * (1 + index),
                 "failed_per_s": 0.0} for index, (a, b) in enumerate(pairs)]  # fmt: skip


def _used(replica: Json) -> float:
    pool = replica["pools"][0]
    return round((pool["protected"] + pool["reserved"] + pool["quarantined"]) / CAPACITY, 4)


def _totals(rows: list[Json]) -> Json:
    ttfts = sorted(row["ttft_s"] for row in rows)
    at = (lambda share: ttfts[int(share * (len(ttfts) - 1))]) if rows else (lambda share: None)
    prompt = sum(row["prompt_tokens"] for row in rows)
    reuse = sum(row["cached_tokens"] for row in rows) / prompt if prompt else None
    return {"requests_per_s": len(rows) / 60, "ttft_p50_s": at(0.5), "ttft_p90_s": at(0.9), "reuse_ratio": reuse,
            "fullest_pool_ratio": 0.21 if rows else None}  # fmt: skip


def _target(role: str, number: int) -> Json:
    return {"role": role, "running": number, "desired": number, "minimum": 1, "maximum": 4,
            "pressure": {"queue": 0.42, "kv_pool": 1.2, "slots": None}}  # fmt: skip


def _key(*parts: object) -> str:
    return hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def _node(name: str, tokens: int, children: list[Json], *, locked: bool = False, idle_s: float = 3.0) -> Json:
    return {
        "tokens": tokens, "subtree_tokens": tokens + sum(each["subtree_tokens"] for each in children),
        "subtree_nodes": 1 + sum(each["subtree_nodes"] for each in children), "hits": 9, "locked": locked,
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
