"""Two engines joined by a wire, random requests, chunks, pools, aborts and faults in any order: every request ends once,
with the answer of one engine, and no page is lost, shared or reused too early on either side.

The wire checks that a page that was sent does not change before it was read; late writes of failed rooms leave garbage.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.types import FinishReason
from tests.fakes import continuation
from tests.harness import ask
from tests.pair import Pair, Side

PREFIXES = [list(range(24)), [*range(8), 99], [7] * 30, []]
LONGEST = 30 + 12 + 16  # tokens of one request

arrivals = st.tuples(
    st.sampled_from(["pair", "pair", "pair", "prefill side", "decode side", "only prefill leg", "only decode leg"]),
    st.integers(0, len(PREFIXES) - 1),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 16),  # max_new_tokens
    st.sampled_from([1, 1, 2]),  # n
)
actions = st.lists(
    st.one_of(
        arrivals,
        st.tuples(st.just("turn"), st.integers(1, 6), st.sampled_from([0, 1, 2, None]), st.integers(0, 5)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.booleans()),
        st.tuples(st.just("fail"), st.integers(1, 20)),
        st.tuples(st.just("drain"), st.booleans()),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    actions=actions,
    page_size=st.sampled_from([1, 2, 4, 16]),
    chunks=st.tuples(st.sampled_from([3, 16, 64]), st.sampled_from([3, 64])),
    spare=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    ratio=st.sampled_from([0.0, 0.5, 1.0]),
    prefix_cache=st.sampled_from(["radix", "radix", "chunk"]),
)
def test_every_request_ends_once_with_the_answer_of_one_engine(
    actions: list[tuple[object, ...]],
    page_size: int,
    chunks: tuple[int, int],
    spare: tuple[int, int],
    ratio: float,
    prefix_cache: str,
) -> None:
    """Issue section 3; DESIGN.md section 3: Pool, Table, Radix, Same answer and Request, after every step."""
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
    )
    asked: dict[tuple[int, str], tuple[list[int], int, int]] = {}  # (side, rid) -> prompt, length, choices
    both = (pair.prefill, pair.decode)
    for number, action in enumerate(actions):
        match action:
            case ("turn", int(count), pump, int(pick)):
                for _ in range(count):
                    pair.turn(pump=0)
                    pair.wire.pump(pump, pick=pick)  # type: ignore[arg-type]
            case ("abort", int(which), bool(side)) if asked:
                rid = sorted({rid for _, rid in asked})[which % len({rid for _, rid in asked})]
                both[side].take(both[side].engine.abort(rid))
                both[side].engine.scheduler.check()
            case ("fail", int(room)) if room <= pair.num_rooms:
                pair.wire.fail(room)
            case ("drain", bool(on)):
                pair.wire.resume_draining()
                pair.wire.draining = on
            case (str(where), int(prefix), list(tail), int(length), int(n)) if where not in ("turn", "abort"):
                arrive(pair, f"r{number}", where, [*PREFIXES[prefix], *tail], length, n, asked)
    settle(pair)
    for (side, rid), (prompt, length, n) in asked.items():
        for index in range(n):
            check_answer(both[side], rid, index, prompt, length)
    assert pair.prefill.at_rest
    assert pair.decode.at_rest


def arrive(
    pair: Pair,
    rid: str,
    where: str,
    prompt: list[int],
    length: int,
    n: int,
    asked: dict[tuple[int, str], tuple[list[int], int, int]],
) -> None:
    request = ask(rid, prompt, max_new_tokens=length, n=n)
    if where in ("prefill side", "decode side"):
        side = int(where == "decode side")
        (pair.prefill, pair.decode)[side].submit(request)
        asked[side, rid] = (prompt, length, n)
        return
    prefill, decode = pair.legs(request)
    if where != "only decode leg":
        pair.prefill.submit(prefill)
        asked[0, rid] = (prompt, 0, 1)
    if where != "only prefill leg":
        pair.decode.submit(decode)
        asked[1, rid] = (prompt, length, n)


def settle(pair: Pair) -> None:
    """Let everything end; rooms that only one side knows time out."""
    pair.wire.resume_draining()
    for _ in range(3000):
        if not (pair.prefill.engine.has_work or pair.decode.engine.has_work or pair.wire.num_due):
            break
        pair.turn()
        for room in list(pair.wire.rooms.values()):
            if not room.due and (room.sender is None or room.order is None):
                waits = room.sender is not None or room.order is not None
                if waits and not (room.order is None and pair.decode.engine.scheduler.prealloc):
                    pair.wire.fail(room.number, "nobody came")
    else:
        raise AssertionError(f"still busy: {pair.prefill.engine.open_rids}, {pair.decode.engine.open_rids}")
    for side in (pair.prefill, pair.decode):
        side.take(side.engine.poll())
        side.engine.scheduler.check()


def check_answer(side: Side, rid: str, index: int, prompt: list[int], length: int) -> None:
    made = side.ids(rid, index)
    assert made == continuation(prompt, len(made)), f"{rid}[{index}]: wrong text"
    reason = side.end(rid, index)
    assert reason is not None, f"{rid}[{index}] was never answered"
    if reason is FinishReason.LENGTH:
        assert len(made) == length
    elif reason in (FinishReason.HANDED_OFF, FinishReason.ERROR):
        assert length == 0, f"{rid}[{index}] ended with {reason}"
    else:
        assert reason is FinishReason.ABORT
