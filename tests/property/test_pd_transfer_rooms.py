"""Rooms between three engines while everything goes wrong: every promise of `TransferService` holds (SPEC H02, H19).

Messages come late, connections break, processes die, hang and restart on their old address, requests are aborted, bytes
are flipped, notes are lost. After each turn: check() of every service, pages balance, no page that no peer may write to
has changed, nothing waits past a deadline. In the end every room has had exactly the events that were promised.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.transfer_net import Net, SimEngine, endings

which = st.integers(0, 100)


class PdTransferRooms(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000), tps=st.sampled_from([(1, 1, 1), (2, 1, 2), (1, 3, 1)]))
    def start(self, seed: int, tps: tuple[int, ...]) -> None:
        self.net = Net(seed)
        for tp in tps:
            self.net.add(tp=tp)

    def pick(self, at: int) -> SimEngine | None:
        living = [engine for engine in self.net.living if not engine.hung]
        return living[at % len(living)] if living else None

    @rule(
        p=st.integers(0, 2), d=st.integers(0, 2), pages=st.integers(1, 4), prefix=st.integers(0, 4), leg=st.booleans()
    )
    def kv_transfer(self, p: int, d: int, pages: int, prefix: int, leg: bool) -> None:
        """Any engine plays any side; the peer may hang or be dead, before any other knows."""
        prefill, decode = self.net.engines[p], self.net.engines[d]
        if decode.alive and not decode.hung:
            self.net.kv_transfer(
                prefill,
                decode,
                num_pages=pages,
                first_page=min(prefix, pages),
                leg=leg and prefill.alive and not prefill.hung,
            )

    @rule(at=which)
    def leg_arrives(self, at: int) -> None:
        """After its receiver's open, or after everything."""
        rooms = [r for r in self.net.rooms if not r.leg and r.prefill.alive and not r.prefill.hung]
        if rooms:
            room = rooms[at % len(rooms)]
            room.prefill.expect(room)

    @rule(at=which, num=st.integers(0, 3), last=st.booleans())
    def prefill(self, at: int, num: int, last: bool) -> None:
        rooms = [room for engine in self.net.living if not engine.hung for room in engine.sendable()]
        if rooms:
            room = rooms[at % len(rooms)]
            room.prefill.send(room, num, last=last)

    @rule(seconds=st.sampled_from([0.05, 0.05, 0.2, 0.5, 2.0]), whole=st.booleans())
    def run(self, seconds: float, whole: bool) -> None:
        self.net.run(seconds, step_s=min(seconds, 0.1), whole=whole)

    @rule(at=which)
    def abort_receive(self, at: int) -> None:
        rooms = [room for e in self.net.living if not e.hung for room in e.receiving.values()]
        if rooms:
            room = rooms[at % len(rooms)]
            room.decode.core.abort_receive(room.number)

    @rule(at=which)
    def abort_send(self, at: int) -> None:
        rooms = [room for e in self.net.living if not e.hung for room in e.sending.values()]
        if rooms:
            room = rooms[at % len(rooms)]
            room.prefill.core.abort_send(room.number, "the client is gone")

    @rule()
    def cut(self) -> None:
        self.net.cut()

    @rule(at=which)
    def hang(self, at: int) -> None:
        if (engine := self.pick(at)) is not None:
            self.net.hang(engine)

    @rule()
    def resume(self) -> None:
        for engine in self.net.living:
            if engine.hung:
                self.net.resume(engine)

    @rule(at=st.integers(0, 2))
    def restart(self, at: int) -> None:
        """Dies, hung or not, and a new process listens at once on the old address."""
        old = self.net.engines[at]
        if old.alive:
            self.net.kill(old)
        engine = self.net.add(tp=old.pools.layout.tp, port=old.address.port)
        self.net.engines.remove(engine)
        self.net.engines[at] = engine

    @rule(at=st.integers(0, 2))
    def kill(self, at: int) -> None:
        if self.net.engines[at].alive:
            self.net.kill(self.net.engines[at])

    @rule(at=st.integers(0, 2), rank=st.integers(0, 1))
    def kill_rank(self, at: int, rank: int) -> None:
        """Rank 0's process dies; those of the others live on."""
        engine = self.net.engines[at]
        if engine.alive:
            self.net.kill_rank(engine, min(rank, engine.pools.layout.tp - 1))

    @rule()
    def bury(self) -> None:
        for orphan in list(self.net.orphans):
            self.net.bury(orphan)

    @rule(flips=st.integers(0, 2), notes=st.integers(0, 1), checks=st.integers(0, 4))
    def spoil(self, flips: int, notes: int, checks: int) -> None:
        faults = self.net.fabric.faults
        faults.flip_bytes, faults.lose_notes, faults.hold_checks = flips, notes, checks

    @rule(at=st.integers(0, 2))
    def out_of_reach(self, at: int) -> None:
        """Let no peer connect to it for now; connections that are up stay."""
        self.net.unreachable ^= {self.net.engines[at].address.port}

    def teardown(self) -> None:
        if not hasattr(self, "net"):
            return
        self.resume()
        self.bury()
        self.net.unreachable.clear()
        self.spoil(0, 0, 0)
        for _ in range(30):  # longer than any deadline and any backoff
            self.net.run(1.0, step_s=0.2)
        wrong = [text for room in self.net.rooms for text in endings(room)]
        assert not wrong, wrong
        for engine in self.net.living:
            assert engine.core.num_open == 0
            assert not engine.core.receiving.quarantine
            assert all(port.num_in_flight == 0 for port in engine.pools.ports)
            engine.check()
        self.check_new_rooms()

    def check_new_rooms(self) -> None:
        """After all that went wrong, pages still go from each engine that lives, and from a new one, to each other."""
        self.net.add()
        begun = [self.net.kv_transfer(p, d, num_pages=1) for p in self.net.living for d in self.net.living]
        rooms = [room for room in begun if room is not None]  # else an engine's pages wait for legs that never come
        self.net.run(1.0)
        for room in rooms:
            room.prefill.send(room, 1, last=True)
        self.net.run(1.0)
        assert [room.receives for room in rooms] == [["Received"]] * len(rooms), [room.reasons for room in rooms]


PdTransferRooms.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_every_room_ends_as_promised_whatever_happens = PdTransferRooms.TestCase
