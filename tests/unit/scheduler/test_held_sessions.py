"""Agents' requests that wait until there is room for their whole session beside older ones."""

from random import Random

import pytest

from replicas.cache import sessions
from replicas.cache.node import TreeNode, path_to
from replicas.engine.stepping import StepClock, snapshot
from replicas.request import Req, ReqState
from replicas.types import Finish, FinishReason
from tests.fakes import continuation
from tests.harness import Bench


def _turn(bench: Bench, prompt: list[int], *, tools: tuple[str, ...] = ("bash",), tenant: str = "") -> list[int]:
    """Have ``prompt`` answered with 4 tokens, which call ``tools``. Returns: what the next prompt begins with."""
    req = bench.submit(prompt, max_new_tokens=4, tenant=tenant)
    bench.run()
    bench.kv.told(req.rid, tools)
    return req.ids[: req.num_tokens].tolist()


def _old_and_young(bench: Bench, tenants: tuple[str, str] = ("", "")) -> tuple[list[int], list[int]]:
    """Have an agent's two turns answered, whose 12 pages of 16 are kept, and a younger one's first, with 2 pages."""
    old, young = tenants
    history = _turn(bench, _turn(bench, list(range(40)), tenant=old) + [7] * 4, tenant=old)
    return history, _turn(bench, [500 + i for i in range(8)], tenant=young)


def _bench(**options: float) -> Bench:
    return Bench(num_pages=16, page_size=4, new_token_ratio=0.0, min_new_token_ratio=0.0, **options)


def test_a_younger_agent_waits_while_an_older_ones_pages_would_go_for_it() -> None:
    bench = _bench()
    old, young = _old_and_young(bench)
    held = bench.submit([*young, *range(900, 908)], max_new_tokens=2)
    assert bench.step() is None
    assert (held.state, list(bench.scheduler.queues.held)) == (ReqState.WAITING, [held])
    assert bench.scheduler.has_work
    last = bench.submit([*old, *[7] * 4], max_new_tokens=2)
    for _ in range(3):
        bench.step()
    assert last.finish is not None
    assert last.cached_tokens == 48
    assert held.state is ReqState.WAITING
    bench.kv.told(last.rid, ())  # it has ended
    bench.run()
    assert held.stamps.held_s > 0.0


def test_no_agent_waits_longer_than_is_allowed_and_how_long_it_did_is_known() -> None:
    bench = _bench(session_wait_s=2.0)
    _, young = _old_and_young(bench)
    held = bench.submit([*young, *range(900, 908)], max_new_tokens=2)
    bench.clock.now_s += 1.9
    assert bench.step() is None
    bench.clock.now_s += 0.1
    bench.step()
    assert held.state is ReqState.RUNNING
    assert held.stamps.held_s == pytest.approx(2.02)
    bench.run()


def test_no_agent_waits_for_what_a_tenant_over_its_share_keeps() -> None:
    """Its pages go before those of any session, so that there is room."""
    bench = _bench()
    _, young = _old_and_young(bench, ("heavy", "light"))
    bench.submit([*young, *range(900, 908)], max_new_tokens=2, tenant="light")
    assert bench.step() is not None
    assert not len(bench.scheduler.queues.held)


def test_an_agent_waits_for_an_older_one_of_its_own_tenant_whatever_its_share() -> None:
    bench = _bench()
    _, young = _old_and_young(bench, ("heavy", "heavy"))
    _turn(bench, [600 + i for i in range(4)], tenant="light")
    held = bench.submit([*young, *range(900, 908)], max_new_tokens=2, tenant="heavy")
    assert bench.step() is None
    assert list(bench.scheduler.queues.held) == [held]


def test_no_agent_waits_for_what_older_ones_of_a_tenant_over_its_share_wait_for() -> None:
    bench = _bench()
    _turn(bench, _turn(bench, list(range(28)), tenant="heavy") + [7] * 4, tenant="heavy")  # 9 pages
    large = _turn(bench, [500 + i for i in range(8)], tenant="heavy")
    small = _turn(bench, [600 + i for i in range(4)], tenant="light")
    held = bench.submit([*large, *range(900, 948)], max_new_tokens=2, tenant="heavy")  # 15 pages
    light = bench.submit([*small, 3], max_new_tokens=2, tenant="light")
    for _ in range(3):
        bench.step()
    assert list(bench.scheduler.queues.held) == [held]
    assert light.finish is not None


