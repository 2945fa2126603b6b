"""Applies the result of a step to each request: counts tokens, gives pages to the tree, appends and ends.

Owns:      nothing; moves requests from prefill to the running batch, or to the KV transfer queue.
Never:     chooses what runs, or ends a request: the scheduler does.
Invariant: a request of the step gets one sampled token, or none, and behind it those of its draft that came true; the
           requests come in the order of the plan's rows.
Thread:    scheduler thread only.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import NamedTuple

from replicas.cache.kv import KvCache
from replicas.errors import Fault, Overloaded
from replicas.request import Req, ReqState
from replicas.scheduler.budget import forced_tokens
from replicas.scheduler.plan import BROKEN, DecodePlan, ExtendPlan, StepPlan, StepResult
from replicas.scheduler.queues import Queues
from replicas.types import Constraint, Finish, FinishReason, PoolingParams, TokenLogprob

log = logging.getLogger(__name__)

LONG_MASK_S = 0.002  # of CPU: a mask that takes less is computed beside any step
SOURCES = ("tree", "text")  # of drafts: what the cache keeps behind a request's tokens; its own prompt and output

BROKEN_LOGITS = (
    "no token can be chosen: the logits hold NaN or inf, or all are masked out. The weights are broken, activations "
    "overflow their dtype (try float32 or bfloat16), or the penalties are extreme"
)

NOTHING_ALLOWED = (
    "no token can be chosen: the constraint allows none that allowed_token_ids and bad_words allow too, or the logits "
    "hold NaN or inf"
)


Drawn = tuple[int, TokenLogprob | None]  # a token, and its logprob where that was asked for


class NewToken(NamedTuple):
    """One sampled token of one request, and what came with it; ``req.finish`` is set when they were its last."""

    req: Req
    token_id: int | None  # None: no output was wanted, its logits are broken, or only news of a KV transfer is reported
    logprob: TokenLogprob | None
    more: tuple[Drawn, ...] = ()  # the tokens after it: drawn as its draft says, then forced by the grammar: no logprob
    num_accepted: int = 0  # of those, drawn as its draft says


Counters = dict[str, int]  # what the scheduler counted since it started, by the names of COUNTERS; values only grow
COUNTERS = (
    "finished",
    "aborted",
    "errors",
    "retractions",
    "retracted_tokens",
    "prefill_tokens",
    "cached_tokens",
    "host_tokens",  # of cached_tokens, loaded from host memory
    "store_tokens",  # of cached_tokens, read from the store
    "lookup_tokens",
    "decode_tokens",
    "constrained",  # requests, those included whose grammar could not be compiled
    "forced_tokens",  # of outputs, taken without a choice
    "begun_where_short",  # requests that began in a look at the queue that refused another for a place or pages
    *(f"drafted_tokens.{source}" for source in SOURCES),  # that rows tried
    *(f"accepted_tokens.{source}" for source in SOURCES),  # of them
)
AT_FAULT = ("step_failed", "overloaded")  # `Finish.retry_as` of a request that failed in a step by itself (`at_fault`)
ENDS = {FinishReason.ABORT: "aborted", FinishReason.ERROR: "errors"}  # the counter of an end; of every other "finished"


def count_computed(plan: StepPlan, result: StepResult, reqs: list[Req], queues: Queues, kv: KvCache) -> tuple[int, int]:
    """Take in what a step computed: lengths, logprobs of prompts, whole pages to the tree; finished prompts move on.

    Args:    reqs: [B] of the plan's rows, in order. A request that has ended since the step was planned is passed over.
    Returns: tokens of prompts and of running requests that were computed.
    """
    num_prompts = num_prompt_tokens = num_decode_tokens = 0
    shares = queues.waiting.shares
    if isinstance(plan, ExtendPlan):
        num_prompts = len(reqs) - plan.num_decode
        for index in range(num_prompts):
            req, row = reqs[index], plan.rows[index]
            if req.finish is None:
                if index < plan.num_forced:
                    num_decode_tokens += len(row.token_ids)
                else:
                    num_prompt_tokens += len(row.token_ids)
                req.computed_len += len(row.token_ids)
                shares.charge(req, len(row.token_ids))
                req.prompt_logprobs += result.prompt_logprobs.get(index, ())
                kv.commit(req)
                if row.sample:
                    _end_prompt(req, queues)
    for req in reqs[num_prompts:]:
        if req.finish is None:
            req.computed_len += 1
            shares.charge(req, 1)
            num_decode_tokens += 1
    return num_prompt_tokens, num_decode_tokens


def _end_prompt(req: Req, queues: Queues) -> None:
    """Move ``req``, whose prompt or forced run is computed, to where it goes on."""
    req.prompt_logprobs_from = None  # all made; a retracted request need not make them again
    if req.is_prefill_leg:
        req.move(ReqState.HANDING_OFF)
        queues.away.add(req)
    else:
        req.move(ReqState.RUNNING)
        queues.running.append(req)


def sampled(plan: StepPlan, result: StepResult, reqs: list[Req]) -> Iterator[tuple[Req, Sequence[Drawn]]]:
    """Pair each open request of the step that was sampled with its token, and with those behind it that its draft had
    right; ``reqs`` as in `count_computed`."""
    rows = reqs
    if isinstance(plan, ExtendPlan):
        rows = [req for req, row in zip(reqs, plan.rows, strict=True) if row.sample]
    logprobs = result.logprobs or (None,) * len(result.token_ids)
    drawn = list(zip(result.token_ids.tolist(), logprobs, strict=True))
    if isinstance(plan, DecodePlan) and plan.draft_rows:
        runs: Iterable[Sequence[Drawn]] = (_run(plan, drawn, request) for request in range(len(rows)))
    else:
        assert len(drawn) == len(rows), f"{len(drawn)} tokens were sampled for {len(rows)} rows"
        runs = ((each,) for each in drawn)
    for req, run in zip(rows, runs, strict=True):
        if req.finish is None:
            yield req, run


def _run(plan: DecodePlan, drawn: Sequence[Drawn], request: int) -> list[Drawn]:
    """Collect what a request drew, up to the first row whose input is another token than was drawn before it. A broken
    row of its draft is left to the step in which it has no draft before it."""
    run = [drawn[request]]
    for row in plan.draft_rows[request]:
        if plan.token_ids[row] != run[-1][0] or drawn[row][0] == BROKEN:
            break
        run.append(drawn[row])
    return run


Forced = Callable[[Req], tuple[tuple[Drawn, ...], Finish | None]]  # as `jump`


def next_token(req: Req, run: Sequence[Drawn], forced: Forced, *, now_s: float) -> tuple[NewToken, Finish | None]:
    """Give ``req`` the first token of ``run``, and what is behind it: drawn as its draft says, then ``forced``.
    Returns: these, and its end."""
    token_id, logprob = run[0]
    if req.stamps.first_token_s is None:
        req.stamps.first_token_s = now_s
    if token_id == BROKEN or req.max_remaining <= 0:
        return NewToken(req, None, None), end_without_token(req)
    if req.state is ReqState.HANDING_OFF:  # the receiver appends it
        return NewToken(req, token_id, logprob), None
    (_, *accepted), finish = take_drawn(req, run)
    more: tuple[Drawn, ...] = ()
    if finish is None and req.guide is not None:
        more, finish = forced(req)
    return NewToken(req, token_id, logprob, (*accepted, *more), len(accepted)), finish


def take_drawn(req: Req, run: Sequence[Drawn]) -> tuple[tuple[Drawn, ...], Finish | None]:
    """Append the next token of ``req`` and what it drew behind it, up to what ends it. Returns: these, and the end."""
    for index, (token_id, _) in enumerate(run):
        req.computed_len += index > 0  # the token before was the input of this one's row
        req.append(token_id)
        finish = stop_reason(req)
        if finish is None and req.guide is not None and not req.guide.consume(token_id):
            finish = not_allowed(str(req.guide.error))
        if finish is not None:
            return tuple(run[: index + 1]), finish
    return tuple(run), None


def end_without_token(req: Req) -> Finish:
    """Tell why ``req`` ends with the token that was sampled for it, which its caller does not get."""
    if req.max_remaining <= 0:
        return Finish(reason=FinishReason.LENGTH)  # no output was wanted
    if req.guide is not None:
        return not_allowed(req.guide.error or NOTHING_ALLOWED)
    return Finish(reason=FinishReason.ERROR, message=BROKEN_LOGITS, fault=Fault.INTERNAL)


def require_fault(error: BaseException) -> None:
    """Raise ``error`` again if it is about this process, and no fault. A panic of llguidance is no Exception either."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error


