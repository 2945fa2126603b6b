"""Where no layer sees further back than a window, a request that decodes holds no more than that."""

from tests.harness import Bench, retract


def held(bench: Bench) -> tuple[int, int]:
    """Pages that requests share with the tree, and their own."""
    stats = bench.kv.store.stats()
    return stats.protected_pages, stats.reserved_pages


def test_pages_before_the_window_go_back_one_by_one_and_the_prompts_lock_when_it_is_unseen() -> None:
    """A window of 6 and 2 tokens of slack, pages of 4: three pages at most, where a page is cut on both sides."""
    bench = Bench(window=6, page_size=4)
    prompt = list(range(50, 62))
    bench.submit(prompt, max_new_tokens=60)
    seen = []
    while bench.scheduler.has_work:
        bench.step()
        seen.append(held(bench))
    assert seen[0] == (3, 0)
    assert seen[7] == (3, 2), "token 19 is computed, which sees the prompt's last: nothing has gone back"
    assert seen[8] == (0, 2), "of 20 tokens the first 12 are unseen: the lock goes back"
    assert set(seen[8:-1]) == {(0, 2), (0, 3)}
    assert seen[-1] == (0, 0)
    again = bench.submit(prompt, max_new_tokens=1)
    bench.run()
    assert again.cached_tokens == 8, "the prompt stays in the tree, whole; one token of it is run"


def test_an_answer_within_the_window_is_kept_for_the_next_turn_and_one_beyond_is_not() -> None:
    for max_new_tokens, cached in ((9, 20), (40, 12)):
        bench = Bench(window=32, page_size=4)
        first = bench.submit(list(range(12)), max_new_tokens=max_new_tokens)
        bench.run()
        turn = bench.submit(first.ids[: first.num_tokens].tolist(), max_new_tokens=1)
        bench.run()
        assert turn.cached_tokens == cached


def test_a_request_that_gave_pages_back_is_retracted_and_goes_on_with_the_same_answer() -> None:
    bench = Bench(window=6, page_size=4)
    req, other = bench.submit([1, 2, 3] * 5, max_new_tokens=50), bench.submit([4] * 9, max_new_tokens=50)
    for _ in range(30):
        bench.step()
    assert req.holding is not None
    assert req.holding.behind.gone_len == 36
    retract(bench.scheduler, req)
    bench.scheduler.check()
    bench.run()
    assert (req.num_retractions, other.num_retractions) == (1, 0)
