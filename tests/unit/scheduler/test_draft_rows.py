"""When guesses at further tokens are tried: what they follow, how likely they are, and what their rows cost."""

import numpy as np
import pytest

from replicas.request import Req
from replicas.scheduler import speculation
from replicas.scheduler.plan import DecodePlan
from replicas.scheduler.speculation import (
    MOST_ROWS,
    STEPS_TO_PLAIN,
    HitShare,
    Proposal,
    RowCost,
    Speculation,
    repeated_suffix,
)
from replicas.scheduler.tokens import COUNTERS, NewToken
from tests.fakes import continuation, next_token
from tests.harness import Bench, Clock, choice_of

LINEAR = {rows: float(rows) for rows in (1, 2, 4, 8, 16, 32)}  # a step takes as long as its rows by themselves
FLAT = dict.fromkeys((1, 32), 1.0)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([1, 2, 3, 4, 9, 2, 3, 4], (4, 3)),  # what follows 2, 3, 4 is the 9
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], (4, 4)),
        ([2, 3, 4, 8, 2, 3, 4, 9, 2, 3, 4], (7, 3)),  # the last of equals
        ([1, 2, 3, 4, 8, 2, 3, 4, 9, 1, 2, 3, 4], (4, 4)),  # but a longer one before it
        ([3, 4, 9, 3, 4], (0, 0)),  # two tokens are too few
        ([5, 5, 5, 5, 5], (4, 4)),
        ([1], (0, 0)),
        ([7, *range(20), 99, *range(20)], (21, 8)),  # no longer than is told apart
    ],
)
def test_the_longest_repeated_suffix_is_found(ids: list[int], expected: tuple[int, int]) -> None:
    assert repeated_suffix(np.array(ids, dtype=np.int32)) == expected


class Rig:
    """Drafts on a clock that the test moves, for requests whose text repeats itself."""

    def __init__(self, step_s: dict[int, float], *, num_reqs: int = 1) -> None:
        self.clock, self.counters = Clock(), dict.fromkeys(COUNTERS, 0)
        kv = Bench(max_running=num_reqs + 1).kv
        self.drafts = Speculation(kv, self.counters, step_s=step_s, clock=self.clock)
        self.reqs: list[Req] = []
        for number in range(num_reqs):
            self.add(f"r{number}")

    def add(self, rid: str) -> None:
        self.reqs.append(choice_of(rid, [*range(20), *range(12)], max_new_tokens=500))
        self.drafts._kv.admit(self.reqs[-1])

    def step(self, *, right: int, row_s: float = 0.0) -> int:
        """Run a step of 1 s, and of ``row_s`` more for each row of a draft, of which each request has the first
        ``right`` tokens come true. Returns: the rows."""
        chosen = self.drafts.choose(self.reqs)
        tried = {req: len(ids) for req, ids in zip(self.reqs, chosen, strict=False) if len(ids)}
        self.clock.now_s += 1.0 + row_s * sum(tried.values())
        tokens = []
        for req in self.reqs:
            guessed = np.resize(req.ids[repeated_suffix(req.ids[: req.num_tokens])[0] : req.num_tokens], 40).tolist()
            made = guessed[:right][: tried.get(req, 0) + 1]
            if len(made) == right:  # else all that was tried came true, and one more
                made = [*made, 999][: tried.get(req, 0) + 1]
            tokens.append(NewToken(req, made[0], None, tuple((token, None) for token in made[1:]), len(made) - 1))
        self.drafts.judge(len(self.reqs), tokens, tried)
        return sum(tried.values())


def test_a_step_without_drafts_comes_first_and_again_after_some_with() -> None:
    """It alone tells what such a step takes."""
    rig = Rig(FLAT)
    rows = [rig.step(right=40) for _ in range(STEPS_TO_PLAIN + 2)]
    assert [n > 0 for n in rows] == [False, *[True] * STEPS_TO_PLAIN, False]
    rig.add("more")
    assert rig.step(right=40) == 0
    assert rig.step(right=40) > 0


def test_more_rows_are_tried_while_they_come_true_and_fewer_when_they_do_not() -> None:
    rig = Rig({1: 1.0, 32: 2.0})
    first, *rest = [rig.step(right=40, row_s=1 / 31) for _ in range(30)][1:]
    assert first < 10
    assert rest[-1] > 20
    after = [rig.step(right=1, row_s=1 / 31) for _ in range(30)]
    assert after[-1] < 5


def test_none_is_tried_where_rows_cost_what_they_bring() -> None:
    """A row for a token: no gain, however right; then guesses are not even looked for."""
    rig = Rig(LINEAR)
    assert [rig.step(right=40) for _ in range(10)] == [0] * 10
    assert not rig.drafts._of_reqs