def at_fault(req: Req, error: BaseException) -> Finish:
    """Return the end of ``req``, which failed with ``error`` by itself, and log the fields that it asks for. One for
    which memory was short may do elsewhere."""
    require_fault(error)
    if isinstance(error, Overloaded):
        log.error("request %s, choice %d, ends: %s; it asks for %s", req.rid, req.index, error, _asked(req))
        return Finish(reason=FinishReason.ERROR, message=str(error), fault=error.fault, retry_as="overloaded")
    why, asked = f"a step failed with {type(error).__name__}: {error}", _asked(req)
    log.error("request %s, choice %d, ends: %s; it asks for %s", req.rid, req.index, why, asked, exc_info=error)
    return Finish(reason=FinishReason.ERROR, message=why, fault=Fault.INTERNAL, retry_as="step_failed")


def _asked(req: Req) -> str:
    """List what ``req`` asks for without any text or token of it: of these only how many there are."""
    names = ("prompt_len", "num_output", "num_resumed", "return_logprobs", "top_logprobs", "prompt_logprobs_from")
    asked: dict[str, object] = {name: getattr(req, name) for name in names}
    asked |= {"leg": req.leg and req.leg.role.value, "adapter": req.asked.adapter and req.asked.adapter.identity}
    for each in fields(req.sampling):
        value = getattr(req.sampling, each.name)
        if value == each.default:
            continue
        if isinstance(value, Constraint):
            value = value.kind
        elif isinstance(value, PoolingParams):
            value = value.method or f"{len(value.labels)} labels"
        elif isinstance(value, tuple):
            value = len(value)
        asked[each.name] = value
    return ", ".join(f"{name}={value}" for name, value in asked.items() if value is not None)


