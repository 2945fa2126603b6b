"""Extracts a request of a running engine as a `ReplaySnapshot`, and restores one in another engine.

Owns:      what a snapshot contains of a request, and how a snapshot becomes a request again.
Never:     knows the file (kvtransfer/replay/snapshot.py) or a device (engine.executor.kv_bytes reaches the pool).
Invariant: a restored request makes the tokens that the undisturbed one would have made, whatever the page size and the
           number of ranks here: it goes on from the very bytes of its K/V, never from a prefix that is cached here.
Thread:    the engine's, between two steps (`EngineLoop.run_on_engine`).

    extract:  Req, its table row, its K/V ──> ReplaySnapshot                        the request itself goes on
    restore:  ReplaySnapshot ─┬─ no K/V ─────────> submitted as resumed               WAITING
                              └─ row, pages, K/V ─┬─ in the middle of its prompt ──> PREFILLING
                                                  └─ in the middle of its answer ──> RUNNING
"""

from dataclasses import asdict, fields
from typing import Any

import numpy as np

from kvtransfer.errors import BadSnapshot
from kvtransfer.replay.payload import KvBytes, Payload, PayloadMeta, Slots, payload_shape, require_same_meaning
from kvtransfer.replay.snapshot import ReplaySnapshot
from replicas.engine.engine import Engine
from replicas.errors import InvalidRequest, Overloaded, PagesExhausted, RowsExhausted
from replicas.request import CachedTokens, Req, ReqState
from replicas.types import AdapterRef, Constraint, GenerateRequest, PoolingParams, SamplingParams, TokenDelta

TAKEN_FROM = frozenset({ReqState.WAITING, ReqState.PREFILLING, ReqState.RUNNING})


def extract(engine: Engine, rid: str, index: int = 0) -> ReplaySnapshot:
    """Copy choice ``index`` of open request ``rid``, which goes on. Its deadline is not kept.

    Raises: InvalidRequest when it is not open, or just being handed from one replica to another.
    """
    req = engine.find(rid, index)
    if req is None or req.state not in TAKEN_FROM:
        there = f"is {req.state.value}" if req is not None else f"is not open; open: {sorted(engine.open_rids)[:8]}"
        raise InvalidRequest(f"choice {index} of request {rid!r} {there}: a snapshot needs one that waits or runs")
    pooling = req.sampling.pooling
    # logprobs of the prompt, the mean of its hidden states, and recurrent states are made anew, from its beginning
    again = req.prompt_logprobs_from is not None or (pooling is not None and pooling.method == "mean")
    again = again or bool(engine.config.model.states)
    meta, kv = extract_from_kvpool(engine, req, (0, 0 if again else req.computed_len))
    return ReplaySnapshot(
        prompt_ids=req.ids[: req.prompt_len].copy(),
        output_ids=req.output_ids.copy(),
        tokenizer=engine.tokenizer.digest,
        chat_template=engine.tokenizer.template_digest,
        device=engine.config.device,
        cached=req.cached.by_tier,
        sampling=asdict(req.sampling),
        eos_ids=tuple(sorted(engine.config.model.eos_ids)),
        salt=req.salt if req.asked.adapter is None else req.salt.removeprefix(req.asked.adapter.space),
        adapter={} if req.asked.adapter is None else asdict(req.asked.adapter),
        priority=req.rank.priority,
        return_logprobs=req.return_logprobs,
        top_logprobs=req.top_logprobs,
        prompt_logprobs_from=req.prompt_logprobs_from,
        meta=meta,
        kv=kv,
    )


def restore(engine: Engine, snapshot: ReplaySnapshot, *, rid: str | None = None) -> list[TokenDelta]:
    """Continue ``snapshot`` as request ``rid`` (its own name by default), choice 0: `Engine.step` makes its deltas,
    which begin where those of the snapshot's request ended.

    Returns: the last delta, where nothing is left to make.
    Raises:  IncompatibleLayout for another model's; BadSnapshot for one of another tokenizer, chat template or device,
             or with parameters that this release does not know; Overloaded when row or pages are taken now; else as
             `Engine.submit`. Nothing is held then.
    """
    require_same_meaning(_port(engine).layout, snapshot.meta.layout)
    _require_same_text(engine, snapshot)
    eos_ids = tuple(sorted(engine.config.model.eos_ids))
    if snapshot.eos_ids != eos_ids:
        raise BadSnapshot(f"answers ended at ids {snapshot.eos_ids} where it was taken, and end at {eos_ids} here")
    request = GenerateRequest(
        rid=snapshot.rid if rid is None else rid,
        token_ids=snapshot.prompt_ids,
        sampling=_sampling(dict(snapshot.sampling)),
        cache_salt=snapshot.salt,
        adapter=AdapterRef(**snapshot.adapter) if snapshot.adapter else None,
        priority=snapshot.priority,
        return_logprobs=snapshot.return_logprobs,
        top_logprobs=snapshot.top_logprobs,
        prompt_logprobs_from=snapshot.prompt_logprobs_from,
        resumed_ids=tuple(snapshot.output_ids.tolist()),
    )
    if snapshot.meta.num_tokens == 0:
        return engine.submit(request)
    return engine.submit(request, place=lambda req: _place(engine, req, snapshot))


def _require_same_text(engine: Engine, snapshot: ReplaySnapshot) -> None:
    """Raises: BadSnapshot that names what differs."""
    if snapshot.device != engine.config.device:
        raise BadSnapshot(
            f"it was taken on a device of kind {snapshot.device}, and this engine runs on {engine.config.device}: "
            "their logits differ in the last bits, and the same seed may draw other tokens"
        )
    here = engine.tokenizer
    for what, there, ours in (
        ("tokenizer", snapshot.tokenizer, here.digest),
        ("chat template", snapshot.chat_template, here.template_digest),
    ):
        if there != ours:
            raise BadSnapshot(f"another {what} was used where it was taken: {there}, {ours} here; load the same one")


