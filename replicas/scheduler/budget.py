"""Budget: how many tokens each request may have, of the next step (`budget`) and of the pool.

Owns:      the tokens of one step that are not given yet (`StepBudget`), the table of what lowers a prompt's part of
           them (`PARTS`: another bound is a function and an entry), and the share of output that is reserved. Moves
           decode legs from the prealloc queue to the KV transfer queue, when their row and pages fit.
Never:     chooses which request goes first, or talks to the sender of a leg (replicas/disagg).
Invariant: forced runs take of a step's tokens first, then the prompt in progress, then those that begin. Running
           requests have their token whatever prompts take. Nothing is granted that could not finish. Legs that wait
           for their sender never hold every row, however long its queue is, so local requests continue. Pages that a
           peer may still touch leave a request through quarantine.
Thread:    scheduler thread only.

The memory rule (SPEC F05): a request is admitted when the tokens it still has to run, plus the share
``new_token_ratio`` of the output it may still make, fit what is free or evictable after the same share is reserved for
each running request. The ratio decays from step to step, and jumps up when a request had to be retracted.

The two legs of a KV transfer; the functions of replicas/disagg/roles.py that the arrows name, and the scheduler's:

    ask_grant ─> PreallocQueue ──grant──> PdTransferQueue, RECEIVING ─┬─ received ─> running
                                                                      └─ give_up ──────> WaitingQueue
    park ─> PdTransferQueue, WAITING ──unpark──> WaitingQueue ... last chunk ─> PdTransferQueue, HANDING_OFF ─ finish
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from replicas.cache.kv import KvCache, handed_len
from replicas.config import SchedulerConfig
from replicas.errors import PagesExhausted
from replicas.request import Req, ReqState
from replicas.scheduler.plan import LOGITS_CHUNK
from replicas.scheduler.precedence import Precedence, WaitingQueue
from replicas.scheduler.queues import Queues
from replicas.types import PdLeg

CLIP_NEW_TOKENS = 4096  # no request reserves more output than this: most stop long before a large limit (SGLang)
MAX_FORCED = 64  # tokens of a run that are taken at once


def least_prompt_tokens(chunk_size: int) -> int:
    """Count the tokens that every step leaves to prompts (a quarter), however many requests run."""
    return -(-chunk_size // 4)


def prompt_tokens(chunk_size: int, num_decode: int, *, page_size: int) -> int:
    """Count the tokens that a step leaves to prompts, beside one for each of ``num_decode`` running requests.

    A step with running requests has half as many tokens: they wait for the whole step, and prompts lose little by it
    (measured: docs/performance.md, Mixed steps). Prompts get whole pages, since their chunks end with pages: the last
    page is filled rather than left.
    """
    if num_decode == 0:
        return chunk_size
    left = max(chunk_size // 2 - num_decode, least_prompt_tokens(chunk_size))
    return -(-left // page_size) * page_size if chunk_size // 2 >= page_size else left


def run_tokens(chunk_size: int, num_decode: int, *, page_size: int) -> int:
    """Count the tokens that forced runs may take of `prompt_tokens`: half, and so that a prompt gets a page, without
    which it may not go on."""
    left = prompt_tokens(chunk_size, num_decode, page_size=page_size)
    return min(left // 2, left - page_size) if left >= page_size else left // 2


def forced_tokens(chunk_size: int, num_running: int, num_forced: int, *, page_size: int) -> int:
    """Count the tokens that a grammar may force on one more request, beside ``num_forced`` of the step's other runs."""
    return min(MAX_FORCED, run_tokens(chunk_size, num_running, page_size=page_size) - num_forced - 1)


