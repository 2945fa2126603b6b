"""One engine: requests in, token deltas out, one step at a time. The only file where scheduler and runner meet.

Owns:      the open requests' choices (request + detokenizer) and the clock of the replica.
Never:     waits, sleeps or talks to a network; `loop.py` gives it a thread.
Invariant: every accepted request ends in exactly one delta with ``finish`` per choice.
Thread:    whoever calls `step`; one thread only, except `check` (read-only).

    submit -> Scheduler.submit ┐
    step:   schedule -> plan -> (broadcast) -> ModelRunner.run -> result -> apply -> tokens -> Detokenizer -> TokenDelta
    abort  -> Scheduler.finish ┘
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtransfer.payload import KvBytes
from replicas.cache.events import CacheEvent, CacheSnapshot
from replicas.cache.kv import KvCache
from replicas.config import EngineConfig
from replicas.detokenizer import Detokenizer
from replicas.errors import InvalidRequest, Overloaded, PromptTooLong
from replicas.request import Req
from replicas.scheduler.plan import ExtendPlan, StepPlan, StepResult
from replicas.scheduler.scheduler import NewToken, Scheduler, stop_reason, uncached_tokens
from replicas.stats import StepClock
from replicas.tokenizer import Tokenizer
from replicas.types import EngineStats, Finish, FinishReason, GenerateRequest, TokenDelta, TokenLogprob

CacheEvents = tuple[CacheEvent, ...]  # in order
Execute = Callable[[StepPlan], StepResult]  # runs a plan on all ranks


@dataclass(slots=True, eq=False)
class Choice:
    """One choice of an open request: its sequence and its text."""

    req: Req
    detokenizer: Detokenizer
    prompt_logprobs_due: tuple[TokenLogprob, ...] | None  # what precedes req.prompt_logprobs; None: nothing to send


class Engine:
    """Submit requests, call `step` while `has_work`, hand out the deltas."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv: KvCache,
        max_running: int,
        execute: Execute,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        dead_rank: Callable[[], str | None] = lambda: None,
        close: Callable[[], None] = lambda: None,
        kv_bytes: KvBytes | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.kv = kv
        self.scheduler = Scheduler(kv, config.scheduler, max_running=max_running, clock=clock)
        self._execute = execute
        self._clock = clock
        self._close = close
        self.dead_rank = dead_rank  # a sentence when another rank is gone; any thread may ask
        self.kv_bytes = kv_bytes  # of all ranks; for replay.py
        self._steps = StepClock()
        self._open: dict[str, list[Choice]] = {}
        self._eos_ids = frozenset(config.model.eos_ids)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def open_rids(self) -> list[str]:
        return list(self._open)

    def check(self, request: GenerateRequest) -> None:
        """Whether this engine can ever serve ``request``; touches nothing that changes, so any thread may ask.

        Raises: InvalidRequest, or PromptTooLong with the lengths and what is allowed.
        """
        request.validate(vocab_size=self.config.model.vocab_size)
        if request.resumed_ids and request.sampling.n > 1:
            raise InvalidRequest("resumed_ids: a request with n > 1 is resumed by sending it anew", param="resumed_ids")
        length, most = len(request.token_ids), self._max_len()
        room = 1 if request.sampling.max_new_tokens > 0 else 0
        if length + room > most:
            raise PromptTooLong(
                f"the prompt has {length} tokens; at most {most - room} fit (context length "
                f"{self.config.model.context_len}, KV pool {self._pool_tokens()} tokens): shorten it",
                param="prompt",
            )

    def find(self, rid: str, index: int = 0) -> Req | None:
        """Choice ``index`` of an open request."""
        return next((choice.req for choice in self._open.get(rid, ()) if choice.req.index == index), None)

    def submit(self, request: GenerateRequest, place: Callable[[Req], None] | None = None) -> list[TokenDelta]:
        """Accept a request. Returns: deltas of choices that are already complete (a resumed request may be).

        Args:   place: brings each choice into the scheduler; None lets it wait for its turn. If it raises, nothing was
                accepted (one choice only).
        Raises: as `check`; Overloaded when the waiting queue is full; InvalidRequest for a rid that is open.
        """
        self.check(request)
        if request.rid in self._open:
            raise InvalidRequest(f"rid {request.rid!r} is already open", param="rid")
        limit = self.config.scheduler.max_queued_requests
        if len(self.scheduler.waiting) + request.sampling.n > limit:
            raise Overloaded(f"{len(self.scheduler.waiting)} requests wait, at most {limit} may: try again later")
        choices = [self._choice(request, index) for index in range(request.sampling.n)]
        for choice in choices:
            (place or self.scheduler.submit)(choice.req)
        self._open[request.rid] = choices
        done = []
        for choice in choices:
            finish = self._resumed_finish(choice)
            if finish is not None:
                self.scheduler.finish(choice.req, finish)
                done.append(self._end(choice))
        return done

    def step(self) -> list[TokenDelta]:
        """Run one step: what it added to every choice, and the ends of those whose deadline passed."""
        plan = self.scheduler.schedule()
        deltas = [self._end(self._find(req)) for req in self.scheduler.take_expired()]
        if plan is None:
            return deltas
        started_s = self._clock()
        result = self._execute(plan)
        tokens = self.scheduler.apply(plan, result)
        deltas += [self._push(token) for token in tokens]
        num_new = plan.num_tokens if isinstance(plan, ExtendPlan) else len(plan.rows)
        self._steps.record(self._clock() - started_s, num_new, is_extend=isinstance(plan, ExtendPlan))
        return deltas

    def abort(self, rid: str, message: str = "aborted by the client") -> list[TokenDelta]:
        """End every choice of ``rid``; idempotent. Returns: the final deltas."""
        finish = Finish(reason=FinishReason.ABORT, message=message, http_status=499)
        deltas = []
        for choice in list(self._open.get(rid, ())):
            self.scheduler.finish(choice.req, finish)
            deltas.append(self._end(choice))
        return deltas

    def flush_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing done, while requests are open."""
        if self._open:
            return False
        self.kv.flush()
        return True

    def drain_cache_events(self) -> CacheEvents:
        """What entered and left the prefix cache since the last call; engine thread only."""
        return self.kv.drain_events()

    def cache_snapshot(self) -> CacheSnapshot:
        """What is cached now, for a reader that lost events; engine thread only."""
        return self.kv.snapshot()

    def describe(self) -> str:
        """The pool in one line."""
        pool = self.kv.stats()
        cell = self.config.model.kv_cell_bytes(tp=self.config.parallel.tp, kv_dtype=self.config.kv_dtype)
        mib = pool.total_tokens * cell * self.config.parallel.tp / 2**20
        return f"{pool.total_tokens:,} tokens, {pool.num_pages:,} pages, {mib:,.0f} MiB"

    def stats(self) -> EngineStats:
        """A snapshot; engine thread only."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        chunked = [scheduler.prefill.chunked] if scheduler.prefill.chunked else []
        return EngineStats(
            time_s=self._clock(),
            pool=self.kv.stats(),
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running) + len(chunked),
            max_running_requests=scheduler.max_running,
            waiting_uncached_tokens=uncached_tokens(scheduler.waiting, chunked),
            cache_nodes=self.kv.num_nodes,
            cache_event_seq=self.kv.event_seq,
            num_finished=counters.finished,
            num_aborted=counters.aborted,
            num_errors=counters.errors,
            num_retractions=counters.retractions,
            retracted_tokens=counters.retracted_tokens,
            prefill_tokens=counters.prefill_tokens,
            cached_tokens=counters.cached_tokens,
            lookup_tokens=counters.lookup_tokens,
            decode_tokens=counters.decode_tokens,
            evicted_tokens=self.kv.evicted_tokens,
            num_extend_steps=self._steps.num_extend,
            num_decode_steps=self._steps.num_decode,
            extend_s=self._steps.extend_s,
            decode_s=self._steps.decode_s,
            alloc_failures=self.kv.alloc_failures,
            prefill_tokens_per_s=self._steps.prefill_tokens_per_s,
            decode_step_s=self._steps.decode_step_s,
        )

    def close(self) -> None:
        """Let go of the other ranks; the engine must not be used afterwards."""
        self._close()

    def _pool_tokens(self) -> int:
        return self.kv.capacity_tokens

    def _max_len(self) -> int:
        """Longest prompt + output that can ever be served."""
        return min(self.config.model.context_len, self._pool_tokens())

    def _choice(self, request: GenerateRequest, index: int) -> Choice:
        room = self._max_len() - len(request.token_ids)
        if request.sampling.max_new_tokens > room:  # ends with `length` where the context or the pool ends
            sampling = replace(
                request.sampling, max_new_tokens=room, min_new_tokens=min(request.sampling.min_new_tokens, room)
            )
            request = replace(request, sampling=sampling)
        req = Req.make(request, index=index, now_s=self._clock(), eos_ids=self._eos_ids)
        detokenizer = Detokenizer(
            self.tokenizer,
            stop=req.sampling.stop,
            include_stop=req.sampling.include_stop,
            skip_special_tokens=req.sampling.skip_special_tokens,
        )
        due: tuple[TokenLogprob, ...] | None = None
        if request.prompt_logprobs_from is not None:
            first = TokenLogprob(token_id=int(request.token_ids[0]), logprob=None)  # nothing precedes it
            due = (first,) if request.prompt_logprobs_from == 0 else ()
        return Choice(req=req, detokenizer=detokenizer, prompt_logprobs_due=due)

    def _resumed_finish(self, choice: Choice) -> Finish | None:
        """Replay what another replica delivered; says whether that was already everything."""
        req = choice.req
        if not req.num_resumed:
            return None
        finish = stop_reason(req)
        shown = req.output_ids[: self._num_shown(req, finish)]
        delivered = choice.detokenizer.push([int(token) for token in shown])
        if delivered.matched_stop is not None:
            return Finish(reason=FinishReason.STOP, matched=delivered.matched_stop)
        return finish

    @staticmethod
    def _num_shown(req: Req, finish: Finish | None) -> int:
        """Output tokens that become text: a stop token does not, unless asked for."""
        by_id = finish is not None and isinstance(finish.matched, int)
        return req.num_output - (1 if by_id and not req.sampling.include_stop else 0)

    def _push(self, token: NewToken) -> TokenDelta:
        """Token -> delta; a stop string found here ends the request."""
        req, choice = token.req, self._find(token.req)
        if token.token_id is None:
            return self._end(choice)
        shows = self._num_shown(req, req.finish) == req.num_output
        pushed = choice.detokenizer.push([token.token_id] if shows else [])
        if pushed.matched_stop is not None:
            finish = Finish(reason=FinishReason.STOP, matched=pushed.matched_stop)
            self.scheduler.finish(req, finish)
            req.finish = finish  # a stop string wins over the length limit reached by the same token
        return self._delta(choice, token, pushed.text)

    def _end(self, choice: Choice) -> TokenDelta:
        return self._delta(choice, None, "")

    def _delta(self, choice: Choice, token: NewToken | None, text: str) -> TokenDelta:
        req = choice.req
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if choice.prompt_logprobs_due is not None and req.first_token_s is not None:
            prompt_logprobs = (*choice.prompt_logprobs_due, *req.prompt_logprobs)
            choice.prompt_logprobs_due = None
        if req.finish is not None:
            if not isinstance(req.finish.matched, str):
                text += choice.detokenizer.flush()
            self._forget(choice)
        has_token = token is not None and token.token_id is not None
        return TokenDelta(
            rid=req.rid,
            index=req.index,
            token_ids=(token.token_id,) if token is not None and token.token_id is not None else (),
            text=text,
            logprobs=(token.logprob,) if has_token and token is not None and token.logprob is not None else (),
            prompt_logprobs=prompt_logprobs,
            usage=req.usage(),
            finish=req.finish,
        )

    def _find(self, req: Req) -> Choice:
        return next(choice for choice in self._open[req.rid] if choice.req is req)

    def _forget(self, choice: Choice) -> None:
        choices = self._open[choice.req.rid]
        choices.remove(choice)
        if not choices:
            del self._open[choice.req.rid]
