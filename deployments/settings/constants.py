"""Values that were settings until 0.1: each is a constant now, with the reason, or has another name. A file that still
names one is served, and is told what holds instead.

Owns:      which names are no settings any more. Their values stay where they are used: the fields of the groups.
Never:     refuses a file for such a name.
"""

import os
from collections.abc import Mapping
from typing import Any

EXPERIMENTS_VARIABLE = "MANTA_EXPERIMENTS"  # set: files may change constants, for tests and measurements

_POLICY = "it belongs to an order of the queue, and was measured with it"
_RATIOS = "it adapts itself: requests that are retracted raise the share that is reserved"
_HANGS = "shorter takes a busy process for a dead one, longer keeps its requests waiting"
_PEERS = "replicas of one cluster answer in milliseconds; a peer that is silent for so long is gone"
_KEPT = "it bounds what a router keeps in memory"
_LOAD = "the rule of autoscaling is made of all four, and was measured with these"
_SERVE = "Ray Serve's own default suits, or its rule was made with this value"
_TIERS = "it was the best, or within 0.5 % of the best, on every trace (docs/tiers.md)"

CONSTANTS: Mapping[str, str] = {
    "model.products": "our own products are as fast as BLAS, within a tenth, and sum in one order",
    "model.implementation": "our own code runs the families that it has, Transformers' the others",
    "scheduler.lpm_max_queue": _POLICY,
    "scheduler.ageing_s": _POLICY,
    "scheduler.late_factor": _POLICY,
    "scheduler.session_wait_s": "no turn waits for other sessions any more",
    "scheduler.new_token_ratio": _RATIOS,
    "scheduler.min_new_token_ratio": _RATIOS,
    "scheduler.new_token_ratio_decay": _RATIOS,
    "scheduler.in_batch_prefix_len": "it is two pages, so that less than that is computed twice",
    "scheduler.cascade": "it is chosen in each step, where it saves reading",
    "scheduler.cascade_saves": "it was measured",
    "scheduler.mixed_steps": "without them each prompt stops all answers",
    "scheduler.overlap": "it gains on a GPU alone, and is on there",
    "scheduler.watchdog_s": _HANGS,
    "scheduler.hang_kill_s": _HANGS,
    "scheduler.max_queued_requests": "router.max_wait_s refuses what would wait too long before that",
    "router.max_schema_bytes": "a larger schema takes more memory to compile than a request may",
    "router.body_timeout_s": "it bounds how long a slow client holds a place",
    "router.max_tries": "a request that three replicas could not answer is not given to a fourth",
    "router.retry_wait_s": "it is what Ray Serve needs to start a replica in the place of a dead one",
    "router.move_waiting": "a move never makes a request wait longer than it would where it is",
    "router.hang_timeout_s": _HANGS,
    "router.reconnect_s": "a client that lives comes back within seconds",
    "router.background_timeout_s": _KEPT,
    "router.background_kept_s": _KEPT,
    "router.decisions_kept": _KEPT,
    "router.record_bytes": "it bounds the disk that a recording takes",
    "router.batch_file_bytes": "it is OpenAI's bound",
    "router.batch_bytes": "a folder on a disk of its own bounds it too",
    "transfer.fetch": "off: little is gained by it where links are slow (docs/log/2026-11-29-fetches.md)",
    "transfer.open_timeout_s": "it follows router.max_wait_s, which it must exceed",
    "transfer.room_timeout_s": "it follows router.max_wait_s, which it must exceed",
    "transfer.call_timeout_s": _PEERS,
    "transfer.rank_timeout_s": _PEERS,
    "transfer.heartbeat_s": _PEERS,
    "transfer.heartbeat_misses": _PEERS,
    "transfer.transport": "UCX chooses, and UCX_TLS=tcp in the environment limits it to TCP",
    "transfer.pages_per_write": "KV transfers were measured with writes of this size",
    "autoscaling.pool_high": _LOAD,
    "autoscaling.running_high": _LOAD,
    "autoscaling.slack": _LOAD,
    "autoscaling.counts_batches": "batch requests use what is idle",
    "autoscaling.target_ongoing_requests": "requests differ in length by a thousand times, so their number says little",
    "autoscaling.metrics_interval_s": _SERVE,
    "autoscaling.look_back_period_s": _SERVE,
    "autoscaling.initial_replicas": "autoscaling starts with min_replicas",
    "adapters.max_bytes": "it follows adapters.host_bytes, beyond which no adapter could be held",
    "cache.host_eviction": _TIERS,
    "cache.write_policy": _TIERS,
    "cache.prefetch": "a prompt waits for the store while that is expected to be quicker than to compute it",
    "cache.sparse_tokens": "the attention that reads it is a reference, and was tried with this value",
    "replicas.health_period_s": _SERVE,
    "replicas.health_timeout_s": _SERVE,
    "replicas.push_share": "the rest of replicas.drain_timeout_s is left for requests",
    "replicas.fill_s": "a new replica waits no longer for pages than a prompt of some thousand tokens takes",
    "observability.metrics": "the live view, autoscaling and alerts read them",
}

RENAMED: Mapping[str, str] = {
    "scheduler.drafts": "scheduler.speculation",
    "transfer.hand_off": "transfer.disaggregation",
}


def renamed(setting: str) -> str | None:
    """Return the dotted name that the setting of this old one has now, in a role's group too; None: it has no other."""
    entry = _entry(setting)
    return setting.removesuffix(entry) + RENAMED[entry] if entry in RENAMED else None


def is_constant(setting: str) -> bool:
    """Whether the setting of this dotted name, in a role's group too, is a constant now."""
    return _entry(setting) in CONSTANTS


def experimental(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether files of this process may change constants."""
    return bool(environ.get(EXPERIMENTS_VARIABLE))


def notice(setting: str, value: Any, given: Any) -> str:
    """Say that ``setting``, which a file gives as ``given``, is a constant of ``value``; None: has no other value."""
    now = f"{given} is ignored" if value is None else f"{value} holds instead of {given}"
    return f"{setting}: is no setting any more, {now}: {CONSTANTS[_entry(setting)]}. Leave it out"


def _entry(setting: str) -> str:
    """Name a setting by its innermost group and its own name: prefill.cache.prefetch is cache.prefetch."""
    return ".".join(setting.split(".")[-2:])
