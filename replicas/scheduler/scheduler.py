"""The scheduler: `schedule` plans the next step, `apply` takes in its result.

Owns:      every request between submit and finish, and the order of all that happens to it. Its queues are values
           (queues.py). Functions move requests between them: prefill.py starts prompts, admission.py admits decode
           legs, decode.py retracts and plans before a result is known, tokens.py takes in results.
Never:     sees a tensor, a model or text.
Invariant: a request ends in `finish` and nowhere else; see `check`.
Thread:    engine thread only.

    submit ─> WaitingQueue ──next_batch──> ExtendPlan ─ step ─> apply ─┬─ mid-prompt: commit, next chunk goes first
                  ^                            ^ prefill.py            ├─ prompt done: commit, running
                  └────── retract (pool full) ── running               └─ finished: release, pages stay in the tree
                                                     └─> DecodePlan ─ step ─> apply    (no prompt can run)
                                                           └─ schedule_ahead ─> DecodePlan, before that apply
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from replicas.cache.kv import KvCache, longest_reuse
from replicas.config import SchedulerConfig
from replicas.request import CachedTokens, Req, ReqState
from replicas.scheduler.admission import NewTokenRatio, RatioRule, Room, grant, let_go, max_receiving, run_tokens
from replicas.scheduler.deadlines import Deadlines, cannot_start, deadline_passed
from replicas.scheduler.decode import (
    AheadGate,
    DecodeRows,
    SharedPrefixes,
    decode_plan,
    decode_rows,
    draft_groups,
    plan_ahead,
    prompt_groups,
    retract,
    retract_until_it_fits,
)
from replicas.scheduler.drafts import Drafts
from replicas.scheduler.orders import ORDERS
from replicas.scheduler.plan import BROKEN, DecodePlan, PrefixGroup, StepPlan, StepResult, TableWrite
from replicas.scheduler.prefill import PASSING, ExtendBatch, Limits, Refusal, extend_plan, next_batch
from replicas.scheduler.queues import QueueRules, Queues, WaitingQueue
from replicas.scheduler.tokens import (
    COUNTERS,
    ENDS,
    Counters,
    Drawn,
    NewToken,
    at_fault,
    count_computed,
    end_without_token,
    sampled,
    take_drawn,
    take_forced,
)
from replicas.scheduler.victims import Need, victims
from replicas.types import Finish, FinishReason, TokenLogprob

MAX_FORCED = 64  # tokens of a run that are taken at once
# chunks of prompts that a tenant may have computed before others go first: few, and long prompts of several tenants are
# cut into pieces by turns; many, and a burst makes others wait (simulated: python -m benchmarks router tenants)
QUANTUM = 8


@dataclass(slots=True)
class LastRound:
    """What the last `Scheduler.schedule` found, for explanation and for its caller."""

    made_progress: bool = False  # it found something to run, granted a decode leg, or ended a starved request
    ended: list[Req] = field(default_factory=list)  # requests that it ended: deadline passed, or starved
    refusals: dict[tuple[str, int], Refusal] = field(default_factory=dict)  # as of the last look at the waiting queue
    short: Req | None = None  # the request that found no memory at that look


class Scheduler:
    """Plans one step at a time: prompts, and beside them a token of each running request (unlike SPEC F01, F08: see
    prefill.py)."""

    def __init__(self, kv: KvCache, config: SchedulerConfig, *, max_running: int, clock: Callable[[], float]) -> None:
        assert config.chunked_prefill_size is not None
        self.counters: Counters = dict.fromkeys(COUNTERS, 0)
        self.kv = kv
        self.max_running = max_running
        self.queues = Queues(
            waiting=WaitingQueue(
                QueueRules(
                    policy=config.policy,
                    lpm_max_queue=config.lpm_max_queue,
                    ageing_s=config.ageing_s,
                    late_factor=config.late_factor,
                    quantum=QUANTUM * config.chunked_prefill_size,
                    peek_len=kv.cache.peek_len,
                    peek_path=kv.cache.peek_path,
                    num_computed=lambda: self.counters["prefill_tokens"],
                )
            ),
        )
        self.deadlines = Deadlines()
        self.last = LastRound()
        self._config = config
        self._clock = clock
        self._ratio = NewTokenRatio(
            RatioRule(
                initial=config.new_token_ratio, floor=config.min_new_token_ratio, decay=config.new_token_ratio_decay
            )
        )
        self._shared = SharedPrefixes()
        self._gate = AheadGate()
        self.drafts: Drafts | None = None  # set once, by who starts the engine; None: each step makes one token

    @property
    def has_work(self) -> bool:
        """Whether any queue has a request."""
        return not self.only_away or len(self.queues.away) > 0

    @property
    def only_away(self) -> bool:
        """Whether nothing is left to do here until another replica has done its part, or a grammar is compiled."""
        queues = self.queues
        starting = len(queues.waiting) or queues.chunked is not None or len(queues.prealloc)
        return not (starting or queues.running or queues.forced)

    def would_wait(self, num_new: int) -> int:
        """Count the requests that would wait if ``num_new`` came: all that hold nothing, less the free places that they
        would fill. While memory is short, no place is free."""
        queues = self.queues
        num_starting = queues.waiting.num_counted + len(queues.prealloc) + num_new
        num_waiting = num_starting + len(queues.away.in_state(ReqState.WAITING))
        if self._is_short:
            num_starting = 0
        num_holding = sum(not req.in_background for req in queues.holding)  # others give their places up
        return num_waiting - min(num_starting, self.max_running - num_holding)

    @property
    def _is_short(self) -> bool:
        """Whether a request that is not in the background found no memory at the last look."""
        short = self.last.short
        return short is not None and short.state is not ReqState.FINISHED and not short.in_background

    @property
    def late_factor(self) -> float:
        """``scheduler.late_factor`` where the order goes by objectives, else 0."""
        return self._config.late_factor if ORDERS[self._config.policy].by_objective else 0.0

    @property
    def blocked(self) -> str:
        """What kept waiting requests from starting at the last look: "pool", "slots" (requests that run) or ""."""
        queues, refusals = self.queues, self.last.refusals
        waiting = queues.waiting.counted
        if not (waiting or queues.chunked is not None or len(queues.prealloc)):
            return ""
        if self._is_short:
            return "pool"
        return "slots" if any(refusals.get((r.rid, r.index)) is Refusal.RUNNING_LIMIT for r in waiting) else ""

    def submit(self, req: Req) -> None:
        """Accept a request; from here on it ends in exactly one finish."""
        self._accept(req)
        self._wait(req)
        if self.kv.store_tier is not None:
            self.kv.store_tier.ask(req, longest_reuse(req))

    def ask_grant(self, req: Req) -> None:
        """Accept a decode leg. It gets row and pages when they fit, and is then among `HandOffQueue.take_granted`."""
        self._accept(req)
        self.queues.prealloc.add(req)
        self._gate.disturb()

    def look_again(self) -> None:
        """Look at the queues before another step is planned ahead: what a request waits for may be there."""
        self._gate.disturb()

    def park(self, req: Req) -> None:
        """Accept a request that may not start before `unpark`."""
        self._accept(req)
        self.queues.away.add(req)

    def unpark(self, req: Req) -> None:
        """Let a parked request wait for its turn."""
        self.queues.away.remove(req)
        self._wait(req)

    def received(self, req: Req, token_id: int, logprob: TokenLogprob | None, *, cached: CachedTokens) -> NewToken:
        """Take in the complete K/V of a RECEIVING request, and its next token; it runs on without a forward.

        Args: cached: what its sender did not compute.
        """
        queues = self.queues
        queues.away.remove(req)
        req.computed_len = req.num_tokens
        if req.stamps.admitted_s is None:
            req.stamps.admitted_s, req.cached = self._clock(), cached
        self.kv.commit(req)
        req.move(ReqState.RUNNING)
        queues.running.append(req)
        return self._take_run(req, [(token_id, logprob)])

    def take_back(self, req: Req) -> None:
        """Undo `park`: ``req`` is to be accepted another way."""
        self.queues.away.remove(req)
        self.queues.waiting.shares.ends(req)
        self.deadlines.remove(req)

    def compute_here(self, req: Req) -> None:
        """Let a decode leg, granted or not, wait to be computed: its K/V will not come or is wrong."""
        self.queues.remove(req)
        if req.state is ReqState.RECEIVING:
            assert req.leg is not None
            req.leg.failed_s = self._clock()
            let_go(req, self.kv, keep=False)
            req.move(ReqState.WAITING)
        self._wait(req)

    def finish(self, req: Req, finish: Finish) -> None:
        """End ``req`` wherever it is; its computed prefix stays reusable (SPEC F17). Idempotent. What it holds is
        released when no step under way has it."""
        if req.state is ReqState.FINISHED:
            return
        self.queues.remove(req)
        req.move(ReqState.FINISHED)
        req.finish, req.stamps.ended_s = finish, self._clock()
        if req.holding is not None:
            keep = finish.reason is not FinishReason.ERROR
            if req in self.queues.under_way:
                self.queues.under_way.hold(req, keep=keep)
            else:
                let_go(req, self.kv, keep=keep)
        if self.kv.store_tier is not None:
            self.kv.store_tier.forget(req)
        self._gate.disturb()
        self.counters[ENDS.get(finish.reason, "finished")] += 1
        if req.leg is not None:
            self.queues.away.ended.append(req)
        self.queues.waiting.shares.ends(req)
        self.deadlines.remove(req)
        if self.drafts is not None:
            self.drafts.forget(req)

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or return None when nothing can run; no step may be under way. Slots are taken here, so
        `apply` must follow."""
        queues, mixed = self.queues, self._config.mixed_steps
        assert not len(queues.under_way), "a step is under way: apply it, or schedule ahead"
        now_s = self._clock()
        self.last = LastRound(refusals=self.last.refusals, short=self.last.short)
        queues.waiting.shares.looks(now_s)
        while (due := self.deadlines.due(now_s)) is not None:
            self._end(due, deadline_passed(due, now_s))
        self._give_way()
        gave_way, decode = self._take_decode_slots() if mixed else (False, None)  # before any prompt's
        slotted = list(queues.running)
        batch = ExtendBatch() if gave_way and queues.running else self._next_prompts(now_s)
        if len(queues.running) < len(slotted):  # a prompt was to have what others held
            self.last.made_progress = True
            decode = decode.of(queues.running, slotted) if decode is not None and queues.running else None
        if batch.rows:
            self.last.made_progress = True
            table_writes = self._table_writes()
            prompts = zip(batch.reqs[batch.num_forced :], batch.rows[batch.num_forced :], strict=True)
            ending = [req for req, row in prompts if row.sample]
            running, decode = self._leave_out(ending, decode)
            groups = self._groups(running, first=len(batch.rows)) if decode is not None else ()
            queues.under_way.begin([*batch.reqs, *(running if decode is not None else ())])
            of_prompts = prompt_groups(batch.reqs) if self._config.cascade else ()
            return extend_plan(batch, running, decode, table_writes, groups, of_prompts)
        if not mixed:
            gave_way, decode = self._take_decode_slots()
        if decode is None:
            self._ratio.idle()
            self._end_starved([batch.short, queues.prealloc.short], now_s)
            return None
        self.last.made_progress = True
        queues.under_way.begin(list(queues.running))
        if gave_way:
            self._gate.disturb()
        else:
            self._gate.looked()
        return self._decode_plan(decode)

    def schedule_ahead(self) -> DecodePlan | None:
        """Plan the step after the one under way, before that one's tokens are known; None where that is not possible
        yet."""
        next_s = self.deadlines.next_s
        if (next_s is not None and next_s <= self._clock()) or self.queues.waiting.shares.easing.left_out:
            return None
        if self.drafts is not None and self.drafts.wait_for_tokens(len(self.queues.running)):
            return None
        found = plan_ahead(self.queues, self.kv, must_look=self._gate.must_look)
        if found is None:
            return None
        reqs, follows = found
        self._gate.planned()
        self.queues.under_way.begin(reqs)
        self._ratio.decode_step()
        rows = decode_rows(reqs, self.kv, ahead=True)
        return decode_plan(reqs, rows, self._table_writes(), self._groups(reqs), follows=follows)

    def apply(self, plan: StepPlan, result: StepResult) -> list[NewToken]:
        """Take in a step: tokens to their requests, pages to the tree, finished requests out."""
        under_way = self.queues.under_way
        reqs = under_way.end()
        num_prompt, num_decode = count_computed(plan, result, reqs, self.queues, self.kv)
        self.counters["prefill_tokens"] += num_prompt
        self.counters["decode_tokens"] += num_decode
        tokens = [self._take_run(req, run) for req, run in sampled(plan, result, reqs)]
        if self.drafts is not None:
            self.drafts.end(plan, reqs, tokens, self.queues.waiting.shares)
        for req, keep in under_way.take_released():
            let_go(req, self.kv, keep=keep)
        return tokens

    def check(self) -> None:
        """Assert all invariants of DESIGN.md section 3 that hold between two steps, one of which may be under way."""
        self.queues.check()
        self.deadlines.check()
        self.kv.check([*self.queues.holding, *self.queues.under_way.ended])

    def _accept(self, req: Req) -> None:
        """Give ``req`` its rank in the queues. With priorities off, its priority is ignored."""
        if not self.has_work:
            self._ratio.idle()
        priority = req.rank.request_class.priority
        if priority is not None:
            req.rank.priority = priority
        elif self._config.priorities == "off":
            req.rank.priority = 0
        req.rank.from_s = req.stamps.arrival_s - req.asked.waited_s
        if priority is None:
            req.rank.from_s -= req.rank.priority * self._config.ageing_s
        self.deadlines.add(req)
        self.queues.waiting.shares.opens(req)
        self.kv.arrived(req)

    def _wait(self, req: Req) -> None:
        chunked = self.queues.chunked
        self.queues.waiting.add(req, mid_prompt_len=0 if chunked is None else chunked.extend_len)
        self._gate.disturb()

    def _give_way(self) -> None:
        """Retract what others are to have before prompts are chosen: the step of one in the middle of its prompt, whose
        pages stay cached, and the place of a running request."""
        queues, shares = self.queues, self.queues.waiting.shares
        refused = self.last.refusals  # a head that waits for something else than room gets nobody's

        def could_begin(reqs: Sequence[Req]) -> list[Req]:
            return [req for req in reqs if refused.get((req.rid, req.index)) not in PASSING]

        waiting = [] if queues.chunked is None else could_begin(queues.waiting.counted)
        if queues.prealloc.short is not None:
            self._retract(Need.ROOM, [queues.prealloc.short])
        heads = could_begin(shares.heads(queues.waiting.counted)) if shares.several else []
        full = len(queues.holding) >= self.max_running
        if full or self._is_short:
            for victim in self._retract(Need.PLACE if full else Need.PAGES, heads):
                shares.spend(victim)
        if waiting:
            self._retract(Need.STEP, [max(waiting, key=lambda req: req.level)])
            self._retract(Need.TURN, heads)

    def _retract(self, need: Need, reqs: Sequence[Req]) -> list[Req]:
        """Retract those that must leave so that the first of ``reqs`` for which any can has what it needs."""
        found = next(filter(None, (victims(need, req, self.queues, self.kv) for req in reqs)), [])
        for victim in found:
            retract(victim, self.queues, self.kv, self.counters)
        return found

    def _end(self, req: Req, finish: Finish) -> None:
        """End ``req`` on the scheduler's own decision; the engine reads `LastRound.ended` to answer its caller."""
        self.finish(req, finish)
        self.last.ended.append(req)

    def _end_starved(self, heads: list[Req | None], now_s: float) -> None:
        """End heads of the queues that found no memory for too long, while no request holds any."""
        if self.queues.away.holding or self.queues.chunked is not None:
            return
        for head in self.deadlines.starved([head for head in heads if head is not None], now_s):
            finish = cannot_start(head, self.kv)
            if finish is not None:
                self._end(head, finish)
                self.last.made_progress = True

    def _take_run(self, req: Req, run: Sequence[Drawn]) -> NewToken:
        """Give ``req`` its next token, made here or elsewhere, and what ``run`` has behind it; end it at its last, or
        where its own grammar raises."""
        try:
            return self._taken(req, run)
        except BaseException as error:  # noqa: BLE001
            self.finish(req, at_fault(req, error))
            return NewToken(req, None, None)

    def _taken(self, req: Req, run: Sequence[Drawn]) -> NewToken:
        token_id, logprob = run[0]
        if req.stamps.first_token_s is None:
            req.stamps.first_token_s = self._clock()
        if token_id == BROKEN or req.max_remaining <= 0:
            self.finish(req, end_without_token(req))
            return NewToken(req, None, None)
        if req.state is not ReqState.HANDING_OFF:  # else the receiver appends it
            (_, *accepted), finish = take_drawn(req, run)
            forced: tuple[Drawn, ...] = ()
            if finish is None and req.guide is not None:
                forced, finish = self._jump(req)
            if finish is not None:
                self.finish(req, finish)
            return NewToken(req, token_id, logprob, (*accepted, *forced), len(accepted))
        return NewToken(req, token_id, logprob)

    def _jump(self, req: Req) -> tuple[tuple[Drawn, ...], Finish | None]:
        """Take the tokens that the grammar of ``req`` forces next. Returns: them, and its end."""
        if not self._config.mixed_steps or len(self.queues.under_way):
            return (), None  # others would wait for the run's step; or the step under way is making its first token
        queues, chunk_size = self.queues, self._config.chunked_prefill_size or 0
        most = run_tokens(chunk_size, len(queues.running), page_size=self.kv.page_size)
        left = most - sum(each.extend_len for each in queues.forced) - 1
        forced, finish = take_forced(req, min(MAX_FORCED, left))
        self.counters["forced_tokens"] += len(forced)
        if forced and finish is None:
            queues.running.remove(req)
            req.move(ReqState.PREFILLING)
            queues.forced.append(req)
        return forced, finish

    def _decode_plan(self, rows: DecodeRows) -> DecodePlan:
        """Plan a step of all running requests, whose ``rows`` have slots; drafts get rows behind those."""
        reqs, groups = self.queues.running, self._groups(self.queues.running)
        if self.drafts is None:
            return decode_plan(reqs, rows, self._table_writes(), groups)
        rows, draft_rows, of_drafts = self.drafts.place(reqs, rows)
        if draft_rows and self._config.cascade:
            min_saved = self._config.cascade_saves or 0
            groups = draft_groups(groups, draft_rows, rows.seq_lens, page_size=self.kv.page_size, min_saved=min_saved)
        return decode_plan(reqs, rows, self._table_writes(), groups, draft_rows=draft_rows, of_drafts=of_drafts)

    def _take_decode_slots(self) -> tuple[bool, DecodeRows | None]:
        """Take a slot for the next token of each running request. Returns: whether any was retracted for it; the rows,
        or None when none runs."""
        queues = self.queues
        gave_way = retract_until_it_fits(queues, self.kv, self._ratio, self.counters)
        if not queues.running:
            return gave_way, None
        self._ratio.decode_step()
        if queues.adapters is not None:  # the rows of an adapter lie side by side, and are multiplied together
            queues.running.sort(key=lambda req: "" if req.asked.adapter is None else req.asked.adapter.identity)
        return gave_way, decode_rows(queues.running, self.kv)

    def _leave_out(self, ending: Sequence[Req], rows: DecodeRows | None) -> tuple[list[Req], DecodeRows | None]:
        """Leave running requests out of a step in which the prompts of ``ending`` end, and take their slots back; no
        table write is due. Returns: those that run on, and their part of ``rows``."""
        running = self.queues.running
        left_out = self.queues.waiting.shares.easing.leave_out(running, ending) if rows is not None else []
        for req in left_out:
            self.kv.cut(req)
        gone = set(left_out)
        stay = [req for req in running if req not in gone] if left_out else running
        return stay, None if rows is None else rows.of(stay, running)

    def _next_prompts(self, now_s: float) -> ExtendBatch:
        """Choose the prompts of this step, and grant decode legs their memory."""
        queues, config, last = self.queues, self._config, self.last
        assert config.chunked_prefill_size is not None
        if queues.adapters is not None:
            queues.adapters.look(queues.holding)
        in_flight = [*queues.running, *queues.away.in_state(ReqState.RECEIVING)]
        num_handing_off = len(queues.away.in_state(ReqState.HANDING_OFF))  # each needs its row, and no more pages
        limits = Limits(
            chunk_size=config.chunked_prefill_size,
            share_len=config.in_batch_prefix_len,
            in_flight=in_flight,
            max_running=self.max_running - num_handing_off,
            running=queues.running if config.mixed_steps else (),
        )
        batch = next_batch(queues, self.kv, self._ratio, self.counters, limits, now_s=now_s)
        if queues.chunked is None or batch.rows:  # else the next chunk found no memory: no leg may take it first
            room = Room(
                num_rows=limits.max_running - len(in_flight) - len(queues.forced) - len(batch.reqs),
                max_receiving=max_receiving(self.max_running),
                reserved=batch.reserved,
                alone=not in_flight and not batch.reqs,
                barrier=batch.barrier,
            )
            last.made_progress |= grant(queues, self.kv, self._ratio, room, now_s=now_s)
        last.refusals = batch.refusals
        last.made_progress |= batch.loaded > 0
        last.short = batch.short or queues.prealloc.short or (None if batch.rows else queues.chunked)
        return batch

    def _groups(self, reqs: list[Req], *, first: int = 0) -> tuple[PrefixGroup, ...]:
        """Find which of ``reqs``, the first of which is the step's row ``first``, begin with the same pages."""
        config = self._config
        return self._shared.groups(reqs, first=first, min_saved=config.cascade_saves or 0) if config.cascade else ()

    def _table_writes(self) -> tuple[TableWrite, ...]:
        return tuple(TableWrite(row, start, slots) for row, start, slots in self.kv.table.drain_writes())
