"""Values that tests of deployments/ hand around: a request, a delta, statistics, what a replica says of itself."""

import numpy as np

from deployments.dispatch.leases import ReplicaInfo
from replicas.types import (
    EngineStats,
    Finish,
    GenerateRequest,
    PoolStats,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from routing.types import Role


def ask(
    *,
    rid: str = "a1.0-me",
    max_new_tokens: int = 8,
    n: int = 1,
    deadline_s: float | None = None,
    objective_s: float | None = None,
    num_tokens: int = 4,
    offline: bool = False,
    tenant: str = "",
) -> GenerateRequest:
    """A request of 4 prompt tokens: 1, 2, 3, 4."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, n=n, seed=7)
    token_ids = np.arange(1, num_tokens + 1, dtype=np.int32)
    return GenerateRequest(
        rid=rid, token_ids=token_ids, sampling=sampling, deadline_s=deadline_s, objective_s=objective_s,
        offline=offline, tenant=tenant,
    )  # fmt: skip


def token(request: GenerateRequest, index: int, position: int, finish: Finish | None) -> TokenDelta:
    usage = Usage(prompt_tokens=len(request.token_ids), completion_tokens=position + 1, cached_tokens=0)
    return TokenDelta(
        rid=request.rid,
        index=index,
        token_ids=(1000 + position,),
        text=f"<{position}>",
        prompt_logprobs=() if position else prompt_logprobs(request),
        usage=usage,
        finish=finish,
    )


def ids(deltas: list[TokenDelta], index: int = 0) -> list[int]:
    """The token ids of choice ``index``."""
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob, ...]:
    """As asked for, each of the same value."""
    if request.prompt_logprobs_from is None:
        return ()
    top = tuple((1000 + token, -1.5) for token in range(request.top_logprobs))
    return tuple(
        TokenLogprob(token_id=int(token), logprob=-1.25, top=top)
        for token in request.token_ids[request.prompt_logprobs_from :]
    )


def stats(num_pages: int = 10, **changes: int | float) -> EngineStats:
    pool = PoolStats(
        page_size=16, num_pages=num_pages, free_pages=num_pages, evictable_pages=0, protected_pages=0, reserved_pages=0
    )
    counters = dict.fromkeys(
        [
            "num_waiting", "num_running", "waiting_uncached_tokens", "cache_nodes", "cache_event_seq", "num_finished",
            "num_aborted", "num_errors", "num_retractions", "retracted_tokens", "prefill_tokens", "cached_tokens",
            "lookup_tokens", "decode_tokens", "evicted_tokens", "num_extend_steps", "num_decode_steps",
            "alloc_failures",
        ],
        0,
    )  # fmt: skip
    seconds = dict.fromkeys(["extend_s", "decode_s", "prefill_tokens_per_s", "decode_step_s"], 0.0)
    values = {"time_s": 1.0, "max_running_requests": 4, **counters, **seconds, **changes}
    return EngineStats(pool=pool, **values)  # type: ignore[arg-type]


def info(replica_id: str, role: Role = Role.UNIFIED) -> ReplicaInfo:
    return ReplicaInfo(
        role=role,
        replica_id=replica_id,
        node_id="here",
        pid=1,
        model_path="models/none",
        architecture="None",
        dtype="float32",
        context_len=128,
        vocab_size=2000,
        max_prompt_tokens=127,
        tp=1,
        page_size=16,
        attention="cpu",
        attention_why="the fast one of this device",
        kernels="avx2",
        products="own",
        num_threads=1,
        pool="160 tokens, 10 pages, 0 MiB",
    )
