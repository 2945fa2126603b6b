"""StoreTier: what a request waits for and how long, on an injected clock; faults of the disk. A step takes 10 ms."""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtransfer.types import PdTicket, PeerAddress
from replicas.cache import store_worker
from replicas.cache.store_tier import MAX_LEFT
from replicas.cache.store_worker import Fetch
from replicas.disagg.roles import ask_grant, give_up
from replicas.engine.occupation import Occupation
from replicas.errors import InvalidRequest
from replicas.request import Leg, Req
from replicas.scheduler.prefill import Refusal
from replicas.types import Finish, FinishReason, PdLeg, PdTransfer
from tests.harness import choice_of, to_host
from tests.tiered_bench import TieredBench
from tests.waiting import until

PROMPT = list(range(40))  # ten pages of 4
TICKET = PdTicket(room=1, generation=0, prefill=PeerAddress(host="127.0.0.1", port=1, incarnation="gone"))


def filled(root: Path, **kind: object) -> TieredBench:
    """A bench whose store has the pages of PROMPT, written by another replica that has gone."""
    first = TieredBench(root)
    first.submit(PROMPT, max_new_tokens=1)
    first.run()
    first.settle()
    assert first.store.stats().writes == 10
    first.finish()
    first.close()
    return TieredBench(root, **kind)  # type: ignore[arg-type]


def ask(bench: TieredBench) -> tuple[Req, int]:
    """Returns: the request, answered, and the steps until its first token."""
    req = bench.submit(PROMPT, max_new_tokens=2)
    steps = 0
    while not len(req.output_ids):
        bench.step()
        steps += 1
        assert steps < 10_000
    bench.run()
    return req, steps


def test_what_another_replica_computed_is_read_and_not_computed(tmp_path: Path) -> None:
    """Of 40 tokens 39 can be reused: 9 pages come, and 4 tokens are computed."""
    bench = filled(tmp_path)
    req, _ = ask(bench)
    assert (req.cached.store, bench.device.num_computed) == (36, 4 + 1)
    stats = bench.store_tier.stats(bench.tiers.stats())
    assert (stats.store_read_tokens, stats.store_written_tokens, stats.store_wrong_pages) == (36, 0, 0)
    bench.finish()


@pytest.mark.parametrize("how", ["parked until a fetch is over", "its own KV transfer has failed"])
def test_a_prompt_that_waited_for_another_replica_is_read_too(tmp_path: Path, how: str) -> None:
    bench = filled(tmp_path)
    req = choice_of("waited", PROMPT, now_s=bench.clock(), max_new_tokens=2)
    bench.reqs.append(req)
    if how.startswith("parked"):
        bench.scheduler.park(req)
        bench.step()
        bench.scheduler.unpark(req)
    else:
        req.leg = Leg(kv_transfer=PdTransfer(leg=PdLeg.DECODE, ticket=TICKET))
        ask_grant(bench.scheduler, req)
        give_up(bench.scheduler, req)
        bench.scheduler.wait(req)
    bench.finish()
    assert (req.cached.store, bench.device.num_computed) == (36, 4 + 1)


def test_a_look_finds_the_end_of_what_is_there_in_few_rounds(tmp_path: Path) -> None:
    """Of 256 pages some are stored; nearly all that are asked for lie around the end of those."""
    bench = TieredBench(tmp_path)
    ids = np.arange(256 * 4, dtype=np.int32)
    keys = bench.worker._keys(ids, "")
    rounds: list[int] = []
    bench.disk.meanwhile = lambda: rounds.append(1)
    page = memoryview(bytes(8))
    num_stored = 0
    for there in (0, 1, 2, 15, 16, 17, 18, 100, 255, 256):
        list(bench.store.write((key, [page]) for key in keys[num_stored:there]))
        num_stored = there
        rounds.clear()
        before = bench.store.stats().asked
        fetch = Fetch(ids, "", 0, 0.0)
        bench.worker._look(fetch)
        assert fetch.keys == keys[:there]
        assert len(rounds) <= (3 if there else 1)
        assert bench.store.stats().asked - before <= (35 if there else 1)