def extract_from_kvpool(engine: Engine, req: Req, token_range: tuple[int, int]) -> tuple[PayloadMeta, Payload]:
    """Copy the K/V of tokens [start, end) of ``req``, which must be computed (SPEC H17)."""
    start, end = token_range
    if not 0 <= start <= end <= req.computed_len:
        raise ValueError(f"request {req.rid}: K/V of [{start}, {end}) is wanted, of [0, {req.computed_len}) is there")
    gone_len = 0 if req.holding is None else req.holding.behind.gone_len
    if start < min(gone_len, end):
        raise InvalidRequest(
            f"request {req.rid}: the K/V of its first {gone_len} tokens was given back: no layer's window "
            "reaches them; take a snapshot sooner"
        )
    port = _port(engine)
    slots = engine.kv.slots_of(req, start, end) if end > start else np.empty(0, dtype=np.int32)
    meta = PayloadMeta(
        rid=req.rid,
        layout=port.layout,
        prompt_len=req.prompt_len,
        cached_prefix_len=req.cached_tokens,
        token_range=token_range,
        row=req.holding.row if req.holding is not None else 0,
        slots=slots,
    )
    return meta, port.read(slots) if end > start else np.empty(payload_shape(port.layout, 0), dtype=np.uint8)


def restore_to_kvpool(engine: Engine, req: Req, meta: PayloadMeta, payload: Payload) -> Slots:
    """Undo `extract_from_kvpool`, bit for bit, into slots of ``req``'s own; missing slots are taken.

    Returns: [n] the slots, in this pool (SPEC H14, H17); ``req.computed_len`` is the caller's to set.
    Raises:  IncompatibleLayout; ValueError where the range leaves a hole or lies in pages that are shared;
             PagesExhausted.
    """
    port, (start, end) = _port(engine), meta.token_range
    require_same_meaning(port.layout, meta.layout)
    assert req.holding is not None, f"request {req.rid} holds nothing: admit it first"
    if not req.holding.prefix_len <= start <= req.holding.kv_len:
        raise ValueError(
            f"request {req.rid}: K/V of [{start}, {end}) cannot be put back: tokens below {req.holding.prefix_len} lie "
            f"in shared pages, and a range must start within the {req.holding.kv_len} tokens that have slots"
        )
    if end > req.holding.kv_len:
        engine.kv.extend(req, end)
    slots = engine.kv.slots_of(req, start, end)
    port.write(slots, payload)
    return slots


def _place(engine: Engine, req: Req, snapshot: ReplaySnapshot) -> None:
    """Give ``req`` its K/V and put it into the queue that fits its state."""
    queues, max_running, num_computed = engine.scheduler.queues, engine.scheduler.max_running, snapshot.meta.num_tokens
    answering = req.num_output > 0 and num_computed == req.num_tokens - 1
    if len(queues.running) + len(queues.forced) + (queues.chunked is not None) >= max_running:
        raise Overloaded(f"{max_running} requests run, and no more may: restore it when one has ended")
    if not answering and queues.chunked is not None:
        raise Overloaded("another prompt is being computed, and one at a time is: restore it a few steps later")
    try:
        engine.kv.admit(req, reuse=False)
        restore_to_kvpool(engine, req, snapshot.meta, snapshot.kv)
    except BaseException as error:
        if req.holding is not None:
            engine.kv.release(req, keep=False)
        if isinstance(error, PagesExhausted | RowsExhausted):
            raise Overloaded(f"no room for a snapshot of {num_computed} tokens: {error}") from error
        raise
    req.computed_len = num_computed
    req.cached = CachedTokens.from_tiers(snapshot.cached, prompt_len=req.prompt_len)
    req.stamps.admitted_s = req.stamps.arrival_s
    req.move(ReqState.PREFILLING)
    if answering:
        req.stamps.first_token_s = req.stamps.arrival_s
        req.move(ReqState.RUNNING)
        queues.running.append(req)
    else:
        queues.chunked = req


def _sampling(values: dict[str, Any]) -> SamplingParams:
    """Convert JSON values to parameters."""
    known = {f.name for f in fields(SamplingParams)}
    if values.keys() != known:
        raise BadSnapshot(
            f"sampling parameters {sorted(values.keys() - known)} are not known here, and "
            f"{sorted(known - values.keys())} are missing: use the release that took it"
        )
    for name in ("stop", "stop_token_ids"):
        values[name] = tuple(values[name])
    if values["allowed_token_ids"] is not None:
        values["allowed_token_ids"] = tuple(values["allowed_token_ids"])
    values["bad_words"] = tuple(tuple(word) for word in values["bad_words"])
    values["logit_bias"] = tuple((token, bias) for token, bias in values["logit_bias"])
    if values["constraint"] is not None:
        values["constraint"] = Constraint(**values["constraint"])
    if values["pooling"] is not None:
        values["pooling"] = PoolingParams(**{**values["pooling"], "labels": tuple(values["pooling"]["labels"])})
    return SamplingParams(**values)


def _port(engine: Engine) -> KvBytes:
    if engine.kv.store.size.windows is not None:
        raise InvalidRequest(
            "a snapshot holds the K/V of whole pages, and this engine keeps that of window layers apart: give it "
            "cache.host_memory_bytes, and it keeps them together"
        )
    if engine.executor.kv_bytes is None:
        raise InvalidRequest("this engine was built without access to its K/V bytes: use replicas.launch.load_engine")
    return engine.executor.kv_bytes
