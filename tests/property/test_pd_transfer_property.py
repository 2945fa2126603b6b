"""Two engines joined by a wire, random requests, chunks, pools, aborts and faults in any order: every request ends
once, with the answer of one engine, and no page is lost, shared or reused too early on either side.

The wire checks that a page that is sent does not change before it was read, and is not free; that one that is written
to is neither free nor in the prefix cache; and late writes of failed rooms leave garbage. The stages that a request
reports are never negative, and sum to its time.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.types import FinishReason
from tests.fakes import continuation
from tests.harness import ask
from tests.pair import Pair, Side

PREFIXES = [list(range(24)), [*range(8), 99], [7] * 30, []]
LONGEST = 30 + 12 + 16  # tokens of one request


@dataclass(frozen=True)
class Asked:
    """What one side owes."""

    prompt: list[int]
    length: int  # tokens; 0 for a prefill leg
    num_choices: int


arrivals = st.tuples(
    st.sampled_from(["pair", "pair", "pair", "pair", "prefill side", "decode side", "prefill leg", "decode leg"]),
    st.integers(0, len(PREFIXES) - 1),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 16),  # max_new_tokens
    st.sampled_from([1, 1, 2]),  # n
)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(arrivals, min_size=2, max_size=10),
    seed=st.integers(0, 2**32),  # of the order in which things happen
    page_size=st.sampled_from([1, 2, 4, 16]),
    chunks=st.tuples(st.sampled_from([3, 16, 64]), st.sampled_from([3, 64])),
    spare=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    ratio=st.sampled_from([0.0, 0.5, 1.0]),
    prefix_cache=st.sampled_from(["radix", "radix", "chunk"]),
    overlap=st.sampled_from(["on", "off"]),
)
def test_every_request_ends_once_with_the_answer_of_one_engine(
    requests: list[tuple[str, int, list[int], int, int]],
    seed: int,
    page_size: int,
    chunks: tuple[int, int],
    spare: tuple[int, int],
    ratio: float,
    prefix_cache: str,
    overlap: str,
) -> None:
    """Pool, Table, Radix, Same answer and Request, after every step."""
    sides = [
        {"num_pages": -(-(LONGEST + more) // page_size) + 1, "chunked_prefill_size": chunk}
        for more, chunk in zip(spare, chunks, strict=True)
    ]
    pair = Pair(
        prefill=sides[0],
        decode=sides[1],
        page_size=page_size,
        max_running=3,
        new_token_ratio=ratio,
        min_new_token_ratio=min(ratio, 0.1),
        prefix_cache=prefix_cache,
        overlap=overlap,
    )
    asked: dict[tuple[int, str], Asked] = {}
    rng, stages = random.Random(seed), Stages(pair)
    for number, (where, prefix, tail, length, n) in enumerate(requests):
        stages.arrived_s[f"r{number}"] = pair.clock.now_s
        arrive(pair, f"r{number}", where, Asked([*PREFIXES[prefix], *tail], length, n), asked)
        for _ in range(rng.randrange(12)):
            disturb(pair, rng, sorted(rid for _, rid in asked))
            stages.watch()
    settle(pair, stages)
    both = (pair.prefill, pair.decode)
    for (side, rid), owed in asked.items():
        for index in range(owed.num_choices):
            check_answer(both[side], rid, index, owed)
    assert pair.at_rest


class Stages:
    """What requests say of their time, held against the clock when they end."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.arrived_s, self.seen = pair, dict[str, float](), set[tuple[int, str, int]]()

    def watch(self) -> None:
        """Those that have ended since the last call did so now."""
        for at, side in enumerate((self.pair.prefill, self.pair.decode)):
            for (rid, index), deltas in side.deltas.items():
                if deltas[-1].finish is None or (at, rid, index) in self.seen:
                    continue
                self.seen.add((at, rid, index))
                stages = deltas[-1].stages
                assert stages is not None
                parts = (stages.queue_s, stages.prefill_s, stages.transfer_s, stages.decode_s)
                assert min(parts) >= 0.0, stages
                assert sum(parts) == pytest.approx(self.pair.clock.now_s - self.arrived_s[rid]), stages


def arrive(pair: Pair, rid: str, where: str, owed: Asked, asked: dict[tuple[int, str], Asked]) -> None:
    """To one side alone, or as two legs, or as one leg without the other."""
    request = ask(rid, owed.prompt, max_new_tokens=owed.length, n=owed.num_choices)
    if where in ("prefill side", "decode side"):
        side = int(where == "decode side")
        (pair.prefill, pair.decode)[side].submit(request)
        asked[side, rid] = owed
        return
    prefill, decode = pair.legs(request)
    if where != "decode leg":
        pair.prefill.submit(prefill)
        asked[0, rid] = Asked(owed.prompt, 0, 1)
    if where != "prefill leg":
        pair.decode.submit(decode)
        asked[1, rid] = owed


def disturb(pair: Pair, rng: random.Random, rids: list[str]) -> None:
    """One thing that may happen at any time."""
    match rng.choices(["turn", "pump", "fail", "abort", "drain"], weights=[10, 6, 3, 2, 1])[0]:
        case "turn":
            pair.turn(pump=0)
        case "pump":
            pair.wire.pump(rng.choice([1, 1, 2, None]), pick=rng.randrange(8))
        case "fail":
            live = [room.number for room in pair.wire.rooms.values() if room.failed is None]
            if live:
                pair.wire.fail(rng.choice(live[-4:]))
        case "abort":
            side = rng.choice([pair.prefill, pair.decode])
            side.abort(rng.choice(rids[-4:]))
            side.engine.scheduler.check()
        case "drain":
            pair.wire.resume_draining()
            pair.wire.draining = rng.random() < 0.5


def settle(pair: Pair, stages: Stages) -> None:
    """Let everything end; rooms that only one side knows time out."""
    pair.wire.resume_draining()
    for _ in range(3000):
        if not pair.busy:
            break
        pair.turn()
        stages.watch()
        for room in list(pair.wire.rooms.values()):
            prealloc = pair.decode.engine.scheduler.queues.prealloc
            alone = room.sender is None or (room.order is None and not len(prealloc))
            if alone and not room.due:
                pair.wire.fail(room.number, "the other side did not come")
    else:
        raise AssertionError(f"still busy: {pair.prefill.engine.open_rids}, {pair.decode.engine.open_rids}")
    for side in (pair.prefill, pair.decode):
        side.take(side.engine.poll())
        side.engine.scheduler.check()


def check_answer(side: Side, rid: str, index: int, owed: Asked) -> None:
    made = side.ids(rid, index)
    assert made == continuation(owed.prompt, len(made)), f"{rid}[{index}]: wrong text"
    reason = side.end(rid, index)
    assert reason is not None, f"{rid}[{index}] was never answered"
    if reason is FinishReason.LENGTH:
        assert len(made) == owed.length
    elif reason in (FinishReason.HANDED_OFF, FinishReason.ERROR):
        assert owed.length == 0, f"{rid}[{index}] ended with {reason}"
    else:
        assert reason is FinishReason.ABORT