def test_pages_are_named_in_runs_of_64_tokens_where_the_store_keeps_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages have 4 tokens and 64 bytes here; a folder's item is a page."""
    bench = TieredBench(tmp_path)
    ids = np.arange(70 * 4, dtype=np.int32)
    plain = bench.worker._keys(ids, "")
    assert {type(key) for key in plain} == {bytes}
    bench.disk.keeps_runs = True
    for most_bytes, num_pages in ((1 << 20, 16), (5 * 64, 5), (63, None)):
        monkeypatch.setattr(store_worker, "RUN_BYTES", most_bytes)
        keys = bench.worker._keys(ids, "")
        assert keys == plain
        assert getattr(keys[0], "num_pages", None) == num_pages
    monkeypatch.undo()
    fetch = Fetch(ids, "", 18, 0.0)  # looks for what follows the first 18 pages
    list(bench.store.write((key, [memoryview(bytes(8))]) for key in plain))
    bench.worker._look(fetch)
    assert [(key.place, key.run) for key in fetch.keys[:2]] == [(2, plain[31]), (3, plain[31])]  # type: ignore[attr-defined]


def test_a_store_that_never_has_anything_costs_no_step(tmp_path: Path) -> None:
    """The look is over before the first step, or it is waited for 1 % of what computing takes: 4 ms of 400."""
    steps = {}
    for kind in ("none", "missing", "hanging"):
        bench = TieredBench(tmp_path / kind, policy="expected")
        bench.hangs = kind == "hanging"
        if kind == "none":
            bench.kv.store_tier = None
        waited_s = 0.0
        req = bench.submit(PROMPT, max_new_tokens=2)
        while not len(req.output_ids):
            if bench.step() is None:
                waited_s += 0.01
        steps[kind] = len(bench.plans)
        assert waited_s <= 0.01, kind  # one turn of an engine that has nothing else to do
        bench.hangs = False
        bench.run()
        assert bench.store.stats().asked <= 1
    assert steps["none"] == steps["missing"] == steps["hanging"]


def waited_s(bench: TieredBench) -> float:
    """Step until a step runs."""
    waited_s = 0.0
    while not bench.plans:
        if bench.step() is None:
            waited_s += 0.01
    return waited_s


@pytest.mark.parametrize(
    ("policy", "kind", "least_s", "most_s"),
    [
        ("best_effort", {}, 0.0, 0.0),
        ("expected", {}, 0.0, 0.02),
        ("expected", {"compute_s_per_token": 0.0}, 0.18, 0.22),  # nothing has been computed yet
        ("timeout", {}, 2.0, 2.03),
    ],
)
def test_a_hanging_store_delays_a_request_no_longer_than_its_policy_says(
    tmp_path: Path, policy: str, kind: dict[str, float], least_s: float, most_s: float
) -> None:
    """timeout: 2 s and 0.1 s for each 1,024 tokens. When the store comes back nothing is left behind."""
    bench = filled(tmp_path, policy=policy, **kind)
    bench.hangs = True
    req = bench.submit(PROMPT, max_new_tokens=2)
    assert least_s <= waited_s(bench) <= most_s + 1e-6
    bench.run()
    assert req.cached.store == 0
    assert bench.device.num_computed == 41
    bench.hangs = False
    bench.finish()


def test_a_store_that_hangs_for_long_is_asked_for_a_bounded_number_of_prompts(tmp_path: Path) -> None:
    bench = filled(tmp_path, policy="best_effort")
    bench.hangs = True
    for number in range(MAX_LEFT + 20):
        bench.submit([100 + number, *PROMPT[1:]], max_new_tokens=1)
        bench.run()
    assert len(bench.store_tier._left) == MAX_LEFT
    bench.hangs = False
    bench.finish()
    assert not bench.store_tier._left