def test_a_look_walks_what_is_kept_once_however_many_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = _bench()
    _, young = _old_and_young(bench)
    other = _turn(bench, [600 + i for i in range(4)])
    held = [bench.submit([*each, *range(900, 920)], max_new_tokens=2) for each in (young, other)]
    bench.step()
    assert list(bench.scheduler.queues.held) == held
    walked = []

    def walk(end: TreeNode) -> list[TreeNode]:
        walked.append(end)
        return path_to(end)

    monkeypatch.setattr(sessions, "path_to", walk)
    bench.clock.now_s += 1.0
    assert bench.scheduler.queues.held.take_ready(bench.kv, bench.clock) == []
    assert len(walked) == 2  # the sessions older than the youngest that is held


def test_none_is_held_where_that_is_switched_off() -> None:
    bench = _bench(session_wait_s=0.0)
    _, young = _old_and_young(bench)
    bench.submit([*young, *range(900, 908)], max_new_tokens=2)
    assert bench.step() is not None


def test_an_answer_that_goes_on_here_is_not_held() -> None:
    """Its client has seen its begin, at a replica that is gone."""
    bench = _bench()
    _, young = _old_and_young(bench)
    prompt = [*young, *range(900, 908)]
    bench.submit(prompt, max_new_tokens=3, resumed_ids=tuple(continuation(prompt, 1)))
    assert bench.step() is not None
    bench.run()


def test_a_small_session_that_fits_waits_for_an_older_large_one_that_does_not() -> None:
    bench = _bench()
    _turn(bench, _turn(bench, list(range(28))) + [7] * 4)  # 9 pages
    large, small = _turn(bench, [500 + i for i in range(8)]), _turn(bench, [600 + i for i in range(4)])
    both = [bench.submit([*large, *range(900, 920)], max_new_tokens=2), bench.submit([*small, 3], max_new_tokens=2)]
    for _ in range(10):
        bench.step()
    assert list(bench.scheduler.queues.held) == both
    bench.scheduler.finish(both[0], Finish(reason=FinishReason.ABORT))
    for _ in range(10):
        bench.step()
    assert both[1].finish is not None
    bench.run()


def test_a_conversation_that_calls_no_tools_is_never_held() -> None:
    bench = _bench()
    _turn(bench, _turn(bench, list(range(40))) + [7] * 4)
    chat = _turn(bench, [500 + i for i in range(8)], tools=())
    bench.submit([*chat, *range(900, 908)], max_new_tokens=2)
    assert bench.step() is not None


def test_a_persons_conversation_is_not_held_though_it_has_called_tools() -> None:
    bench = _bench()
    old = _turn(bench, _turn(bench, list(range(20))) + [7] * 4)
    chat = _turn(bench, [500 + i for i in range(4)])
    chat = _turn(bench, [*chat, 1], tools=())
    chat = _turn(bench, [*chat, 2])  # it went on after an answer without calls
    _turn(bench, [*old, *[7] * 8])
    bench.submit([*chat, *range(900, 920)], max_new_tokens=2)
    assert bench.step() is not None
    assert not len(bench.scheduler.queues.held)


def test_one_that_is_held_counts_as_waiting() -> None:
    bench = _bench()
    _, young = _old_and_young(bench)
    bench.submit([*young, *range(900, 908)], max_new_tokens=2)
    bench.step()
    assert bench.scheduler.would_wait(0) == 1
    stats = snapshot(bench.scheduler, bench.kv.store, StepClock(chunk_size=16), now_s=0.0)
    assert (stats.num_waiting, stats.waiting_uncached_tokens) == (1, 12)  # of 20 tokens, two pages are cached


@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_right_however_agents_take_turns(seed: int) -> None:
    """`Bench.step` checks all invariants after each step, `run` each answer."""
    random = Random(seed)
    bench = Bench(num_pages=20, page_size=4, session_wait_s=random.choice([0.5, 15.0]), context_len=96)
    histories = {agent: [100 * agent + i for i in range(random.randint(4, 16))] for agent in range(5)}
    running, num_held = dict[int, Req](), 0
    for _ in range(400):
        idle = [agent for agent in histories if agent not in running]
        if idle and random.random() < 0.3:
            agent = random.choice(idle)
            if len(histories[agent]) > 60:
                histories[agent] = [100 * agent + random.randint(0, 90) for _ in range(8)]
            running[agent] = bench.submit(histories[agent], max_new_tokens=random.randint(1, 6))
        bench.step()
        num_held += len(bench.scheduler.queues.held)
        if running and random.random() < 0.02:
            bench.scheduler.finish(random.choice(list(running.values())), Finish(reason=FinishReason.ABORT))
        for agent, req in list(running.items()):
            if req.finish is not None:
                del running[agent]
                bench.kv.told(req.rid, ["bash"] if random.random() < 0.9 else [])
                histories[agent] = [*req.ids[: req.num_tokens].tolist(), random.randint(1, 90)]
        bench.clock.now_s += random.choice([0.0, 0.0, 1.0])
    bench.run()
    assert num_held > 0