def test_wrong_guesses_end_and_are_judged_without_rows_until_they_are_right_again() -> None:
    rig = Rig({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4, 16: 4.0, 32: 7.2})
    tried = [rig.step(right=0, row_s=0.2) for _ in range(40)]
    assert tried[-20:] == [0] * 20
    assert sum(tried) <= 8
    tried = [rig.step(right=40, row_s=0.2) for _ in range(30)]
    assert tried[0] == 0
    assert tried[-1] > 4
    assert rig.counters["accepted_tokens.text"] == sum(tried) == rig.reqs[0].drafted[1]
    assert rig.counters["drafted_tokens.text"] == rig.reqs[0].drafted[0]


def test_rows_that_cost_more_than_at_start_are_no_longer_tried() -> None:
    """At start a row took nothing; now each takes a step's time, though all come true."""
    rig = Rig(FLAT)
    rows = [rig.step(right=40, row_s=1.0) for _ in range(40)]
    assert max(rows) > 20
    assert max(rows[20:]) <= 2
    assert max(rig.step(right=40) for _ in range(400)) > 20  # once they take nothing they are again


def test_a_step_has_fewer_rows_than_its_products_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MOST_ROWS", 32)
    for num_reqs in (1, 5, 16, 31, 40):
        rig = Rig(FLAT, num_reqs=num_reqs)
        rows = max(rig.step(right=40) for _ in range(4))
        assert rows + num_reqs <= max(31, num_reqs)
        assert (rows > 0) == (num_reqs < 31)


