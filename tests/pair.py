"""A prefill and a decode engine over fake devices, joined by a FakeWire: what tests of KV transfers drive."""

from collections.abc import Sequence
from dataclasses import replace

from kvtransfer.types import PdTicket
from replicas.engine.engine import Engine
from replicas.request import ReqState
from replicas.types import FinishReason, GenerateRequest, PdLeg, PdTransfer, PdTransferReport, TokenDelta
from tests.fake_transfer_service import FakeTransferService, FakeWire
from tests.harness import Clock, ask, fake_engine


class Side:
    """One engine, and what it has answered."""

    def __init__(self, engine: Engine, service: FakeTransferService) -> None:
        self.engine = engine
        self.service = service
        self.deltas: dict[tuple[str, int], list[TokenDelta]] = {}
        store = engine.kv.store
        service.free_pages = lambda: set(store.allocator.free_pages().tolist())
        service.shared_pages = lambda: set(store.cache.all_pages().tolist())

    def submit(self, request: GenerateRequest) -> None:
        self.take(self.engine.submit(request))

    def step(self) -> None:
        self.take(self.engine.step())

    def abort(self, rid: str) -> None:
        self.take(self.engine.abort(rid))

    def take(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            choice = self.deltas.setdefault((delta.rid, delta.index), [])
            assert not choice or choice[-1].finish is None, f"{delta.rid} has deltas after its end"
            choice.append(delta)

    def ids(self, rid: str, index: int = 0) -> list[int]:
        return [token for delta in self.deltas.get((rid, index), ()) for token in delta.token_ids]

    def end(self, rid: str, index: int = 0) -> FinishReason | None:
        deltas = self.deltas.get((rid, index))
        return deltas[-1].finish.reason if deltas and deltas[-1].finish is not None else None

    def report(self, rid: str) -> PdTransferReport:
        """How its KV transfer ended."""
        report = self.deltas[rid, 0][0].kv_transfer
        assert report is not None
        return report

    def state(self, rid: str, index: int = 0) -> ReqState | None:
        req = self.engine.find(rid, index)
        return req.state if req is not None else None

    def pages(self) -> tuple[int, int, int, int, int]:
        """Free, evictable, protected, reserved, quarantined."""
        pool = self.engine.stats().pool
        return (
            pool.free_pages,
            pool.evictable_pages,
            pool.protected_pages,
            pool.reserved_pages,
            pool.quarantined_pages,
        )

    @property
    def at_rest(self) -> bool:
        """Nothing is held: every page is free or evictable."""
        return self.pages()[2:] == (0, 0, 0)


class Pair:
    """``prefill`` and ``decode``; a `turn` steps both and checks every invariant."""

    def __init__(
        self, *, prefill: dict[str, object] | None = None, decode: dict[str, object] | None = None, **both: object
    ) -> None:
        self.clock = Clock()
        self.wire = FakeWire()
        sides = [
            Side(fake_engine(wire=self.wire, clock=self.clock, **{**both, **(own or {})})[0], self.wire.services[-1])  # type: ignore[arg-type]
            for own in (prefill, decode)
        ]
        self.prefill, self.decode = sides
        self.num_rooms = 0

    def legs(self, request: GenerateRequest) -> tuple[GenerateRequest, GenerateRequest]:
        """``request`` for the prefill and for the decode side, with the same new ticket. Rooms count from 1."""
        self.num_rooms += 1
        ticket = PdTicket(room=self.num_rooms, generation=1, prefill=self.prefill.service.address)
        return (
            replace(request, kv_transfer=PdTransfer(leg=PdLeg.PREFILL, ticket=ticket)),
            replace(request, kv_transfer=PdTransfer(leg=PdLeg.DECODE, ticket=ticket)),
        )

    def ask(self, rid: str, prompt: Sequence[int], **sampling: object) -> None:
        """Both legs of one greedy request."""
        prefill, decode = self.legs(ask(rid, prompt, **sampling))
        self.prefill.submit(prefill)
        self.decode.submit(decode)

    def turn(self, *, pump: int | None = None) -> None:
        """Both engines step once, then ``pump`` due things happen on the wire (all by default)."""
        self.clock.now_s += 0.01
        for side in (self.prefill, self.decode):
            side.step()
            side.engine.scheduler.check()
            if not side.engine.has_work:
                side.engine.kv.check_idle()
            assert side.engine.kv.store.failed_checks == 0, "held pages were called lost"
        self.wire.pump(pump)

    def until(self, side: Side, rid: str, state: ReqState | None, *, pump: int | None = None) -> None:
        """Turn until request ``rid`` of ``side`` is in ``state`` (None: it has ended)."""
        for _ in range(500):
            if side.state(rid) is state:
                return
            self.turn(pump=pump)
        raise AssertionError(f"{rid} is {side.state(rid)}, not {state}")

    @property
    def at_rest(self) -> bool:
        return self.prefill.at_rest and self.decode.at_rest

    @property
    def busy(self) -> bool:
        """Something is left to do on either side, or on the wire."""
        return bool(self.prefill.engine.has_work or self.decode.engine.has_work or self.wire.num_due)

    def run(self, max_turns: int = 1000) -> None:
        """Turn until nothing is left to do on either side, nor on the wire."""
        for _ in range(max_turns):
            if not self.busy:
                for side in (self.prefill, self.decode):
                    side.take(side.engine.poll())
                    side.engine.scheduler.check()
                return
            self.turn()
        raise AssertionError(f"still busy: {self.prefill.engine.open_rids}, {self.decode.engine.open_rids}")
