"""Prefill and decode on replicas apart."""

import pytest

from benchmarks import simulate
from benchmarks.sim_cluster import Cluster, Setup
from benchmarks.sim_decode import SimDecode
from benchmarks.sim_events import Events
from benchmarks.sim_replica import Speed
from benchmarks.sim_split import Decoder, Split, pick
from tests.unit.benchmarks.sim_fixtures import request

# 100 prompt tokens/s, steps of 0.5 s; 10 bytes a token at 1,000 bytes/s: 400 tokens travel for 4 s
SPEED = Speed(prefill_tokens_per_s=100.0, decode_base_s=0.5, decode_per_request_s=0.0, rate_noise=0.0)
SPLIT = Split(num_decoders=1, bytes_per_token=10, bytes_per_s=1000.0)


def setup(*, num_replicas: int = 1, pool_tokens: int = 10_000, split: Split = SPLIT) -> Setup:
    return Setup(num_replicas=num_replicas, pool_tokens=pool_tokens, page_size=100, speed=SPEED, split=split)


def decoder(*, num_requests: int, num_used: int, max_running: int = 8) -> Decoder:
    batch = SimDecode(Events(), base_s=1.0, per_request_s=0.0)
    return Decoder(
        capacity=10, max_running=max_running, batch=batch, num_requests=num_requests, num_used=num_used
    )


def test_the_first_token_comes_after_prefill_and_transfer() -> None:
    """4 s of prefill and 4 of transfer; two more tokens take 1 s. The same prompt again at 4 s: one page is computed
    (1 s), and all of it travels, since a decode replica has no cache."""
    requests = [
        request(0, at_s=0.0, blocks=[1, 2, 3, 4], output_len=3),
        request(1, at_s=4.0, blocks=[1, 2, 3, 4]),
    ]
    cluster = Cluster("estimated_ttft", requests, setup())
    first, second = sorted(cluster.run(), key=lambda record: record.number)
    assert (first.ttft_s, first.ended_s) == pytest.approx((8.0, 9.0))
    assert second.ttft_s == pytest.approx(5.0)
    assert second.cached_tokens == 300
    cluster.check()


def test_without_room_at_a_decode_replica_the_prompt_waits_and_keeps_its_pages() -> None:
    """Pools of 3 pages. The first is ready at 1 s, there at 2 s with 101 tokens to come until 52.5 s: 2 pages. The
    second needs 2 pages too: it is ready at 2 s and waits for the first to end, then travels for 1 s."""
    requests = [
        request(0, at_s=0.0, blocks=[1], output_len=102),
        request(1, at_s=0.0, blocks=[2], output_len=2),
    ]
    cluster = Cluster("round_robin", requests, setup(pool_tokens=300))
    held: list[int] = []
    cluster.events.at(30.0, lambda: held.append(cluster.replicas[0].num_running))
    records = sorted(cluster.run(), key=lambda record: record.number)
    assert held == [1]
    assert records[0].ended_s == pytest.approx(2.0 + 50.5)
    assert records[1].ttft_s == pytest.approx(52.5 + 1.0)
    assert cluster.replicas[0].num_running == cluster.replicas[0].pool.num_private == 0
    cluster.check()


def test_the_decode_replica_with_room_and_fewest_requests_is_picked() -> None:
    full, busy, idle = decoder(num_requests=0, num_used=9), decoder(num_requests=3, num_used=1), decoder(
        num_requests=2, num_used=6
    )  # fmt: skip
    assert pick([full, busy, idle], 4) is idle
    assert pick([full, busy, idle], 5) is busy
    assert pick([full, busy, idle], 10) is None
    assert pick([decoder(num_requests=8, num_used=0)], 1) is None  # no place in the batch
    roomier = decoder(num_requests=2, num_used=5)
    assert pick([idle, roomier], 1) is roomier


def test_a_split_is_two_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate.main(["--workload", "multi-turn", "--split", "6"])
    assert "6 must be two counts above 0, as 6:2" in capsys.readouterr().err


def test_the_command_line_runs_a_split(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main(["--workload", "multi-turn", "--requests", "80", "--split", "2:1"]) == 0
    assert "2 prefill and 1 decode replicas" in capsys.readouterr().out