def not_allowed(message: str) -> Finish:
    """Tell why a constrained request ends in the midst of its output."""
    return Finish(reason=FinishReason.ERROR, message=f"the constrained output ended: {message}", fault=Fault.INVALID)


def take_forced(req: Req, most: int) -> tuple[tuple[Drawn, ...], Finish | None]:
    """Append the tokens that the grammar of ``req`` forces next, at most ``most``. Returns: them, and its end.

    Each is the only token that the mask would leave, so the output is what steps of one token make; where something
    else could mask it out too, nothing is taken.
    """
    guide, sampling, taken = req.guide, req.sampling, list[Drawn]()
    finish: Finish | None = None
    if guide is None or sampling.allowed_token_ids is not None or sampling.bad_words:
        return (), None
    while finish is None and len(taken) < most and (token_id := guide.forced()) is not None:
        req.append(token_id)
        taken.append((token_id, None))
        finish = stop_reason(req)
        if finish is None and not guide.consume(token_id):
            finish = not_allowed(str(guide.error))
    return tuple(taken), finish


def jump(
    req: Req, queues: Queues, counters: Counters, *, chunk_size: int, page_size: int
) -> tuple[tuple[Drawn, ...], Finish | None]:
    """Take the tokens that the grammar of ``req``, which runs, forces next; the next step computes them. Returns: them,
    and its end."""
    if req.guide is not None and req.guide.mask_s > LONG_MASK_S:
        return (), None  # the step that extends it would wait for the mask behind the run
    num_forced = sum(each.extend_len for each in queues.forced)
    most = forced_tokens(chunk_size, len(queues.running), num_forced, page_size=page_size)
    forced, finish = take_forced(req, most)
    counters["forced_tokens"] += len(forced)
    if forced and finish is None:
        queues.running.remove(req)
        req.move(ReqState.PREFILLING)
        queues.forced.append(req)
    return forced, finish


def stop_reason(req: Req) -> Finish | None:
    """Tell whether the last token of ``req`` ends it by id or by length; stop strings are the detokenizer's."""
    num_output, stop_ids = req.num_output, req.stop_ids
    least = 1 if req.guide is not None else max(1, req.sampling.min_new_tokens)  # a grammar that is over ends it sooner
    if stop_ids and num_output >= least:
        last = int(req.ids[req.num_tokens - 1])
        if last in stop_ids:
            return Finish(reason=FinishReason.STOP, matched=last)
    if num_output >= req.sampling.max_new_tokens:
        return Finish(reason=FinishReason.LENGTH)
    return None