@pytest.mark.parametrize(("num_reqs", "expected"), [(7, 20), (8, 11)])
def test_where_nothing_is_worth_trying_for_many_guesses_are_looked_for_in_each_fourth_step(
    num_reqs: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig({1: 1.0, 32: 2.0}, num_reqs=num_reqs)
    for req in rig.reqs:
        rig.drafts._of_reqs[(req, "text")] = HitShare(0.0, 20.0)
    looked = set[float]()

    def propose(req: Req) -> Proposal | None:
        looked.add(rig.clock())
        return Speculation._propose(rig.drafts, req)

    monkeypatch.setattr(rig.drafts, "_propose", propose)
    assert [rig.step(right=0) for _ in range(20)] == [0] * 20
    assert len(looked) == expected  # of eight: 0 .. 7, 8, 12, 16
    rows = [rig.step(right=40) for _ in range(40)]
    assert sum(n > 0 for n in rows[20:]) > 15  # it is noticed that they are right


def test_the_time_of_choosing_is_a_part_of_what_drafts_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows take nothing by themselves."""
    rig = Rig(FLAT)

    def propose(req: Req) -> Proposal | None:
        rig.clock.now_s += 40.0
        return Speculation._propose(rig.drafts, req)

    monkeypatch.setattr(rig.drafts, "_propose", propose)
    rows = [rig.step(right=40) for _ in range(40)]
    assert max(rows) > 20
    assert max(rows[20:]) <= 2


def test_the_likeliest_guesses_of_all_requests_are_tried() -> None:
    """Of two requests, one whose guesses were right has most of the rows."""
    rig = Rig({1: 1.0, 2: 1.0, 32: 4.0}, num_reqs=2)
    good, poor = rig.reqs
    rig.drafts._of_reqs[(good, "text")] = HitShare(19.0, 20.0)
    rig.drafts._of_reqs[(poor, "text")] = HitShare(8.0, 20.0)
    rig.drafts.cost.timed(2, 0, 1.0)
    chosen = [len(ids) for ids in rig.drafts.choose(rig.reqs)]
    assert chosen[0] > 3 * chosen[1] > 0


def test_what_a_row_costs_is_read_between_what_was_measured() -> None:
    cost = RowCost({1: 1.0, 4: 1.3, 8: 2.1, 32: 4.5})
    assert cost.of(1, 8)[[0, 2, 4, 6, 7]] == pytest.approx([1.1, 1.3, 1.7, 2.1, 2.2])
    assert cost.of(32, 16)[-1] == pytest.approx(6.1 / 4.5)  # as the last that were measured
    assert RowCost({}).of(1, 2) == pytest.approx([1.02, 1.04])  # never free


def test_what_rows_cost_beside_few_requests_says_nothing_of_what_they_cost_beside_many() -> None:
    cost = RowCost({1: 1.0, 8: 1.0, 32: 2.0})  # free beside one, at start
    for _ in range(50):
        cost.timed(1, 0, 1.0)
        cost.timed(1, 4, 1.5)
    assert cost.of(1, 4)[-1] > 1.4
    assert cost.of(16, 16)[-1] == pytest.approx(2.0 / (1.0 + 8 / 24))


class Always(Speculation):
    """Proposes what the fake device says next, for some requests: always tried."""

    def __init__(self, bench: Bench, rids: set[str]) -> None:
        super().__init__(bench.kv, bench.scheduler.counters, step_s={}, clock=bench.clock)
        self._rids = rids

    def choose(self, reqs: list[Req]) -> list[np.ndarray]:  # type: ignore[override]
        def draft(req: Req) -> np.ndarray:
            ids = req.ids[: req.num_tokens].tolist()
            for _ in range(min(3, req.max_remaining - 1) if req.rid in self._rids else 0):
                ids.append(next_token(ids, 1000))
            return np.array(ids[req.num_tokens :], dtype=np.int32)

        return [draft(req) for req in reqs]


def test_the_rows_of_a_draft_are_a_group_and_its_request_leaves_its_own() -> None:
    """Three with 256 tokens in common; where one of two leaves, the other is in none."""
    bench = Bench(num_pages=400, context_len=400, chunked_prefill_size=512)
    for end in ([2, 3], [4, 5], [6, 7]):
        bench.submit([*[1] * 256, *end], max_new_tokens=40)
        bench.step()
    bench.submit([9] * 20, max_new_tokens=40)
    bench.step()
    bench.scheduler.features["speculation"] = Always(bench, {"r1", "r3"})
    plan = bench.step()
    assert isinstance(plan, DecodePlan)
    assert [list(rows) for rows in plan.draft_rows] == [[], [4, 5, 6], [], [7, 8, 9]]
    assert plan.seq_lens[[1, 4, 5, 6]].tolist() == [261, 262, 263, 264]
    found = [(group.members.tolist(), group.length) for group in plan.prefix_groups]
    assert found == [([0, 2], 256), ([1, 4, 5, 6], 260)]  # r3 has too few tokens
    assert [req.num_output for req in bench.reqs] == [5, 7, 3, 5]
    bench.scheduler.features["speculation"] = Always(bench, {"r0", "r1"})
    plan = bench.step()
    assert isinstance(plan, DecodePlan)
    assert [group.members.tolist() for group in plan.prefix_groups] == [[0, 4, 5, 6], [1, 7, 8, 9]]
    bench.run()


def test_a_draft_that_finds_no_page_is_left_out() -> None:
    """Two requests of 15 and 13 tokens have 8 pages of 4, of 9: three guesses need one more for either."""
    bench = Bench(num_pages=9, page_size=4, new_token_ratio=0.0, min_new_token_ratio=0.0)
    for number in range(2):
        bench.submit([number, *range(11)], max_new_tokens=12)
        bench.step()
    for _ in range(2):
        bench.step()
    bench.scheduler.features["speculation"] = Always(bench, {"r0", "r1"})
    plan = bench.step()
    assert isinstance(plan, DecodePlan)
    assert sorted(len(rows) for rows in plan.draft_rows) == [0, 3]
    assert bench.kv.store.alloc_failures == 0
    assert bench.scheduler.counters["retractions"] == 0
    bench.run()


def answered_again(bench: Bench, prompt: list[int], salt: str, *, max_new_tokens: int = 33) -> tuple[int, int, int]:
    """Return the decode steps of an answer, and the tokens that were drafted for it out of the tree, and accepted."""
    counters, before = bench.scheduler.counters, len(bench.plans)
    drafted, accepted = counters["drafted_tokens.tree"], counters["accepted_tokens.tree"]
    bench.submit(prompt, max_new_tokens=max_new_tokens, cache_salt=salt)
    bench.run()
    num_steps = sum(isinstance(plan, DecodePlan) for plan in bench.plans[before:])
    return num_steps, counters["drafted_tokens.tree"] - drafted, counters["accepted_tokens.tree"] - accepted


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_an_answer_given_before_to_the_same_prompt_is_drafted_within_its_namespace(page_size: int) -> None:
    """Of its 33 tokens the last has no K/V, and those behind the last whole page are not kept."""
    bench = Bench(page_size=page_size, num_pages=1024 // page_size)
    bench.scheduler.features["speculation"] = Speculation(
        bench.kv, bench.scheduler.counters, step_s={}, clock=bench.clock
    )
    for salt in ("a", "b"):
        assert answered_again(bench, [1, 2, 3], salt) == (32, 0, 0)
        num_steps, drafted, accepted = answered_again(bench, [1, 2, 3], salt)
        assert drafted == accepted > 20
        assert num_steps <= 32 - accepted


def test_what_the_tree_keeps_behind_a_prompt_may_be_wrong() -> None:
    """Another prompt goes on behind it with other tokens: each answer is the oracle's (`Bench.run`)."""
    bench = Bench(page_size=4, num_pages=256)
    bench.scheduler.features["speculation"] = Speculation(
        bench.kv, bench.scheduler.counters, step_s={}, clock=bench.clock
    )
    prompt = [1, 2, 3]
    for right in (3, 5, 9):  # the first two steps have no draft
        behind = [*continuation(prompt, right), *range(700, 740 - right)]
        bench.submit([*prompt, *behind], max_new_tokens=1)
        bench.run()
        _, drafted, accepted = answered_again(bench, prompt, "", max_new_tokens=right + 3)
        assert drafted > 0
        assert accepted <= right


def test_a_step_waits_for_tokens_while_drafts_were_tried_of_late_then_each_sixteenth_if_it_has_rows_for_any() -> None:
    drafts = Rig({}, num_reqs=1).drafts
    waits = list[int]()
    for num_untried in range(40):
        drafts._num_untried = num_untried
        if drafts.needs_tokens(MOST_ROWS - 2):
            waits.append(num_untried)
        assert not drafts.needs_tokens(MOST_ROWS - 1)
    assert waits == [*range(8), 15, 31]