def wanted(req: Req, *, page_size: int, num_logits: int = 0) -> int:
    """Count the next tokens of the prompt of ``req`` that one step may run, if it has room for all. ``num_logits``: the
    prompt tokens whose logprobs the step computes already; beside those it may have none."""
    assert req.holding is not None
    start, want, chunk_end = req.computed_len, req.num_tokens - req.computed_len, req.holding.behind.chunk_end
    if start < chunk_end < start + want:
        want = chunk_end - start
    most = LOGITS_CHUNK - num_logits
    if req.prompt_logprobs_from is not None and want > most:
        want = max(0 if num_logits else 1, (start + most) // page_size * page_size - start)
    return want


class StepBudget:
    """The tokens that one extend step may still run (SPEC F06: the chunk size)."""

    def __init__(self, num_tokens: int, *, page_size: int) -> None:
        self._left = num_tokens
        self._align = page_size if num_tokens >= page_size else 1

    def grant(self, want: int, *, prefix_len: int) -> int:
        """Count how many of ``want`` tokens may run now; a chunk ends on a page boundary, so its pages can be shared.

        Returns: ``want``, or fewer with (prefix_len + granted) a multiple of the page size (unless the whole step is
        smaller than a page), or 0.
        """
        if want <= self._left:
            return want
        return max(0, (prefix_len + self._left) // self._align * self._align - prefix_len)

    def spend(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= self._left
        self._left -= num_tokens

    def lower(self, num_tokens: float) -> None:
        """Leave ``num_tokens`` at most; a step that is now smaller than a page may end inside one."""
        if num_tokens < self._left:
            self._left = int(num_tokens)
            self._align = self._align if self._left >= self._align else 1

    @property
    def empty(self) -> bool:
        return self._left <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """What is known of the next step before its prompts are chosen, and what bounds them beside the pool."""

    chunk_size: int  # most new tokens of a step
    page_size: int
    share_len: int  # a request that shares this many tokens with one of the batch waits for them
    in_flight: list[Req]  # requests that have their pages and may need more: running, or waiting for their K/V
    max_running: int
    running: Sequence[Req]  # of them, those that make a token in the same step
    waiting: WaitingQueue
    now_s: float


def budget(step: NextStep) -> StepBudget:
    """Make the budget of a step: what it leaves to forced runs and prompts."""
    num_tokens = prompt_tokens(step.chunk_size, len(step.running), page_size=step.page_size)
    return StepBudget(num_tokens, page_size=step.page_size)


def throttle(left: StepBudget, req: Req, step: NextStep) -> None:
    """Leave ``req`` what it may have of a step."""
    left.lower(min(part(req, step) for part in PARTS))


def _of_its_class(req: Req, step: NextStep) -> float:
    return max(math.ceil(req.rank.request_class.chunk_share * step.chunk_size), step.page_size)


def _beside_a_tenant_below_its_share(req: Req, step: NextStep) -> float:
    if step.waiting.shares.precedence(req) is Precedence.FIRST and not req.in_background:
        return math.inf
    most = step.waiting.shares.throttle.most_prompt_len(len(step.running), step.now_s, step.waiting.step_times)
    return max(most, step.page_size)


PARTS: tuple[Callable[[Req, NextStep], float], ...] = (_of_its_class, _beside_a_tenant_below_its_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioRule:
    """How the share of possible output that admission reserves moves: where it begins, ends, and its step."""

    initial: float
    floor: float
    decay: float  # of each decode step
    carried_len: Callable[[int], int] = lambda num_tokens: 0  # what a prefill leg needs pages for behind its prompt

    @staticmethod
    def of(config: SchedulerConfig, kv: KvCache) -> "RatioRule":
        return RatioRule(
            initial=config.new_token_ratio,
            floor=config.min_new_token_ratio,
            decay=config.new_token_ratio_decay,
            carried_len=lambda num_tokens: kv.carried.num_pages(num_tokens, kv.page_size) * kv.page_size,
        )


class NewTokenRatio:
    """The share of each request's possible output that admission reserves."""

    def __init__(self, rule: RatioRule) -> None:
        assert 0.0 <= rule.floor <= rule.initial <= 1.0
        self._rule = rule
        self.value = rule.initial

    def decode_step(self) -> None:
        """Decay by one step without a retraction."""
        self.value = max(self._rule.floor, self.value - self._rule.decay)

    def retracted(self, running: Iterable[Req]) -> None:
        """Jump up after a retraction: reserve what the survivors have used so far, and 20 steps more.

        Source: SGLang retract_decode (SPEC F11).
        """
        made = room = 0
        for req in running:
            made += req.num_output + 20
            room += max(1, req.sampling.max_new_tokens)
        self.value = max(self.value, min(1.0, made / room)) if room else self._rule.initial

    def idle(self) -> None:
        """Start afresh, as nothing runs."""
        self.value = self._rule.initial

    def reserve(self, req: Req) -> int:
        """Count the tokens to reserve for the output that ``req`` may still make; a prefill leg makes none here, and
        its states and windows need pages."""
        if req.leg is not None and req.leg.kv_transfer.leg is PdLeg.PREFILL:  # even if it fetches first
            return self._rule.carried_len(req.num_tokens)
        return int(min(req.max_remaining, CLIP_NEW_TOKENS) * self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that grants may use, and what they must leave to others."""

    num_rows: int  # rows that may still be taken
    max_receiving: int  # decode legs that may wait for their K/V at once
    reserved: int  # tokens that the requests in flight may still need
    alone: bool  # nothing is in flight, so waiting frees no memory
    barrier: float | None  # rank of a local request that found no memory; legs that rank after it wait


def grant(queues: Queues, kv: KvCache, ratio: NewTokenRatio, room: Room, *, now_s: float) -> bool:
    """Give row and pages of the whole sequence to the decode legs that fit, by rank; they are RECEIVING then.

    Returns: whether any leg was granted. A head that only ``max_receiving`` stops bars no local request.
    """
    prealloc = queues.prealloc
    prealloc.short = None
    if not len(prealloc):
        return False
    limit = room.max_receiving - len(queues.away.in_state(ReqState.RECEIVING))
    num_granted, reserved, alone = 0, room.reserved, room.alone
    for req in sorted(prealloc, key=lambda req: req.rank.from_s):
        if num_granted >= limit or (room.barrier is not None and req.rank.from_s > room.barrier):
            break
        if queues.adapters is not None and not queues.adapters.ready(req):
            continue
        if num_granted >= room.num_rows or not _take(req, kv, ratio, reserved=reserved, alone=alone):
            prealloc.short = req
            break
        prealloc.remove(req)
        req.move(ReqState.RECEIVING)
        assert req.leg is not None
        req.leg.exposed, req.leg.granted_s = True, now_s
        queues.away.add(req)
        queues.away.granted.append(req)
        num_granted, reserved, alone = num_granted + 1, reserved + ratio.reserve(req), False
    return num_granted > 0


def _take(req: Req, kv: KvCache, ratio: NewTokenRatio, *, reserved: int, alone: bool) -> bool:
    """Take row, locked prefix and pages for ``req``, or nothing."""
    reused = kv.admit(req, whole=True)  # locks the prefix: its pages no longer count as evictable
    end_len = max(handed_len(req, kv), reused)
    need = end_len - reused + (min(1, req.max_remaining) if alone else ratio.reserve(req) + reserved)
    if need <= kv.store.available_tokens():
        try:
            kv.load(req, req.num_tokens, whole=True)
            assert req.holding is not None
            kv.extend(req, max(end_len, req.holding.kv_len))
        except PagesExhausted:
            pass
        else:
            return True
    kv.release(req, keep=False)  # it has computed nothing
    return False


def max_receiving(max_running: int) -> int:
    """How many decode legs may wait for their K/V at once: three quarters of the rows."""
    return max(1, max_running - max(1, max_running // 4))


def let_go(req: Req, kv: KvCache, *, keep: bool) -> None:
    """Take back what ``req`` holds; pages that a peer may still read (prefill leg) or write go to quarantine.

    Args: keep: its computed pages stay in the prefix cache, unless they go to quarantine.
    """
    if req.leg is not None and req.leg.exposed:
        req.leg.detained = kv.quarantine(req, locked=req.is_prefill_leg)
        req.leg.exposed = False
    else:
        kv.release(req, keep=keep)
