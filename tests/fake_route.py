"""What GET /route/{rid} would answer for a request of fake_fleet.py. Pure."""

import zlib
from typing import Any

Json = dict[str, Any]
RATE = 18_000.0  # prompt tokens a second


def explained(row: Json, roles: dict[str, str]) -> Json:
    internal = f"{7:016x}.0-{row['rid']}"
    tries = [_try(row, roles, at) for at in range(len(row["tries_at"]))]
    told = tries[-1]["sentence"]
    return {
        "rid": row["rid"], "internal_rid": internal, "router": row["router"], "time": row["time"],
        "replica": row["replica"], "outcome": row["outcome"], "num_retries": len(tries) - 1, "num_migrations": 0,
        "tries": tries, "total_s": row["total_s"], "stages": row["stages"],
        "explanation": f"{internal}{told.removeprefix(row['rid'])}\n  replica   TTFT = queue\n> {row['replica']}  0.1",
    }  # fmt: skip


def _try(row: Json, roles: dict[str, str], at: int) -> Json:
    """Try ``at``: the chosen replica is the cheapest; the next one holds 160 tokens more, behind a queue."""
    replica, failure = row["tries_at"][at]["replica"], row["tries_at"][at]["failure"]
    others = [each for each in roles if each != replica]
    every = [_candidate(replica, roles.get(replica, "unified"), row, 0)]
    every += [_candidate(each, roles[each], row, index) for index, each in enumerate(others, 1)]
    candidates = [each for each in every if each["role"] != "prefill"]
    candidates += [each for each in every if each["role"] == "prefill"]
    for each in every:
        each["chosen"] = each["replica"] in (replica, row["prefill"])
    expected_s = every[0]["ttft_s"]
    told = (
        f"{row['rid']} ({row['prompt_tokens']} prompt tokens) went to {replica} by {row['policy']}: "
        f"its first token is expected soonest. {row['predicted_tokens']} tokens are predicted to be cached there, "
        f"and the first token after {expected_s:.3f} s."
    )
    last = at == len(row["tries_at"]) - 1
    predicted = {"cached_tokens": row["predicted_tokens"] or 0, "host_tokens": 0, "store_tokens": 0, "load_s": 0.0}
    best = others[0] if others else replica
    attempt = {
        "sentence": told, "replica": replica, "policy": row["policy"], "reason": row["reason"],
        "num_tokens": row["prompt_tokens"], "predicted": predicted | {"ttft_s": expected_s},
        "best_overlap": {"replica": best, "cached_tokens": row["best_tokens"], "given_up": 160 if others else 0},
        "candidates": candidates,
        "actual": {
            "cached_tokens": row["cached_tokens"], "host_tokens": 0, "store_tokens": 0, "ttft_s": row["ttft_s"],
            "passed_s": 0.0,
            "drafted_tokens": 0, "accepted_tokens": 0,
        },
        "outcome": row["outcome"] if last else "error", "failure": failure, "moved": None,
        "miss": {"cause": row["miss"], "tokens": 160, "cost_s": 160 / RATE,
                 "words": f"160 tokens were computed ({160 / RATE:.3f} s): {best} holds them"},
    }  # fmt: skip
    if row["prefill"]:
        attempt |= _pair(row, [each["replica"] for each in candidates if each["role"] != "prefill"])
    return attempt


def _candidate(name: str, role: str, row: Json, index: int) -> Json:
    """Of the others, the first holds more and has a queue; the rest hold less."""
    draw = zlib.crc32(f"{row['rid']} {name}".encode()) % 100 / 100
    prompt, cached = row["prompt_tokens"], row["predicted_tokens"] or 0
    less = int(cached * draw * 0.8) // 16 * 16
    held = cached if index == 0 else min(prompt - 16, cached + 160) if index == 1 else less
    queued = int(300 * draw) if index == 0 else 9_000 + int(9_000 * draw) if index == 1 else 300 + int(4_000 * draw)
    terms = {
        "queue_s": queued / RATE, "own_s": (prompt - held) / RATE, "load_s": 0.0, "fetch_s": 0.0, "adapter_s": 0.0,
        "step_s": 0.006, "decode_s": 0.021, "pressure_s": 0.09 * draw if index > 3 else 0.0, "way_s": 0.003,
    }  # fmt: skip
    return {
        "replica": name, "role": role, "chosen": False, "cached_tokens": held, "device_tokens": held,
        "host_tokens": 0, "store_tokens": 0, "fetched_tokens": 0, "num_requests": index + 1, "queued_tokens": queued,
        "passed_tokens": 0, "gone_tokens": 0, "ended_by": "full", "free_tokens": 20_000,
        "own_tokens": prompt - held, "prefill_tokens_per_s": RATE, "ttft_s": sum(terms.values()), **terms,
        "behind_s": 0.05 * draw if index > 1 else 0.0, "pool_utilization": 0.17, "report_age_s": 0.08,
    }  # fmt: skip


def _pair(row: Json, decode: list[str]) -> Json:
    costs = [
        {"replica_id": name, "cached_tokens": 0, "own_tokens": row["prompt_tokens"], "transfer_pages": 113,
         "transfer_bytes": 41_000_000, "ttft_s": 0.31, "stall_s": 0.9, "transfer_s": 0.014, "overhead_s": 0.008,
         "pressure_s": 0.0, "load_s": 0.0, "adapter_s": 0.0, "slower_s": 0.02 * (1 + at),
         "local_cost_s": 1.23 + 0.02 * at, "receive_cost_s": 0.042 + 0.02 * at}
        for at, name in enumerate(decode)
    ]  # fmt: skip
    pair = {
        "prefill": row["prefill"], "decode": row["replica"], "reason": "kv_transfer_costs_less", "why": None,
        "best_prefill": row["prefill"], "prefill_s": 0.118, "kv_transfer_cost_s": 0.16, "local_cost_s": 1.23,
        "link_bytes_per_s": 2.9e9, "link_measured": True, "decode_replicas": costs,
    }  # fmt: skip
    kv_transfer = {"transferred": True, "reason": None, "num_pages": 113, "num_bytes": 41_000_000, "grant_s": 0.001,
                "wait_s": 0.131, "transfer_s": 0.014}  # fmt: skip
    return {"pair": pair, "kv_transfer": kv_transfer, "prefill_end": "handed off", "held_out": {}}