def test_a_store_that_hangs_in_the_middle_of_a_read_is_left_when_computing_is_quicker(tmp_path: Path) -> None:
    """It found nine pages of 36 tokens, which are computed in 0.36 s, and hangs then."""
    bench = filled(tmp_path, policy="expected")
    bench.tiers.compute_s_per_token = 0.01
    bench.store_tier._hit_share = 1.0  # it has had what was asked before
    req = bench.submit(PROMPT, max_new_tokens=2)
    bench.step()  # looks, and takes host pages for what was found
    assert bench.tiers.host.coming == 9
    bench.hangs = True
    waited_s = 0.0
    while not bench.plans:
        bench.step()
        waited_s += 0.01
    assert waited_s == pytest.approx(0.36, abs=0.03)
    assert bench.tiers.host.coming == 9  # the thread may still write them
    bench.run()
    assert req.cached.store == 0
    assert bench.store_tier.stats(bench.tiers.stats()).slow_loads == 1
    bench.hangs = False
    bench.finish()


def test_a_late_answer_teaches_that_the_store_has_what_is_asked(tmp_path: Path) -> None:
    """Each look is over when the request, which has waited 1 % of 2 s for it, has begun. It always finds all."""
    bench = filled(tmp_path, policy="expected", compute_s_per_token=0.05)

    def begin() -> None:
        bench.hangs = True
        while bench.scheduler.has_work:
            bench.step()
        bench.hangs = False

    bench.disk.meanwhile = begin
    for _ in range(7):
        bench.submit(PROMPT, max_new_tokens=1)
        bench.step()
        bench.settle()
        bench.kv.flush()
    assert bench.device.num_computed == 7 * 40
    assert bench.store_tier._hit_share == pytest.approx(1 - 0.9**7)
    bench.disk.meanwhile = lambda: None
    bench.finish()


