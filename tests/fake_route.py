"""What GET /route/{rid} would answer for a request of fake_fleet.py. Pure."""

from typing import Any

Json = dict[str, Any]


def explained(row: Json, roles: dict[str, str]) -> Json:
    every = [_candidate(each, role, row, index) for index, (each, role) in enumerate(roles.items())]
    last = [each for each in every if each["role"] != "prefill"]
    candidates = last + [each for each in every if each["role"] == "prefill"]
    internal = f"{7:016x}.0-{row['rid']}"
    told = (
        f"{row['rid']} ({row['prompt_tokens']} prompt tokens) went to {row['replica']} by {row['policy']}: "
        f"its first token is expected soonest. {row['predicted_tokens']} tokens are predicted to be cached there, "
        "and the first token after 0.120 s."
    )
    best = next(each["replica"] for each in candidates if not each["chosen"])
    attempt = {
        "sentence": told,
        "replica": row["replica"], "policy": row["policy"], "reason": row["reason"], "num_tokens": row["prompt_tokens"],
        "predicted": {"cached_tokens": row["predicted_tokens"], "host_tokens": 0, "store_tokens": 0, "load_s": 0.0,
                      "ttft_s": 0.12},
        "best_overlap": {"replica": best, "cached_tokens": row["best_tokens"], "given_up": 160},
        "candidates": candidates, "actual": {"cached_tokens": row["cached_tokens"], "host_tokens": 0,
                                               "store_tokens": 0, "ttft_s": row["ttft_s"]},
        "outcome": row["outcome"], "failure": None,
    }  # fmt: skip
    if row["prefill"]:
        attempt |= _pair(row, [each["replica"] for each in last])
    return {
        "rid": row["rid"], "internal_rid": internal, "router": row["router"], "time": row["time"],
        "replica": row["replica"], "outcome": row["outcome"], "num_retries": 0, "tries": [attempt],
        "total_s": row["total_s"], "stages": row["stages"],
        "explanation": f"{internal}{told.removeprefix(row['rid'])}\n  replica   TTFT = queue\n> {row['replica']}  0.1",
    }  # fmt: skip


def _candidate(name: str, role: str, row: Json, index: int) -> Json:
    own = row["prompt_tokens"] - row["cached_tokens"] + 200 * index
    terms = {"queue_s": 0.015 * index, "own_s": own / 18_000, "load_s": 0.0, "decode_s": 0.021, "pressure_s": 0.0}
    return {
        "replica": name, "role": role, "chosen": name in (row["replica"], row["prefill"]),
        "cached_tokens": max(0, row["cached_tokens"] - 200 * index),
        "device_tokens": max(0, row["cached_tokens"] - 200 * index), "host_tokens": 0, "store_tokens": 0,
        "num_requests": index + 1,
        "queued_tokens": 130 * index, "own_tokens": own, "prefill_tokens_per_s": 18_000.0,
        "ttft_s": sum(terms.values()), **terms, "behind_s": 0.0, "pool_utilization": 0.17, "report_age_s": 0.08,
    }  # fmt: skip


def _pair(row: Json, decode: list[str]) -> Json:
    costs = [
        {"replica_id": name, "cached_tokens": 0, "own_tokens": row["prompt_tokens"], "transfer_pages": 113,
         "transfer_bytes": 41_000_000, "ttft_s": 0.31, "stall_s": 0.9, "transfer_s": 0.014, "overhead_s": 0.008,
         "pressure_s": 0.0, "load_s": 0.0, "slower_s": 0.02 * (1 + at), "local_cost_s": 1.23 + 0.02 * at,
         "receive_cost_s": 0.042 + 0.02 * at}
        for at, name in enumerate(decode)
    ]  # fmt: skip
    pair = {
        "prefill": row["prefill"], "decode": row["replica"], "reason": "hand_off_costs_less", "why": None,
        "best_prefill": row["prefill"], "prefill_s": 0.118, "hand_off_cost_s": 0.16, "local_cost_s": 1.23,
        "link_bytes_per_s": 2.9e9, "link_measured": True, "decode_replicas": costs,
    }  # fmt: skip
    hand_off = {"transferred": True, "reason": None, "num_pages": 113, "num_bytes": 41_000_000, "grant_s": 0.001,
                "wait_s": 0.131, "transfer_s": 0.014}  # fmt: skip
    return {"pair": pair, "hand_off": hand_off, "prefill_end": "finished", "held_out": {}}
