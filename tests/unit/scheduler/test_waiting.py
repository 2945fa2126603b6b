"""What waits is ranked and counted by the prefix that it could use, and what is retracted keeps its prefix."""

from replicas.request import ReqState
from replicas.scheduler.decode import retract
from tests.harness import Bench

CACHED = list(range(12))  # three pages of 4


def test_the_last_token_of_a_prompt_is_never_one_that_the_cache_could_save() -> None:
    """It is computed for its logits: of 12 cached tokens, a prompt of exactly these can use 8, a longer one all."""
    bench = Bench(page_size=4, max_running=1)
    bench.submit(CACHED, max_new_tokens=1)
    bench.run()
    exact = bench.submit(CACHED)
    longer = bench.submit([*CACHED, 5])
    waiting = bench.scheduler.queues.waiting
    assert waiting.ordered(bench.clock()) == [longer, exact]
    assert waiting.uncached_tokens() == (12 - 8) + (13 - 12)
    bench.run()
    assert (exact.cached_tokens, longer.cached_tokens) == (8, 12)


def test_a_prompt_waits_for_another_of_its_step_only_where_that_saves_it_enough() -> None:
    """SPEC F04: both begin with 64 equal tokens, of which 40 are cached: 24 are less than 32."""
    bench = Bench(page_size=4, chunked_prefill_size=256, context_len=256, num_pages=128, in_batch_prefix_len=32)
    bench.submit(list(range(41)), max_new_tokens=1)
    bench.run()
    reqs = [bench.submit([*range(64), 500 + i], max_new_tokens=2) for i in range(2)]
    bench.step()
    assert [req.state for req in reqs] == [ReqState.RUNNING] * 2
    bench.run()
    assert [req.cached_tokens for req in reqs] == [40, 40]


def test_a_retracted_request_finds_its_own_pages_again() -> None:
    """SPEC F11: nothing but the last page is computed again where nobody else needed the memory."""
    bench = Bench(page_size=4)
    req = bench.submit(CACHED, max_new_tokens=8)
    while req.num_output < 4:
        bench.step()
    computed = bench.scheduler.counters.prefill_tokens
    retract(req, bench.scheduler.queues, bench.kv, bench.scheduler.counters)
    bench.scheduler.check()
    assert (req.state, bench.kv.store.stats().evictable_pages) == (ReqState.WAITING, 3)
    assert bench.scheduler.queues.waiting.uncached_tokens() == 4
    bench.run()
    assert bench.scheduler.counters.prefill_tokens - computed == 4
