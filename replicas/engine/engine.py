"""The engine: requests in, token deltas out, one step at a time. Scheduler, runner and PD roles meet only here.

Owns:      the order of a step, the clock of the replica, and the limits on what it can serve. The open choices
           (sequence and text) are in open_requests.py.
Never:     waits, sleeps or talks to a network; loop.py gives it a thread.
Invariant: every accepted request ends in exactly one delta with ``finish`` per choice.
Thread:    the thread that calls `step`; one only, except for `check` (read-only).

    submit -> Scheduler.submit ┐
    step:   schedule -> plan -> (broadcast) -> ModelRunner.launch -> result -> apply -> tokens -> Choice -> TokenDelta
    abort  -> Scheduler.finish ┘

With overlap, decode step n + 1 is planned and launched before the result of step n is awaited. It is then under way
between two calls of `step`; a request that ends meanwhile keeps its row in that step, and its token there is dropped
(stepping.py, scheduler/decode.py).

A leg of a transfer goes to `PdTransfers` (disagg/). Every step first takes the transfer service's events; `poll` takes
them while nothing runs.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtransfer.replay import observe
from kvtransfer.replay.payload import KvBytes
from kvtransfer.rooms.transfer_service import TransferService
from kvtransfer.types import PeerAddress
from replicas.cache.events import CacheEvent, CacheSnapshot
from replicas.cache.kv import KvCache
from replicas.cache.page_home import TieredPageHome
from replicas.cache.tree_view import CacheTree
from replicas.config import AttentionChoice, EngineConfig, ModelConfig
from replicas.disagg.kv_transfers import PdTransfers, require_possible
from replicas.disagg.roles import Carrier, PdTransferParts, PdTransferTallies, PdTransferTerms
from replicas.engine.adapters import HeldAdapters
from replicas.engine.compiling import Grammars
from replicas.engine.failed_steps import Launch
from replicas.engine.occupation import Occupation
from replicas.engine.open_requests import Choice, OpenRequests, failed
from replicas.engine.stepping import Stepping, snapshot
from replicas.errors import EngineDead, Fault, InvalidRequest, MantaError, Overloaded, PromptTooLong
from replicas.grammar.matcher import Matcher
from replicas.memory.sizing import describe_parts, group_parts, page_bytes
from replicas.observer import Observer
from replicas.request import Req, ReqState
from replicas.scheduler.scheduler import Scheduler
from replicas.scheduler.speculation import Speculation
from replicas.scheduler.tokens import AT_FAULT, NewToken, at_fault
from replicas.text.tokenizer import Tokenizer
from replicas.types import EngineStats, EngineTallies, Finish, FinishReason, GenerateRequest, TokenDelta

CacheEvents = tuple[CacheEvent, ...]  # in order
TIDY_S = 0.002  # that `Engine.tidy` takes at a time: a request that comes meanwhile waits for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """All ranks of one replica, as the engine reaches them."""

    launch: Launch
    dead_rank: Callable[[], str | None] = lambda: None  # a sentence when another rank is gone; any thread may ask
    close: Callable[[], None] = lambda: None
    kv_bytes: KvBytes | None = None  # reads and writes the pools, for replay and observation
    page_home: TieredPageHome | None = None  # cached pages as they move between replicas; None: they do not
    give_back: Callable[[frozenset[str]], None] = lambda parts: None  # memory of all ranks (occupation.py)
    adapters: HeldAdapters | None = None  # None: none are served
    carrier: Carrier | None = None  # of what is handed over beside pages; None: nothing is
    # calls what it is given again and again while a step computes; None on a GPU, and of several ranks
    between_layers: Callable[[Callable[[], None]], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """What the start of an engine chose and how long it took; for metrics and server info."""

    attention: AttentionChoice
    times: Mapping[str, float] = field(default_factory=dict)  # seconds of load_weights, warm_up, total; as far as known
    decode_s: Mapping[int, float] = field(default_factory=dict)  # seconds of a decode step, by rows, if it was measured


class Intake:
    """The limits on what one engine can ever serve; what it can serve just now is the queue's."""

    def __init__(self, model: ModelConfig, *, pool_tokens: int, has_transfer: bool) -> None:
        """``has_transfer``: the engine takes part in KV transfers."""
        self._model = model
        self._pool_tokens = pool_tokens
        self._has_transfer = has_transfer
        self.longest = min(model.context_len, pool_tokens)  # prompt + output, in tokens

    def check(self, request: GenerateRequest) -> None:
        """Raise InvalidRequest, or PromptTooLong with the lengths and what is allowed."""
        request.validate(vocab_size=self._model.vocab_size)
        if request.kv_transfer is not None:
            require_possible(request, request.kv_transfer, has_transfer=self._has_transfer)
        pooling = request.sampling.pooling
        if pooling is not None and pooling.method is not None and self._model.implementation == "transformers":
            raise InvalidRequest("pooling: hidden states are not read from a model that Transformers' classes run")
        if request.resumed_ids and request.sampling.n > 1:
            raise InvalidRequest(
                f"resumed_ids belong to one choice, and n is {request.sampling.n}: "
                "send one request with n = 1 for each choice",
                param="resumed_ids",
            )
        length = len(request.token_ids)
        room = 1 if request.sampling.max_new_tokens > 0 else 0
        if length + room > self.longest:
            why = ""
            if self.longest < self._model.context_len:
                why = f" here (the model's own is {self._model.context_len}, the KV pool holds {self._pool_tokens})"
            raise PromptTooLong.of_prompt(length, longest=self.longest, param="prompt", room=room, why=why)

    def clip(self, request: GenerateRequest) -> GenerateRequest:
        """Return ``request``, with max_new_tokens cut to what the pool holds (routers refuse what exceeds the
        context)."""
        room = self.longest - len(request.token_ids)
        if request.sampling.max_new_tokens <= room:
            return request
        sampling = replace(
            request.sampling, max_new_tokens=room, min_new_tokens=min(request.sampling.min_new_tokens, room)
        )
        return replace(request, sampling=sampling)


