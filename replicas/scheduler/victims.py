"""Victims: which requests must leave for what another one needs, and why.

Owns:      the table of reasons. Adding one is a function and an entry.
Never:     retracts anything (decode.py does), or says when something is needed: scheduler.py, prefill.py and decode.py
           ask.
Invariant: no prefill leg that has begun is a victim: a peer may be reading its pages. Of a need's reasons the first
           that finds a victim counts.
Thread:    scheduler thread only.
"""

import enum
from collections.abc import Callable

from replicas.cache.kv import KvCache
from replicas.request import Req, below
from replicas.scheduler.precedence import beyond_share
from replicas.scheduler.queues import Queues


class Need(enum.Enum):
    """What a request needs that others have."""

    STEP = "the next step, which one in the middle of its prompt would have first: for the highest class that waits"
    TURN = "the same, for the request that its tenant would run next"
    TIME = "the same, for one that can have its first token in time, where the one mid-prompt cannot"
    PLACE = "a row, for the request that its tenant would run next"
    PAGES = "pages, for the request that its tenant would run next"
    ROOM = "a row or pages, for a request that could begin now"
    ADAPTER = "room for its adapter"
    TOKEN = "pages for one more token of each running request"


Reason = Callable[[Need, Req, Queues, KvCache], list[Req]]


def victims(need: Need, req: Req, queues: Queues, kv: KvCache) -> list[Req]:
    """Choose the requests that leave so that ``req`` has what it needs; none where no reason finds any."""
    return next((found for reason in REASONS[need] if (found := reason(need, req, queues, kv))), [])


def _mid_prompt_of_a_lower_class(need: Need, req: Req, queues: Queues, kv: KvCache) -> list[Req]:
    chunked = queues.chunked
    return [] if chunked is None or chunked.is_prefill_leg else below([chunked], req)


def _mid_prompt_that_is_kept(need: Need, req: Req, queues: Queues, kv: KvCache) -> list[Req]:
    """Only where its pages stay cached: else two such prompts would begin anew by turns."""
    chunked = queues.chunked
    if chunked is None or chunked.is_prefill_leg or not kv.keeps(chunked, whole=need is Need.TIME):
        return []
    return [chunked]


def _mid_prompt_of_a_tenant_that_had_more(need: Need, req: Req, queues: Queues, kv: KvCache) -> list[Req]:
    found = _mid_prompt_that_is_kept(need, req, queues, kv)
    return found if found and queues.waiting.shares.goes_before(req, found[0]) else []


def _one_of_a_lower_class(need: Need, req: Req, queues: Queues, kv: KvCache) -> list[Req]:
    lower = below(queues.decoding, req)
    return [min(lower, key=lambda each: (each.level, retracted_first(each)))] if lower else []


def _those_of_lower_classes_with_adapters(need: Need, req: Req, queues: Queues, kv: KvCache) -> list[Req]:
    lower = below(queues.decoding, req)
    return queues.adapters.in_the_way(req, lower, queues.holding) if lower and queues.adapters is not None else []


def _one_of_the_tenant_beyond_its_share(need: Need, req: Req, queues: Queues, kv: KvCache) -> list[Req]:
    """Choose one of the tenant that has most beyond its share, by places or tokens, if it keeps that share and the
    tenant of ``req`` stays within its own."""

    def size(each: Req) -> int:
        return each.num_tokens if need is Need.PAGES else 1

    running = [each for each in queues.decoding if not each.in_background]
    beyond = beyond_share(running, size, head=req)
    most = max(beyond, key=lambda tenant: beyond[tenant])
    if beyond[req.asked.tenant] + size(req) > 0:
        return []
    able = (each for each in running if each.asked.tenant == most and each.rank.priority <= req.rank.priority)
    found = min((each for each in able if size(each) <= beyond[most]), key=retracted_first, default=None)
    return [] if found is None else [found]


def _the_only_other_prompt(need: Need, req: Req, queues: Queues, kv: KvCache) -> list[Req]:
    """The prompt in progress, where one request runs that is of no lower class: that one keeps going."""
    chunked = queues.chunked
    alone = len(queues.decoding) == 1 and not below(queues.begun, req)
    if not alone or chunked is None or chunked.is_prefill_leg or below(queues.decoding, chunked):
        return []
    return [chunked]


def _the_one_that_others_need_least(need: Need, req: Req, queues: Queues, kv: KvCache) -> list[Req]:
    """By class and priority, then of the tenant that has most beyond its share; ``req`` is of the highest class."""
    holders = [*queues.decoding, *below(queues.begun, req)]
    beyond = beyond_share(holders, lambda each: each.num_tokens)

    def value(each: Req) -> tuple[int, int, float, tuple[int, int, int]]:
        return (each.level, each.rank.priority, -beyond[each.asked.tenant], retracted_first(each))

    return [min(holders, key=value)]


def retracted_first(req: Req) -> tuple[int, int, int]:
    """Lowest priority, then least output, then longest prompt (SPEC F11)."""
    return (req.rank.priority, req.num_output, -req.prompt_len)


REASONS: dict[Need, tuple[Reason, ...]] = {
    Need.STEP: (_mid_prompt_of_a_lower_class,),
    Need.TURN: (_mid_prompt_of_a_tenant_that_had_more,),
    Need.TIME: (_mid_prompt_that_is_kept,),
    Need.PLACE: (_one_of_the_tenant_beyond_its_share,),
    Need.PAGES: (_one_of_the_tenant_beyond_its_share,),
    Need.ROOM: (_one_of_a_lower_class,),
    Need.ADAPTER: (_those_of_lower_classes_with_adapters,),
    Need.TOKEN: (_the_only_other_prompt, _the_one_that_others_need_least),
}
