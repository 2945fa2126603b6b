"""The model behind the bounds that the live routing benchmark prints beside what it measures."""

from random import Random

from benchmarks.live_bounds import ModelPool, Pages, hit_ratio

PAGES = Pages(prefix=32, prompt=33, total=33)


def test_a_pool_forgets_the_least_recently_used_first_and_from_its_end() -> None:
    pool = ModelPool(70, PAGES)
    assert [pool.ask("a", "a.0"), pool.ask("b", "b.0"), pool.ask("a", "a.1")] == [0, 0, 32]  # 67 pages held
    assert pool.ask("c", "c.0") == 0  # 100 wanted: a.0, b.0 and 28 pages of b's prefix go
    pool.check()
    assert pool.ask("a", "a.2") == 32  # one page more, one of b's less
    assert pool.ask("b", "b.1") == 3
    pool.check()


def test_bound_to_replicas_half_of_the_groups_fit_and_taking_turns_half_of_the_prefixes_are_there() -> None:
    """Independent draws, in the long run: what fits is used alike by both, and so the ratio is 2."""
    rng = Random(0)
    warm_up = [f"{group}.w" for group in range(16)]
    names = [f"{rng.randrange(16)}.{number}" for number in range(4000)]
    ours = hit_ratio(warm_up, names, pool_pages=8 * 32 + 9, pages=PAGES, bound=True)
    theirs = hit_ratio(warm_up, names, pool_pages=8 * 32 + 9, pages=PAGES, bound=False)
    assert 0.9 < ours <= 32 / 33
    assert 0.45 < theirs < 0.49
    assert 1.9 < ours / theirs < 2.1


def test_when_each_group_asks_once_a_turn_those_used_of_late_come_last_and_turns_pay() -> None:
    rng, names = Random(0), list[str]()
    for number in range(200):
        turn = list(range(16))
        rng.shuffle(turn)
        names += [f"{group}.{number}" for group in turn]
    warm_up = names[:16]
    ours, theirs = (
        hit_ratio(warm_up, names, pool_pages=8 * 32 + 9, pages=PAGES, bound=bound) for bound in (True, False)
    )
    assert ours > 0.93
    assert 0.28 < theirs < 0.36
