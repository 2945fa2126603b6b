"""Queues: every open request of one engine, by what it waits for or what runs it.

Owns:      the membership and the order of each queue. These values only hold; what moves a request from one queue to
           another is in prefill.py, budget.py, decode.py, tokens.py and scheduler.py.
Never:     touches pages, or orders what waits (precedence.py).
Invariant: an open request is in exactly one queue, or only in a step under way (one whose last chunk, or the run of
           tokens that its grammar forced, is being computed); see each `check`.
Thread:    scheduler thread only.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from replicas.request import Req, ReqQueue, ReqState
from replicas.scheduler.precedence import WaitingQueue


class AdapterRoom(Protocol):
    """The adapters (LoRA) that this engine holds (engine/adapters.py). Requests that hold pages have theirs; those that
    wait keep none."""

    def look(self, holders: Sequence[Req]) -> None:
        """Begin a look at the requests that wait; ``holders`` have pages. No step is under way."""
        ...

    def ready(self, req: Req) -> bool:
        """Whether ``req`` has its adapter; if not, that is loaded in its turn."""
        ...

    def hint(self, req: Req) -> None:
        """Read the adapter of a request whose turn comes soon."""
        ...

    def in_the_way(self, req: Req, lower: Sequence[Req], holders: Sequence[Req]) -> list[Req]:
        """Choose the requests of lower classes that have to go so that the adapter of ``req`` finds room."""
        ...


class PreallocQueue(ReqQueue):
    """Decode legs that hold nothing yet: they need row and pages before their K/V may be sent.

    No request overtakes its head: a head that found no memory bars later local requests (`bars`), and itself waits
    for an older local request that found none.

    Source: SPEC H07; SGLang's DecodePreallocQueue.
    """

    def __init__(self) -> None:
        super().__init__()
        self.short: Req | None = None  # the head, if it found no memory when grants were last made

    def remove(self, req: Req) -> None:
        super().remove(req)
        if self.short is req:
            self.short = None

    def bars(self, req: Req) -> bool:
        """Whether local request ``req`` must wait, because the head needs the memory that it would take. One in the
        background waits for every leg."""
        if req.in_background:
            return len(self) > 0
        return self.short is not None and req.rank.from_s > self.short.rank.from_s


class PdTransferQueue(ReqQueue):
    """Requests that wait for another replica, or for their grammar; no step runs them. Also the news for
    replicas/disagg: grants and ends.

    Each is WAITING (parked until its peer is ready, or its grammar compiled) and holds nothing, or RECEIVING or
    HANDING_OFF with row and pages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.granted: list[Req] = []  # decode legs that got row and pages, until `take_granted`
        self.ended: list[Req] = []  # legs that ended, until `take_ended`

    @property
    def holding(self) -> list[Req]:
        """The requests that hold row and pages."""
        return [req for req in self._reqs if req.state is not ReqState.WAITING]

    def in_state(self, state: ReqState) -> list[Req]:
        return [req for req in self._reqs if req.state is state]

    def take_granted(self) -> list[Req]:
        """Return the decode legs that got row and pages since the last call: their K/V may be requested."""
        granted, self.granted = self.granted, []
        return granted

    def take_ended(self) -> list[Req]:
        """Return the legs that ended since the last call, for whatever reason: their peers must hear of it."""
        ended, self.ended = self.ended, []
        return ended


class UnderWay:
    """The steps that were planned and not applied, oldest first, two at most; and what ended requests still hold there.

    A request of a step under way keeps its row and pages until that step is applied: a kernel may still write to them.
    """

    def __init__(self) -> None:
        self.steps: deque[list[Req]] = deque()
        self._ended: list[tuple[Req, bool]] = []

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, req: Req) -> bool:
        return any(req in step for step in self.steps)

    @property
    def newest(self) -> list[Req]:
        """The requests of the newest step, in the order of its rows."""
        return self.steps[-1]

    @property
    def ended(self) -> list[Req]:
        """The requests that are finished and hold pages to which a step under way still writes."""
        return [req for req, _ in self._ended]

    def begin(self, reqs: list[Req]) -> None:
        self.steps.append(reqs)

    def end(self) -> list[Req]:
        """Remove the oldest step. Returns: its requests, ended or not."""
        return self.steps.popleft()

    def hold(self, req: Req, *, keep: bool) -> None:
        """Keep what ``req``, which ended, holds until no step has it; ``keep``: its pages then go to the cache."""
        self._ended.append((req, keep))

    def take_released(self) -> list[tuple[Req, bool]]:
        """Return what `hold` was given for requests that no step has."""
        if not self._ended:
            return []
        released = [(req, keep) for req, keep in self._ended if req not in self]
        self._ended = [(req, keep) for req, keep in self._ended if req in self]
        return released