def test_a_request_that_gives_up_takes_no_page_from_others(tmp_path: Path) -> None:
    """The host is full of what others use; the store has answered, and the request has gone: nothing is evicted."""
    bench = filled(tmp_path, num_host=6)
    other = [900 + i for i in range(24)]
    bench.submit(other, max_new_tokens=1)
    bench.run()
    to_host(bench.kv)
    assert bench.tiers.host.num_free == 0
    req = bench.submit(PROMPT, max_new_tokens=1)
    bench.worker.turn()  # type: ignore[attr-defined] # it is found, and not taken in yet
    bench.scheduler.finish(req, Finish(reason=FinishReason.ABORT))
    assert bench.tiers.peek_len(np.array(other, dtype=np.int32), "") == 24
    assert bench.tiers.counters.evicted_pages == 0
    bench.reqs.remove(req)
    bench.finish()


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "fifo", "gone"])
@pytest.mark.timeout(60)
def test_a_damaged_file_is_computed_anew_with_all_behind_it(tmp_path: Path, damage: str) -> None:
    bench = filled(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 10
    for path in files[::2]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 4
        match damage:
            case "flip":
                path.write_bytes(data)
            case "truncate":
                path.write_bytes(data[: len(data) // 2])
            case "empty":
                path.write_bytes(b"")
            case "fifo":  # whoever can write to the folder must not stop the store's thread for good
                path.unlink()
                os.mkfifo(path, 0o600)
            case _:
                path.unlink()
    req, _ = ask(bench)
    assert req.cached.store < 36
    stats = bench.store_tier.stats(bench.tiers.stats())
    assert (stats.store_wrong_pages, stats.store_errors) == (int(damage != "gone"), 0)  # the first ends the read
    bench.finish()


@pytest.mark.parametrize("fault", ["eio", "full", "slow"])
def test_a_failing_disk_costs_no_answer_and_is_used_again(tmp_path: Path, fault: str) -> None:
    bench = TieredBench(tmp_path, policy="expected")
    bench.disk.fault = fault
    ask(bench)
    bench.settle()
    assert bench.store.stats().writes == (10 if fault == "slow" else 0)
    bench.kv.flush()
    bench.disk.fault = ""
    bench.clock.now_s += 60.0  # the silence after a failure
    ask(bench)
    bench.settle()
    assert bench.store.stats().writes + bench.store.stats().present >= 10
    bench.finish()


def test_a_page_that_went_wrong_on_the_host_is_not_written(tmp_path: Path) -> None:
    bench = TieredBench(tmp_path)
    bench.submit(PROMPT, max_new_tokens=1)
    bench.run()
    to_host(bench.kv)
    assert bench.tiers.host.num_free == 14
    hosts, _ = bench.tiers.where(np.array(PROMPT, dtype=np.int32), "", 0)
    bench.host.view[hosts[3], 5] ^= 1
    bench.settle()
    assert bench.store.stats().writes == 9  # all others
    req, _ = ask(bench)
    assert bench.tiers.counters.wrong_pages == 1
    assert req.cached.host == 12
    to_host(bench.kv)
    req, _ = ask(bench)  # it has left with what was behind it: computed and copied anew, all nine pages are loaded
    assert (req.cached.host, bench.tiers.counters.wrong_pages) == (36, 1)
    bench.finish()


def test_a_store_that_has_not_answered_for_30_s_is_left_alone_until_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread is the real one, and hangs in its first look; wait_complete waits for it."""
    bench = filled(tmp_path, threaded=True)
    asked, answer = threading.Event(), threading.Event()
    bench.disk.meanwhile = lambda: (asked.set(), answer.wait(60))[0]
    bench.submit(PROMPT, max_new_tokens=1)
    bench.submit([777, *PROMPT], max_new_tokens=1)  # queued behind it
    assert asked.wait(60)
    bench.clock.now_s += 29.0
    assert bench.step() is None
    assert bench.store_tier.stats(bench.tiers.stats()).store_error is None
    bench.clock.now_s += 1.0
    bench.run()
    assert bench.device.num_computed == 40 + 41
    bench.submit([888, *PROMPT], max_new_tokens=1)  # asks nothing
    bench.run()
    to_host(bench.kv)
    bench.store_tier.poll()  # writes nothing
    assert (len(bench.worker._reads), len(bench.worker._puts)) == (0, 0)
    assert len(bench.store_tier._left) == 1
    stats = bench.store_tier.stats(bench.tiers.stats())
    assert (stats.store_error or "").startswith("it has not answered a call for 30 s")
    assert (stats.store_errors, bench.store_tier.error) == (1, None)  # the replica stays
    assert [record.levelname for record in caplog.records if "has not answered" in record.message] == ["ERROR"]
    answer.set()
    until(lambda: bench.worker.silent_s == 0.0)
    bench.store_tier.poll()
    stats = bench.store_tier.stats(bench.tiers.stats())
    assert (stats.store_error, stats.store_errors) == (None, 1)
    until(lambda: bench.store_tier.poll() is None and not bench.store_tier._num_putting)  # writes again
    bench.kv.flush()
    req = bench.submit(PROMPT, max_new_tokens=1)
    until(lambda: bench.step() is not None)
    assert req.cached.store == 36
    bench.close()


def test_pages_whose_write_a_hanging_store_never_began_are_given_back(tmp_path: Path) -> None:
    bench = TieredBench(tmp_path)
    bench.submit(PROMPT, max_new_tokens=1)
    bench.run()
    bench.hangs = True
    to_host(bench.kv)
    bench.store_tier.poll()
    assert bench.store_tier._num_putting == 10
    bench.worker.drop_queued()
    bench.store_tier.poll()
    assert bench.store_tier._num_putting == 0
    bench.hangs = False
    bench.finish()  # no host page is held
    bench.close()


def test_a_dead_thread_makes_the_replica_unhealthy_and_delays_nobody(tmp_path: Path) -> None:
    bench = filled(tmp_path)
    bench.hangs = True
    bench.submit(PROMPT, max_new_tokens=2)
    for _ in range(50):
        assert bench.step() is None  # wait_complete
    bench.worker.error = RuntimeError("it died")
    assert bench.step() is not None
    bench.run()
    assert repr(bench.store_tier.error) == repr(bench.worker.error)
    assert bench.store_tier.stats(bench.tiers.stats()).store_error == "RuntimeError('it died')"


def test_a_request_that_waits_says_so_and_lets_others_pass(tmp_path: Path) -> None:
    bench = filled(tmp_path)
    bench.hangs = True
    waiting = bench.submit(PROMPT, max_new_tokens=1)
    passing = bench.submit([999, 998], max_new_tokens=1)
    bench.step()
    assert bench.scheduler.last.refusals == {(waiting.rid, 0): Refusal.LOADING}
    assert passing.finish is not None
    bench.hangs = False
    bench.finish()


def test_a_host_that_loads_slower_than_it_computes_is_not_used(tmp_path: Path) -> None:
    """A page loads in a second, and its four tokens are computed in 0.04 s. Then it loads in 1 ms."""
    bench = TieredBench(tmp_path)
    ask(bench)
    to_host(bench.kv)
    bench.tiers.counters.load_s_per_page = 1.0
    slow, _ = ask(bench)
    assert (slow.cached.host, bench.tiers.counters.slow_loads) == (0, 1)
    assert bench.device.num_computed == 2 * 41
    to_host(bench.kv)
    bench.tiers.counters.load_s_per_page = 0.001
    quick, _ = ask(bench)
    assert (quick.cached.host, bench.tiers.counters.slow_loads) == (36, 1)
    assert bench.device.num_computed == 2 * 41 + 4 + 1
    bench.finish()


def test_a_store_that_reads_slower_than_computing_is_not_waited_for(tmp_path: Path) -> None:
    """A token took it 20 ms and computing takes 10: once it says what it has the prompt is computed."""
    bench = filled(tmp_path, policy="expected", compute_s_per_token=0.01)
    bench.store_tier._hit_share, bench.store_tier._s_per_token = 1.0, 0.02
    bench.submit(PROMPT, max_new_tokens=1)
    bench.step()  # looks, and takes host pages for what was found
    assert bench.tiers.host.coming == 9
    bench.hangs = True
    assert bench.step() is not None
    bench.hangs = False
    bench.run()
    assert bench.device.num_computed == 40
    bench.finish()


@pytest.mark.parametrize("write", ["write_through_selective", "adaptive"])
def test_the_cache_is_on_the_host_after_its_memory_was_given_back(tmp_path: Path, write: str) -> None:
    """The selective rule has copied nothing of what was used once."""
    bench = TieredBench(tmp_path, write=write)
    bench.kv.store_tier = None
    ask(bench)
    given: list[frozenset[str]] = []
    occupation = Occupation(bench.kv, device="cpu", pinned=False, give_back=given.append)
    occupation.release(frozenset({"kv_cache"}))
    assert given == [frozenset({"kv_cache"})]
    assert bench.kv.store.stats().free_pages == 12
    occupation.resume(frozenset({"kv_cache"}))
    req, _ = ask(bench)
    assert req.cached.host == 36
    bench.finish()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"device": "cuda", "pinned": False}, "memory of a GPU cannot be given back: captured graphs"),
        ({"device": "cpu", "pinned": True}, "where pages may come by RDMA, which pins it: with UCX_TLS"),
    ],
)
def test_memory_that_others_have_the_address_of_is_not_given_back(tmp_path: Path, where: Any, said: str) -> None:
    occupation = Occupation(TieredBench(tmp_path).kv, give_back=lambda parts: None, **where)
    for tags in ([], ["kv_cache"], ["weights"]):
        with pytest.raises(InvalidRequest, match=said):
            occupation.parts_of(tags)
    assert not occupation.released


@pytest.mark.timeout(60)
def test_a_folder_full_of_fifos_is_a_miss_and_holds_nobody_up(tmp_path: Path) -> None:
    """Whoever could write to the folder could once stop the store's thread for good with one FIFO."""
    bench = filled(tmp_path)
    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        path.unlink()
        os.mkfifo(path, 0o600)
    req, _ = ask(bench)
    assert (req.cached.store, bench.device.num_computed) == (0, 41)
    stats = bench.store_tier.stats(bench.tiers.stats())
    assert (stats.store_wrong_pages, stats.store_errors) == (1, 0)
    bench.finish()
