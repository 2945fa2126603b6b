"""Three tiers under random requests and faults: {insert, hit, evict, load, write fails, read corrupt, disk full, slow,
hang, restart}. After every step the books of all tiers are right; every answer is the oracle's; nothing stays held."""

import random
import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from replicas.types import Finish, FinishReason
from tests.harness import to_host
from tests.tiered_bench import TieredBench

STEMS = [[stem * 100 + at for at in range(32)] for stem in (1, 2, 3)]  # three conversations


class TiersUnderFaults(RuleBasedStateMachine):
    """Requests of a few stems; their pages go down the tiers, come up again, and are damaged in between."""

    @initialize(
        num_pages=st.integers(12, 16),
        num_host=st.sampled_from([2, 8, 24]),
        write=st.sampled_from(["write_through", "write_through_selective", "write_back", "adaptive"]),
        policy=st.sampled_from(["best_effort", "wait_complete", "timeout", "expected"]),
        compute_s=st.sampled_from([0.0, 0.001, 1.0]),
    )
    def start(self, num_pages: int, num_host: int, write: str, policy: str, compute_s: float) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="manta-tiers-")
        self.kind = {
            "num_pages": num_pages,
            "num_host": num_host,
            "write": write,
            "policy": policy,
            "compute_s_per_token": compute_s,
        }
        self.bench = TieredBench(Path(self.folder.name), **self.kind)  # type: ignore[arg-type]
        self.seen: Counter[str] = Counter()

    @rule(
        stem=st.integers(0, 2), length=st.integers(1, 32), more=st.integers(0, 9), steps=st.integers(0, 6),
        tenant=st.sampled_from(["", "one", "two"]),
    )  # fmt: skip
    def ask(self, stem: int, length: int, more: int, steps: int, tenant: str) -> None:
        self.bench.submit([*STEMS[stem][:length], *range(more)], max_new_tokens=2, tenant=tenant)
        self.run(steps)

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.bench.scheduler.has_work:
                self.bench.step()

    @rule()
    def evict(self) -> None:
        to_host(self.bench.kv)

    @rule()
    def write_and_tidy(self) -> None:
        if not self.bench.hangs:
            self.bench.settle()

    @rule(which=st.integers(0, 9))
    def abort(self, which: int) -> None:
        open_ = [req for req in self.bench.reqs if req.finish is None]
        if open_:
            req = open_[which % len(open_)]
            self.bench.scheduler.finish(req, Finish(reason=FinishReason.ABORT))

    @rule(page=st.integers(1, 24), bit=st.integers(0, 511))
    def flip_on_the_host(self, page: int, bit: int) -> None:
        if page <= self.bench.tiers.host.num_pages:
            self.bench.host.view[page, bit // 8] ^= 1 << bit % 8

    @rule(which=st.integers(0, 99), at=st.integers(0, 127), damage=st.sampled_from(["flip", "cut", "gone"]))
    def damage_a_file(self, which: int, at: int, damage: str) -> None:
        files = sorted(path for path in Path(self.folder.name).rglob("*") if path.is_file())
        if not files:
            return
        path = files[which % len(files)]
        data = bytearray(path.read_bytes())
        if damage == "gone" or not data:
            path.unlink()
        elif damage == "cut":
            path.write_bytes(data[: at % len(data)])
        else:
            data[at % len(data)] ^= 1 << at % 8
            path.write_bytes(data)

    @rule(fault=st.sampled_from(["", "eio", "full", "slow"]), hangs=st.booleans(), later_s=st.sampled_from([0.0, 60.0]))
    def weather(self, fault: str, hangs: bool, later_s: float) -> None:
        self.bench.disk.fault, self.bench.hangs = fault, hangs
        self.bench.clock.now_s += later_s

    @rule()
    def restart(self) -> None:
        """The process dies as it is; another one begins on the folder."""
        self.count()
        self.bench.close()
        self.bench = TieredBench(Path(self.folder.name), **self.kind)  # type: ignore[arg-type]

    def count(self) -> None:
        """Add up what has happened, of all processes."""
        host, store = self.bench.tiers.counters, self.bench.store.stats()
        self.seen.update(
            loaded=host.loaded_pages,
            evicted=host.evicted_pages,
            wrong_on_host=host.wrong_pages,
            read=store.reads,
            written=store.writes,
            corrupt=store.corrupt,
            full=store.full,
            errors=store.errors,
        )

    @invariant()
    def sound(self) -> None:
        bench = self.bench
        bench.scheduler.check()
        bench.tiers.check()
        bench.store_tier.check()
        bench.store.check()
        assert bench.tiers.host.coming == bench.store_tier.num_taken

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.disk.fault, self.bench.hangs = "", False
        self.bench.finish()
        self.count()
        self.bench.close()
        self.folder.cleanup()


TestTiersUnderFaults = TiersUnderFaults.TestCase
TestTiersUnderFaults.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_in_long_histories_all_of_it_happens() -> None:
    """Hypothesis' histories are short. Six of 250 events each; 0.6 s each."""
    seen: Counter[str] = Counter()
    for seed in range(6):
        draw, machine = random.Random(seed), TiersUnderFaults()
        machine.start(
            num_pages=12,
            num_host=draw.choice([2, 8, 24]),
            write=["write_through", "write_back", "adaptive"][seed % 3],
            policy=["wait_complete", "expected"][seed % 2],
            compute_s=1.0,
        )
        for _ in range(250):
            kind = draw.random()
            if kind < 0.5:
                length, more = draw.randint(1, 32), draw.randint(0, 9)
                machine.ask(
                    stem=draw.randint(0, 2),
                    length=length,
                    more=more,
                    steps=draw.randint(1, 12),
                    tenant=draw.choice(["", "one", "two"]),
                )
            elif kind < 0.65:
                machine.evict()
            elif kind < 0.75:
                machine.write_and_tidy()
            elif kind < 0.8:
                machine.flip_on_the_host(page=draw.randint(1, 24), bit=draw.randint(0, 511))
            elif kind < 0.85:
                damage = draw.choice(["flip", "cut", "gone"])
                machine.damage_a_file(which=draw.randint(0, 99), at=draw.randint(0, 127), damage=damage)
            elif kind < 0.92:
                fault = draw.choice(["", "", "eio", "full", "slow"])
                machine.weather(fault=fault, hangs=draw.random() < 0.2, later_s=60.0)
            elif kind < 0.95:
                machine.restart()
            else:
                machine.abort(which=draw.randint(0, 9))
            machine.sound()
        machine.teardown()
        seen += machine.seen
    assert min(seen[each] for each in ("loaded", "evicted", "read", "written")) >= 100, seen
    assert min(seen[each] for each in ("wrong_on_host", "corrupt", "full", "errors")) >= 2, seen