@dataclass(slots=True, kw_only=True)
class Queues:
    """All open requests of one engine; what the functions of the scheduler read and change."""

    waiting: WaitingQueue
    chunked: Req | None = None  # mid-prompt; its next chunk goes first. At most one (SPEC F06)
    running: list[Req] = field(default_factory=list)  # one token a step each; by adapter, and in the order of joining
    paused: list[Req] = field(default_factory=list)  # they run, but for the next step, which would be too long
    forced: list[Req] = field(default_factory=list)  # they ran until tokens were forced: the next step extends them
    prealloc: PreallocQueue = field(default_factory=PreallocQueue)
    away: PdTransferQueue = field(default_factory=PdTransferQueue)
    under_way: UnderWay = field(default_factory=UnderWay)
    adapters: AdapterRoom | None = None  # None: no request has one

    @property
    def only_away(self) -> bool:
        """Whether nothing is left to do here until another replica has done its part, or a grammar is compiled."""
        starting = len(self.waiting) or self.chunked is not None or len(self.prealloc)
        return not (starting or self.decoding or self.forced)

    @property
    def holding(self) -> list[Req]:
        """The open requests that hold row and pages and are in a queue: all but those only in a step."""
        return [*self.decoding, *self.begun, *self.away.holding]

    @property
    def decoding(self) -> list[Req]:
        """The requests that run, whether they are in the next step or not."""
        return [*self.running, *self.paused] if self.paused else self.running

    @property
    def begun(self) -> list[Req]:
        """The requests that are in the middle of a run of forced tokens, or of their prompt."""
        return [*self.forced, *([] if self.chunked is None else [self.chunked])]

    def remove(self, req: Req) -> None:
        """Take ``req`` out of the queue that has it, if one has."""
        if req in self.away:
            self.away.remove(req)
        elif req in self.prealloc:
            self.prealloc.remove(req)
        elif req.state is ReqState.WAITING:
            self.waiting.remove(req)
        elif req.state is ReqState.RUNNING:
            (self.paused if req in self.paused else self.running).remove(req)
        elif self.chunked is req:
            self.chunked = None
        elif req in self.forced:
            self.forced.remove(req)

    def check(self) -> None:
        """Raise AssertionError where a request is in a queue that does not fit its state."""
        for req in (*self.waiting, *self.prealloc):
            assert req.state is ReqState.WAITING, f"{req.rid} waits but is {req.state}"
            assert req.holding is None, f"{req.rid} waits but holds {req.holding}"
        self.waiting.check()
        for req in self.prealloc:
            assert req.leg is not None, f"{req.rid} waits for a grant and is no decode leg"
        assert self.prealloc.short is None or self.prealloc.short in self.prealloc, "the head that bars others has left"
        for req in self.away:
            assert req.state in (ReqState.WAITING, ReqState.RECEIVING, ReqState.HANDING_OFF), f"{req.rid}: {req.state}"
            assert (req.holding is None) == (req.state is ReqState.WAITING), f"{req.rid} is {req.state}: {req.holding}"
        for req in self.decoding:
            assert req.state is ReqState.RUNNING, f"{req.rid} is {req.state}"
            assert req.extend_len == 1, f"{req.rid} lacks the K/V of {req.extend_len} tokens"
        for req in self.forced:
            assert req.state is ReqState.PREFILLING, f"{req.rid} is to be extended and {req.state}"
        for req in self.holding:
            assert req.holding is not None, f"{req.rid} is {req.state} and holds nothing"
        for req in (req for step in self.under_way.steps for req in step):
            assert req.holding is not None, f"{req.rid} is in a step under way and holds nothing"
        for req in self.under_way.ended:
            assert req in self.under_way, f"{req.rid} ended, no step has it, and it holds pages"
