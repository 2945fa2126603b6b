"""What a KV transfer and the steps after it looked like, as one JSON line each, to be joined by rid (SPEC J01-J04).

Owns:      the fields of these events, and the logger "kvtransfer.replay.observe" that gets them.
Never:     reads a pool: the caller does, and only where `enabled` says so.
Invariant: off unless `enable` was called, whatever the level of the root logger; nothing is computed while it is off.
           What fails in an observation never reaches what is observed (`harmless`).
           The hashes of one token range are equal on both sides exactly when its K and V are, for any page size and tp.
Thread:    any.

    J01 prefill_before_send    prefill side, before the last pages go: what will have been sent
    J02 transfer_submit        prefill side, each write of each rank that has ended
    J03 decode_after_restore   decode side, once all is there and before it is used
    J04 decode_step            each token of each request; its end: eos, stop_id, stop_string or length
"""

import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, ParamSpec

import numpy as np
import xxhash

from kvtransfer.replay.payload import Payload, PayloadMeta, Slots

log = logging.getLogger(__name__)
log.setLevel(logging.WARNING)  # its own, so that verbose logging elsewhere does not copy every KV page
HEAD = 16  # slots that are listed
P = ParamSpec("P")
_failed: set[str] = set()  # observations whose failure is in the log already


def enable(on: bool = True) -> None:
    """Turn the events on or off; they go to logging's handlers at level INFO."""
    _failed.clear()
    log.setLevel(logging.INFO if on else logging.WARNING)


def harmless(observation: Callable[P, None]) -> Callable[P, None]:
    """Keep what ``observation`` raises from its caller, whose step goes on. The log has the first failure of each."""

    @functools.wraps(observation)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            observation(*args, **kwargs)
        except Exception:
            if observation.__qualname__ not in _failed:
                _failed.add(observation.__qualname__)
                log.exception("%s failed; requests are not affected, its events are missing", observation.__qualname__)

    return call


# () -> whether events are on; ask before reading K/V for one, which takes as long as sending it
enabled = functools.partial(log.isEnabledFor, logging.INFO)


def prefill_before_send(meta: PayloadMeta, payload: Payload) -> None:
    """Write J01. ``meta.token_range``: the tokens that the receiver does not have."""
    _emit("prefill_before_send", **_side(meta, payload))


@harmless
def transfer_submit(
    *, rid: str, room: int, rank: int, device: str, dtype: str, buffers_bytes: Sequence[int], latency_s: float
) -> None:
    """Write J02. ``buffers_bytes``: the pages of one write of one rank; ``device``: "cpu", or "cuda:" and its number;
    ``latency_s``: from the order to write them to its end."""
    _emit(
        "transfer_submit",
        rid=rid,
        room=room,
        rank=rank,
        num_bufs=len(buffers_bytes),
        total_bytes=sum(buffers_bytes),
        buffers=[{"device": device, "nbytes": nbytes, "dtype": dtype} for nbytes in buffers_bytes],
        latency_s=latency_s,
    )


def decode_after_restore(meta: PayloadMeta, payload: Payload, *, table_row: Slots) -> None:
    """Write J03. ``table_row``: slots of the whole sequence, reused prefix included."""
    _emit("decode_after_restore", **_side(meta, payload), req_to_token=_slots(table_row))


def decode_step(
    *, rid: str, index: int, i: int, last_token: int, next_token: int, slot: int, finish: str | None
) -> None:
    """Write J04. ``i``: index of the output token that was made, from 0; ``slot`` holds the K/V of ``last_token``."""
    _emit(
        "decode_step",
        rid=rid,
        index=index,
        i=i,
        last_token=last_token,
        next_token=next_token,
        kv_indices_new=[slot],
        finish_reason=finish,
    )


def kv_digests(payload: Payload) -> tuple[str, str]:
    """Return XXH3-64 over all K and over all V, by layer, then token: 16 hex digits, since JSON has only doubles. Equal
    for MLA, whose one vector is K and V."""
    k, v = xxhash.xxh3_64(), xxhash.xxh3_64()
    for layer in np.ascontiguousarray(payload):
        k.update(layer[0].reshape(-1).data)
        v.update(layer[-1].reshape(-1).data)
    return k.hexdigest(), v.hexdigest()


def _side(meta: PayloadMeta, payload: Payload) -> dict[str, Any]:
    k_hash, v_hash = kv_digests(payload)
    return {
        "rid": meta.rid,
        "prompt_len": meta.prompt_len,
        "cached_prefix_len": meta.cached_prefix_len,
        "token_range": list(meta.token_range),
        "req_pool_idx": meta.row,
        "kv_indices": _slots(meta.slots),
        "layout": asdict(meta.layout),
        "payload_total_bytes": payload.nbytes,
        "k_hash": k_hash,
        "v_hash": v_hash,
    }


def _slots(slots: Slots) -> dict[str, Any]:
    return {
        "shape": list(slots.shape),
        "dtype": str(slots.dtype),
        "first": slots[:HEAD].tolist(),
        "min": int(slots.min()) if len(slots) else None,
        "max": int(slots.max()) if len(slots) else None,
    }


def _emit(event: str, **fields: Any) -> None:
    log.info("%s", json.dumps({"event": event, **fields}, ensure_ascii=False))
