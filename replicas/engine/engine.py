"""The engine: requests in, token deltas out, one step at a time. Scheduler, runner and hand-off roles meet only here.

Owns:      the order of a step, the clock of the replica, and the limits on what it can serve. The open choices
           (sequence and text) are in choice.py.
Never:     waits, sleeps or talks to a network; loop.py gives it a thread.
Invariant: every accepted request ends in exactly one delta with ``finish`` per choice.
Thread:    the thread that calls `step`; one only, except for `check` (read-only).

    submit -> Scheduler.submit ┐
    step:   schedule -> plan -> (broadcast) -> ModelRunner.launch -> result -> apply -> tokens -> Choice -> TokenDelta
    abort  -> Scheduler.finish ┘

With overlap, decode step n + 1 is planned and launched before the result of step n is awaited. It is then under way
between two calls of `step`; a request that ends meanwhile keeps its row in that step, and its token there is dropped
(stepping.py, scheduler/ahead.py).

A leg of a hand-off goes to `HandOffs` (disagg/). Every step first takes the transfer service's events; `poll` takes
them while nothing runs.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from kvtransfer.replay import observe
from kvtransfer.replay.payload import KvBytes
from kvtransfer.rooms.transfer_service import TransferService
from replicas.cache.events import CacheEvent, CacheSnapshot
from replicas.cache.kv import KvCache
from replicas.cache.tree_view import CacheTree
from replicas.config import AttentionChoice, EngineConfig, ModelConfig
from replicas.disagg.hand_offs import HandOffs, require_possible
from replicas.disagg.rooms import HandOffTerms
from replicas.distributions import Distributions
from replicas.engine.choice import Choice, OpenRequests
from replicas.engine.stepping import Launch, Stepping, snapshot
from replicas.errors import EngineDead, InvalidRequest, Overloaded, PromptTooLong
from replicas.replay.observer import Observer
from replicas.request import Req
from replicas.scheduler.scheduler import Scheduler
from replicas.scheduler.tokens import NewToken
from replicas.text.tokenizer import Tokenizer
from replicas.types import EngineStats, EngineTallies, Finish, FinishReason, GenerateRequest, TokenDelta


class Intake:
    """Of one engine."""

    def __init__(self, model: ModelConfig, *, pool_tokens: int, has_transfer: bool) -> None:
        """``has_transfer``: it takes part in hand-offs."""
        self._model = model
        self._pool_tokens = pool_tokens
        self._has_transfer = has_transfer
        self.longest = min(model.context_len, pool_tokens)  # prompt + output, in tokens

    def check(self, request: GenerateRequest) -> None:
        """Raises: InvalidRequest, or PromptTooLong with the lengths and what is allowed."""
        request.validate(vocab_size=self._model.vocab_size)
        require_possible(request, has_transfer=self._has_transfer)
        if request.resumed_ids and request.sampling.n > 1:
            raise InvalidRequest("resumed_ids: a request with n > 1 is resumed by sending it anew", param="resumed_ids")
        length = len(request.token_ids)
        room = 1 if request.sampling.max_new_tokens > 0 else 0
        if length + room > self.longest:
            why = ""
            if self.longest < self._model.context_len:
                why = f" here (the model's own is {self._model.context_len}, the KV pool holds {self._pool_tokens})"
            raise PromptTooLong.of_prompt(length, longest=self.longest, param="prompt", room=room, why=why)

    def clip(self, request: GenerateRequest) -> GenerateRequest:
        """``request``, or one that ends with `length` where the pool ends (or the context: routers refuse that)."""
        room = self.longest - len(request.token_ids)
        if request.sampling.max_new_tokens <= room:
            return request
        sampling = replace(
            request.sampling, max_new_tokens=room, min_new_tokens=min(request.sampling.min_new_tokens, room)
        )
        return replace(request, sampling=sampling)


CacheEvents = tuple[CacheEvent, ...]  # in order


class Engine:
    """Submit requests, call `step` while `has_work`, hand out the deltas."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv: KvCache,
        max_running: int,
        launch: Launch,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        dead_rank: Callable[[], str | None] = lambda: None,
        close: Callable[[], None] = lambda: None,
        kv_bytes: KvBytes | None = None,
        service: TransferService | None = None,
        terms: HandOffTerms | None = None,
        start_times: Mapping[str, float] | None = None,
        attention: AttentionChoice | None = None,
    ) -> None:
        """``service``, ``terms``: of a replica that takes part in hand-offs; `close` closes the service.
        ``start_times``: seconds of load_weights, warm_up and total, as far as known.
        ``attention``: the backend that ``launch`` runs.
        """
        assert (service is None) == (terms is None), "a transfer service comes with its terms"
        self.config = config
        self.tokenizer = tokenizer
        self.kv = kv
        self.scheduler = Scheduler(kv, config.scheduler, max_running=max_running, clock=clock)
        self._overlap = config.scheduler.overlap == "on"
        self._clock = clock
        self._close = close
        self.dead_rank = dead_rank  # a sentence when another rank is gone; any thread may ask
        self.kv_bytes = kv_bytes  # of all ranks; for replay.py
        self.start_times = dict(start_times or {})
        self.attention = attention or AttentionChoice(name=config.attention, why="as the settings say")
        self._distributions = Distributions()
        self.steps = Stepping(
            launch, self.scheduler, self._distributions, chunk_size=config.chunked_prefill_size, clock=clock
        )
        self._intake = Intake(config.model, pool_tokens=kv.capacity_tokens, has_transfer=service is not None)
        self._open = OpenRequests(self.scheduler.finish)
        self._observer = Observer(kv, kv_bytes)
        self._service = service
        self.transfer_address = service.address if service is not None else None  # where peers reach its service
        self._hand_offs: HandOffs | None = None
        if service is not None and terms is not None:
            self._hand_offs = HandOffs(
                service,
                self.scheduler,
                kv,
                terms,
                vocab_size=config.model.vocab_size,
                clock=clock,
                observer=self._observer,
                distributions=self._distributions,
            )

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.steps.under_way

    def on_transfer_event(self, call: Callable[[], None]) -> None:
        """Have ``call`` called, on the transfer thread, when a hand-off has news for `step`; it must not block."""
        if self._service is not None:
            self._service.on_event = call

    @property
    def transfer_error(self) -> EngineDead | None:
        """Why no hand-off can succeed here any more; any thread may ask."""
        error = None if self._service is None else self._service.error
        return None if error is None else EngineDead(f"the transfer thread has failed: {error!r}")

    @property
    def idle_s(self) -> float | None:
        """Seconds in which nothing can happen here unless an event, a command or another thread brings it; None while
        there is something to do."""
        if self.scheduler.only_away and not self.steps.under_way:
            next_s = self.scheduler.deadlines.next_s
            return float("inf") if next_s is None else max(0.0, next_s - self._clock())
        return None

    @property
    def open_rids(self) -> list[str]:
        return self._open.rids

    def check(self, request: GenerateRequest) -> None:
        """Whether this engine can ever serve ``request``; touches nothing that changes, so any thread may ask.

        Raises: InvalidRequest, or PromptTooLong with the lengths and what is allowed.
        """
        self._intake.check(request)

    def find(self, rid: str, index: int = 0) -> Req | None:
        """Choice ``index`` of an open request."""
        return self._open.find(rid, index)

    def submit(self, request: GenerateRequest, place: Callable[[Req], None] | None = None) -> list[TokenDelta]:
        """Accept a request. Returns: deltas of choices that are already complete (a resumed request may be).

        Args:   place: brings each choice into the scheduler; None lets it wait for its turn. If it raises, nothing was
                accepted (one choice only).
        Raises: as `check`; Overloaded when the waiting queue is full; InvalidRequest for a rid that is open.
        """
        self.check(request)
        if request.rid in self._open:
            raise InvalidRequest(f"rid {request.rid!r} is already open", param="rid")
        limit, would_wait = self.config.scheduler.max_queued_requests, self.scheduler.would_wait(request.num_choices)
        if would_wait > limit:
            raise Overloaded(f"{would_wait} requests would wait, at most {limit} may: try again later")
        if request.hand_off is not None and self._hand_offs is not None:
            self._hand_offs.require_new_room(request)
        choices = self._make_choices(self._intake.clip(request))
        if request.hand_off is not None and self._hand_offs is not None:
            self._hand_offs.submit(request, [choice.req for choice in choices])
        else:
            for choice in choices:
                (place or self.scheduler.submit)(choice.req)
        self._open.add(request.rid, choices)
        done = []
        for choice in choices:
            finish = choice.replay()
            if finish is not None:
                done.append(self._open.end(choice, finish))
        self._settle()
        return done

    def step(self) -> list[TokenDelta]:
        """Run one step: what it added to every choice, and the ends of those whose deadline passed."""
        deltas = self.poll()
        if not self.steps.under_way:
            deltas += self._start()
        if self.steps.under_way:
            deltas += self._apply(ahead=self._overlap and not observe.enabled())  # observers are told every input
        return deltas

    def land(self) -> list[TokenDelta]:
        """End the step that is under way, if one is; none is afterwards. Returns: what it added."""
        return self._apply(ahead=False) if self.steps.under_way else []

    def poll(self) -> list[TokenDelta]:
        """Take what happened at the transfer service since the last call; microseconds when nothing did."""
        return self._tell_tokens(self._hand_offs.poll()) if self._hand_offs is not None else []

    def abort(self, rid: str, message: str = "aborted by the client") -> list[TokenDelta]:
        """End every choice of ``rid``; idempotent. Returns: the final deltas."""
        finish = Finish(reason=FinishReason.ABORT, message=message, http_status=499)
        deltas = [self._open.end(choice, finish) for choice in self._open.choices(rid)]
        self._settle()
        return deltas

    def flush_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing done, while requests are open or peers use pages."""
        if len(self._open):
            return False
        self.land()
        if self.kv.in_use:
            return False
        self.kv.flush()
        return True

    def drain_cache_events(self) -> CacheEvents:
        """What entered and left the prefix cache since the last call; engine thread only."""
        return self.kv.drain_events()

    def cache_snapshot(self) -> CacheSnapshot:
        """What is cached now, for a reader that lost events; engine thread only."""
        return self.kv.snapshot()

    def cache_tree(self, *, max_depth: int = 6, max_nodes: int = 400, min_tokens: int = 0) -> CacheTree:
        """The largest subtrees of the prefix cache, without token ids or text; engine thread only, which stands still
        for it (cache/tree_view.py says how long)."""
        return self.kv.tree(max_depth=max_depth, max_nodes=max_nodes, min_tokens=min_tokens)

    def describe(self) -> str:
        """The pool in one line."""
        pool = self.kv.stats()
        cell = self.config.model.kv_cell_bytes(tp=self.config.parallel.tp, kv_dtype=self.config.kv_dtype)
        mib = pool.total_tokens * cell * self.config.parallel.tp / 2**20
        return f"{pool.total_tokens:,} tokens, {pool.num_pages:,} pages, {mib:,.0f} MiB"

    def stats(self) -> EngineStats:
        """A snapshot; engine thread only."""
        stats = snapshot(self.scheduler, self.kv, self.steps.times, now_s=self._clock())
        if self._hand_offs is None:
            return stats
        return replace(stats, num_handing_off=self._hand_offs.num_handing_off, transfer=self._hand_offs.stats())

    def tallies(self) -> EngineTallies:
        """Distributions since the start; any thread. Those of writes are as of the last `stats`."""
        return self._distributions.read(evicted_idle_s=self.kv.evicted_idle_s)

    def close(self) -> None:
        """Let go of peers and of the other ranks; the engine must not be used afterwards."""
        if self._hand_offs is not None:
            self._hand_offs.close()
        self._close()

    def _start(self) -> list[TokenDelta]:
        """Schedule a step and launch it, if there is one. Returns: the ends of those for whom there will be none."""
        plan = self.scheduler.schedule()
        deltas = [self._open.tell(req) for req in self.scheduler.last.ended]
        if self._hand_offs is not None:
            self._hand_offs.before_step()
        if plan is not None:
            self.steps.begin(plan)
        return deltas

    def _apply(self, *, ahead: bool) -> list[TokenDelta]:
        """Take in the step under way, before which the next one may be launched."""
        step, tokens = self.steps.end(ahead=ahead)
        if self._hand_offs is not None:
            tokens = self._hand_offs.after_step(tokens)
        deltas = self._tell_tokens(tokens)
        if observe.enabled():
            self._observer.after_step(step.plan, tokens)
        self.steps.count(step)
        return deltas

    def _tell_tokens(self, tokens: list[NewToken]) -> list[TokenDelta]:
        return [self._open.push(token) for token in tokens]

    def _make_choices(self, request: GenerateRequest) -> list[Choice]:
        return [
            Choice.make(
                request,
                index,
                tokenizer=self.tokenizer,
                now_s=self._clock(),
                eos_ids=frozenset(self.config.model.eos_ids),
            )
            for index in range(request.num_choices)
        ]

    def _settle(self) -> None:
        if self._hand_offs is not None:
            self._hand_offs.settle()