class Engine:
    """The engine of one model instance: submit requests, call `step` while `has_work`, hand out the deltas."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv: KvCache,
        max_running: int,
        executor: Executor,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        transfer: tuple[TransferService, PdTransferTerms] | None = None,
        started: StartReport | None = None,
    ) -> None:
        """``transfer``: of a replica that takes part in KV transfers; `close` closes the service."""
        self.config = config
        self.tokenizer = tokenizer
        self.kv = kv
        self.executor = executor
        self.scheduler = Scheduler(kv, config.scheduler, max_running=max_running, clock=clock)
        self.started = started or StartReport(
            attention=AttentionChoice(name=config.attention, why="as the settings say")
        )
        if config.scheduler.speculation != "off":
            drafts = Speculation(kv, self.scheduler.counters, step_s=self.started.decode_s, clock=clock)
            self.scheduler.features["speculation"] = drafts
        self.scheduler.queues.adapters = executor.adapters
        self._clock = clock
        self.steps = Stepping(
            executor.launch, self.scheduler, chunk_size=config.chunked_prefill_size, clock=clock
        )
        self.occupation = Occupation(
            kv, device=config.device, pinned=transfer is not None and transfer[1].pinned, give_back=executor.give_back
        )
        kv.store.part_bytes = group_parts(config, kv.store.size)
        pool_tokens = kv.store.stats().total_tokens
        self._intake = Intake(config.model, pool_tokens=pool_tokens, has_transfer=transfer is not None)
        self.grammars = Grammars(tokenizer, config.model.vocab_size, clock)
        self._open = OpenRequests()
        self._observer = Observer(kv, executor.kv_bytes)
        self._service: TransferService | None = None
        self._kv_transfers: PdTransfers | None = None
        if transfer is not None:
            self._service, terms = transfer
            parts = PdTransferParts(
                service=self._service, scheduler=self.scheduler, kv=kv, terms=terms, clock=clock,
                vocab_size=config.model.vocab_size, observer=self._observer, tallies=PdTransferTallies(),
                carrier=executor.carrier, may_lend=lambda: not self.occupation.released,
            )  # fmt: skip
            self._kv_transfers = PdTransfers(parts)
            if executor.between_layers is not None and executor.carrier is None and kv.store.tiers is None:
                executor.between_layers(self._kv_transfers.lend)  # nothing but a lock on pages that stand in the pool

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.steps.under_way

    def on_event(self, call: Callable[[], None]) -> None:
        """Register ``call``: the threads of transfers, grammars, adapters and the store call it when they have news for
        `step`. It must not block."""
        self.grammars.on_ready = call
        if self.executor.adapters is not None:
            self.executor.adapters.on_ready = call
        if self._service is not None:
            self._service.on_event = call
        if self.kv.store_tier is not None:
            self.kv.store_tier.on_event(call)

    @property
    def transfer_address(self) -> PeerAddress | None:
        """Where peers reach the transfer service; None without one."""
        return None if self._service is None else self._service.address

    @property
    def transfer(self) -> TransferService | None:
        """The transfer service, for its methods that any thread may call; None without one."""
        return self._service

    @property
    def thread_error(self) -> EngineDead | None:
        """Why every KV transfer, or every look into the store, will fail here, or None; any thread may ask."""
        error = None if self._service is None else self._service.error
        if error is not None:
            return EngineDead(f"the transfer thread has failed: {error!r}")
        error = None if self.kv.store_tier is None else self.kv.store_tier.error
        return None if error is None else EngineDead(f"the thread of the store tier has failed: {error!r}")

    @property
    def idle_s(self) -> float | None:
        """Seconds until the next deadline, while only another replica, thread or command can bring work; None while
        there is work."""
        if self.scheduler.only_away and not self.steps.under_way:
            next_s = self.scheduler.deadlines.next_s
            return float("inf") if next_s is None else max(0.0, next_s - self._clock())
        return None

    @property
    def open_rids(self) -> list[str]:
        return self._open.rids

    def check(self, request: GenerateRequest) -> None:
        """Check whether this engine can ever serve ``request``; reads nothing that changes, so any thread may call it.

        Raises: InvalidRequest, or PromptTooLong with the lengths and what is allowed.
        """
        self._intake.check(request)
        if request.adapter is not None and self.executor.adapters is None:
            raise InvalidRequest("adapter: this replica serves its model alone", param="model")

    def find(self, rid: str, index: int = 0) -> Req | None:
        """Return choice ``index`` of an open request."""
        return self._open.find(rid, index)

    def submit(self, request: GenerateRequest, place: Callable[[Req], None] | None = None) -> list[TokenDelta]:
        """Check and accept a request. Returns: as `accept`.

        Args:   place: puts each choice into the scheduler's queues; None lets it wait for its turn. If it raises,
                nothing was accepted (one choice only).
        Raises: as `check` and `accept`; InvalidRequest for a rid that is open.
        """
        self.check(request)
        if request.rid in self._open:
            raise InvalidRequest(f"rid {request.rid!r} is already open", param="rid")
        return self.accept(request, place)

    def accept(
        self,
        request: GenerateRequest,
        place: Callable[[Req], None] | None = None,
        *,
        arrived_s: float | None = None,
    ) -> list[TokenDelta]:
        """Accept a request that `check` passes and whose rid is not open; else as `submit`.

        Args:    arrived_s: on this engine's clock; None: now.
        Returns: deltas of choices that are already complete (a resumed request may be).
        Raises:  Overloaded when the waiting queue is full; InvalidRequest for a KV transfer's room that is open.
        """
        assert request.rid not in self._open, f"request {request.rid} is open"
        if self.occupation.released:
            self.occupation.require()
        limit, would_wait = self.config.scheduler.max_queued_requests, self.scheduler.would_wait(request.num_choices)
        if would_wait > limit:
            raise Overloaded(f"{would_wait} requests would wait, at most {limit} may: try again later")
        if request.kv_transfer is not None and self._kv_transfers is not None:
            self._kv_transfers.require_new_room(request)
        choices = self._make_choices(self._intake.clip(request), arrived_s)
        if place is not None and request.adapter is not None and self.executor.adapters is not None:
            queues = self.scheduler.queues
            self.executor.adapters.load(request.adapter, [*queues.holding, *itertools.chain(*queues.under_way.steps)])
        constraint = request.sampling.constraint
        if constraint is None:
            return self._place(request, choices, None, place)
        self.scheduler.counters["constrained"] += 1
        matcher = self.grammars.compiler.cached(constraint)
        if matcher is not None or place is not None:
            return self._place(request, choices, matcher or self.grammars.compiler.compile(constraint), place)
        for choice in choices:
            self.scheduler.park(choice.req)
        self._open.add(request.rid, choices)
        self.grammars.start(request, choices, constraint)
        return []

    def _place(
        self,
        request: GenerateRequest,
        choices: list[Choice],
        matcher: Matcher | None,
        place: Callable[[Req], None] | None = None,
    ) -> list[TokenDelta]:
        """Start the choices of an accepted request. Returns, and raises, as `accept`."""
        refused = [
            None if matcher is None else _or_end(each.req, functools.partial(self.grammars.guide, each.req, matcher))
            for each in choices  # before they wait: a queue is told once whose masks are long
        ]
        if request.kv_transfer is not None and self._kv_transfers is not None:
            self._kv_transfers.submit(request, [choice.req for choice in choices])
        else:
            for choice in choices:
                if place is not None or self._kv_transfers is None or not self._kv_transfers.follows(choice.req):
                    (place or self.scheduler.submit)(choice.req)
        if request.rid not in self._open:  # else it waited for its grammar
            self._open.add(request.rid, choices)
        done = []
        for choice, refusal in zip(choices, refused, strict=True):
            finish = _or_end(choice.req, choice.replay) or refusal
            if finish is not None:
                done.append(self._end(choice, finish))
        self._settle()
        return done

    def step(self) -> list[TokenDelta]:
        """Run one step. Returns: what it added to every choice, and the ends of requests whose deadline passed."""
        deltas = self.poll()
        if not self.steps.under_way:
            deltas += self._start()
        if self.steps.under_way:
            overlap = self.config.scheduler.overlap == "on"
            deltas += self._apply(ahead=overlap and not observe.enabled())  # observers see every step's input
        return deltas

    def land(self) -> list[TokenDelta]:
        """Wait for the step under way, if there is one; none is afterwards. Returns: what it added."""
        return self._apply(ahead=False) if self.steps.under_way else []

    def tidy(self) -> bool:
        """Copy some pages to the host tier, while there is nothing else to do: for about `TIDY_S`. Returns: whether
        there is more of it."""
        tiers = self.kv.store.tiers
        if tiers is None:
            return False
        each_s = tiers.counters.write_s_per_page or TIDY_S
        most = max(1, int(TIDY_S / max(each_s, 1e-9)))
        return tiers.copy_idle(most, to_store=self.kv.store_tier is not None) > 0

    def poll(self) -> list[TokenDelta]:
        """Take the events of the transfer service, of the store and of adapters since the last call; microseconds when
        there are none."""
        if self.kv.store_tier is not None:
            self.kv.store_tier.poll()
        if self.executor.adapters is not None and self.executor.adapters.poll():
            self.scheduler.look_again()
        started = self._start_compiled() if self.grammars.waiting else []
        return [*started, *self._poll_kv_transfers()]

    def _poll_kv_transfers(self) -> list[TokenDelta]:
        made = self._kv_transfers.poll() if self._kv_transfers is not None else []
        return [delta for token in made for delta in self._push(token)]

    def _start_compiled(self) -> list[TokenDelta]:
        """Start the requests whose grammar is compiled. Returns: as `accept`, and the ends of those that have none."""
        deltas = []
        for task in self.grammars.poll():
            made = task.made
            error = made if isinstance(made, MantaError) else None
            choices, ended = self._unpark(task.request, task.choices, error)
            matcher = made if isinstance(made, Matcher) else None
            deltas += ended or (self._place(task.request, choices, matcher) if choices else [])
        return deltas

    def _unpark(
        self, request: GenerateRequest, choices: Sequence[Choice], error: MantaError | None
    ) -> tuple[list[Choice], list[TokenDelta]]:
        """Take back the choices that are open still, or end them by ``error`` or as their room is open again.

        Returns: those taken back, and the last deltas of those that ended.
        """
        left = [choice for choice in choices if choice.req.finish is None]
        try:
            if error is not None:
                raise error
            if left and request.kv_transfer is not None and self._kv_transfers is not None:
                self._kv_transfers.require_new_room(request)
        except MantaError as why:
            return [], [self._end(choice, failed(why)) for choice in left]
        for choice in left:
            self.scheduler.take_back(choice.req)
        return left, []

    def abort(self, rid: str, message: str = "aborted by the client") -> list[TokenDelta]:
        """End every choice of ``rid``; idempotent. Returns: the final deltas."""
        finish = Finish(reason=FinishReason.ABORT, message=message, fault=Fault.CANCELLED)
        deltas = [self._end(choice, finish) for choice in self._open.choices(rid)]
        self._settle()
        return deltas

    def take_back(self, rid: str) -> list[TokenDelta]:
        """End ``rid`` if none of its choices has been admitted, so that its router gives it to another replica.

        Returns: the final deltas; none, with nothing done, if it was admitted (also if it was retracted since), or is
                 not open.
        """
        finish = Finish(
            reason=FinishReason.ABORT, message="its router took it back", fault=Fault.UNAVAILABLE, retry_as="taken_back"
        )
        deltas = [self._end(choice, finish) for choice in self._open.unadmitted(rid)]
        self._settle()
        return deltas

    def commit_running(self) -> list[TokenDelta]:
        """Give the prefix cache what the running requests have computed so far, for others to reuse now. Returns: what
        the step that was under way added."""
        deltas = self.land()
        for rid in self._open.rids:
            for choice in self._open.choices(rid):
                if choice.req.state is ReqState.RUNNING and choice.req.leg is None:
                    self.kv.commit(choice.req)
        return deltas

    def hand_over(self) -> list[TokenDelta]:
        """End every choice so that its router goes on with it on another replica. Returns: the final deltas."""
        finish = Finish(
            reason=FinishReason.ERROR,
            message="this replica leaves, and has no more time: another one goes on",
            fault=Fault.UNAVAILABLE,
            retry_as="engine_dead",
        )
        deltas = [self._end(choice, finish) for rid in self._open.rids for choice in self._open.choices(rid)]
        self._settle()
        return deltas

    def flush_cache(self) -> bool:
        """Empty the prefix cache. Returns: False, with nothing done, while requests are open or peers use pages."""
        if len(self._open):
            return False
        self.land()
        if self.kv.in_use:
            return False
        self.kv.flush()
        return True

    def release_memory(self, tags: Iterable[str] = ()) -> bool:
        """Give back the memory of the parts that ``tags`` name, or of all (occupation.py). Until `resume_memory`
        requests are refused. Returns: False, with nothing done, while requests are open or peers use pages.

        Raises: InvalidRequest, as `Occupation.parts_of`.
        """
        parts = self.occupation.parts_of(tags)
        if len(self._open):
            return False
        self.land()
        if self.kv.in_use:
            return False
        self.occupation.release(parts)
        return True

    def resume_memory(self, tags: Iterable[str] = ()) -> None:
        """Use again what `release_memory` gave back. Raises: as that."""
        self.occupation.resume(self.occupation.parts_of(tags))

    def drain_cache_events(self) -> CacheEvents:
        """Return what entered and left the prefix cache since the last call; engine thread only."""
        return self.kv.store.drain_events()

    def cache_snapshot(self) -> CacheSnapshot:
        """Return what is cached now, for a reader that lost events; engine thread only."""
        return self.kv.store.snapshot()

    def cache_tree(self, *, max_depth: int = 6, max_nodes: int = 400, min_tokens: int = 0) -> CacheTree:
        """Return the largest subtrees of the prefix cache, without token ids or text. Blocks the engine thread
        (cache/tree_view.py says how long)."""
        return self.kv.store.tree(max_depth=max_depth, max_nodes=max_nodes, min_tokens=min_tokens)

    def describe(self) -> str:
        """Describe the pool in one line."""
        size, config = self.kv.store.size, self.config
        mib = size.num_pages * page_bytes(config, size) * config.parallel.tp / config.num_kv_parts / 2**20
        apart = "" if size.windows is None else f", windows of {size.windows.num_pages * size.page_size:,} tokens"
        told = f"{size.num_tokens:,} tokens, {size.num_pages:,} pages{apart}, {mib:,.0f} MiB"
        parts = describe_parts(config, apart=size.windows is not None)
        return f"{told}; {parts}" if size.windows is not None or config.model.states else told

    def stats(self) -> EngineStats:
        """Take a snapshot of the statistics; engine thread only."""
        stats = snapshot(self.scheduler, self.kv.store, self.steps.times, now_s=self._clock())
        stats = replace(stats, failed_steps=self.steps.failed.num, groups=self.kv.store.groups())
        if self.executor.adapters is not None:
            stats = replace(stats, adapters=self.executor.adapters.stats())
        if self._kv_transfers is None:
            return stats
        return replace(stats, num_handing_off=self._kv_transfers.num_handing_off, transfer=self._kv_transfers.stats())

    def tallies(self) -> EngineTallies:
        """Return the distributions since the start; any thread. Those of writes are as of the last `stats`."""
        kv_transfers = PdTransferTallies() if self._kv_transfers is None else self._kv_transfers.tallies
        idle_s = self.kv.store.evicted_idle_s()
        return EngineTallies(evicted_idle_s=idle_s, **self.steps.tallies.read(), **kv_transfers.read())

    def close(self) -> None:
        """Close the connections to peers and to the other ranks; the engine must not be used afterwards."""
        self.grammars.close()
        if self.executor.adapters is not None:
            self.executor.adapters.close()
        if self._kv_transfers is not None:
            self._kv_transfers.close()
        if self.kv.store_tier is not None:
            self.kv.store_tier.close()
        self.executor.close()

    def _start(self) -> list[TokenDelta]:
        """Schedule a step and launch it, if there is one. Returns: the last deltas of requests that the scheduler
        ended."""
        plan = self.scheduler.schedule()
        deltas = [self._open.take_delta(self._open.by_req[req]) for req in self.scheduler.last.ended]
        for req, error in self.executor.adapters.end_look() if self.executor.adapters is not None else []:
            deltas.append(self._end(self._open.by_req[req], failed(error)))
        if self._kv_transfers is not None:
            self._kv_transfers.before_step()
        if plan is not None:
            self.steps.begin(plan)
        return deltas

    def _apply(self, *, ahead: bool) -> list[TokenDelta]:
        """Take in the step under way; ``ahead``: the next one may be launched before that."""
        step, tokens = self.steps.end(ahead=ahead, again=self.config.parallel.tp == 1)
        if self._kv_transfers is not None:
            tokens = self._kv_transfers.after_step(tokens)
        deltas = [delta for token in tokens for delta in self._push(token)]
        if observe.enabled():
            self._observer.after_step(step.plan, tokens)
        self.steps.count(step, tokens)
        return deltas

    def _push(self, token: NewToken) -> list[TokenDelta]:
        """Turn a token into the delta of its choice; a stop string found here ends the request. A choice that is at
        fault ends the others of its request."""
        req, text, finish = token.req, "", None
        choice = self._open.by_req.get(req)
        if choice is None:
            return []  # another choice has ended it in this step
        try:
            if token.token_id is not None:
                token, text, finish = choice.push_run(token) if token.more else (token, *choice.push(token.token_id))
        except BaseException as error:  # noqa: BLE001
            token, finish = NewToken(req, None, None), at_fault(req, error)
        if finish is not None:
            self.scheduler.finish(req, finish)
            req.finish = finish  # a stop string, or a fault, wins over the length limit reached by the same token
        deltas = [self._open.take_delta(choice, token, text)]
        if req.finish is not None and req.finish.retry_as in AT_FAULT:
            deltas += [self._end(other, req.finish) for other in self._open.choices(req.rid)]
        return deltas

    def _end(self, choice: Choice, finish: Finish) -> TokenDelta:
        """End an open choice. Returns: its last delta."""
        self.scheduler.finish(choice.req, finish)
        return self._open.take_delta(choice)

    def _make_choices(self, request: GenerateRequest, arrived_s: float | None) -> list[Choice]:
        return [
            Choice.make(
                request,
                index,
                tokenizer=self.tokenizer,
                now_s=self._clock() if arrived_s is None else arrived_s,
                eos_ids=frozenset(self.config.model.eos_ids),
            )
            for index in range(request.num_choices)
        ]

    def _settle(self) -> None:
        if self._kv_transfers is not None:
            self._kv_transfers.settle()


def _or_end(req: Req, act: Callable[[], Finish | None]) -> Finish | None:
    """Return what ``act`` does, or the end of ``req`` by its own fault where that fails."""
    try:
        return act()
    except BaseException as error:  # noqa: BLE001
        return at_fault(req, error)
