"""The simulator of the tiers, over a trace that is made here."""

import json
import pathlib
from random import Random

import pytest

from benchmarks import tiers
from benchmarks.sim_load import read_trace


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> pathlib.Path:
    """600 requests, one a second: a new chat of 4 to 12 blocks behind a system prompt of 2, or one of the last 60 chats
    goes on with 1 to 3 more, the later the likelier."""
    rng, chats, blocks = Random(7), [[0, 1]], iter(range(2, 1_000_000))
    path = tmp_path / "chats_trace.jsonl"
    with path.open("w") as file:
        for number in range(600):
            if rng.random() < 0.4:
                chat = chats.pop(-min(len(chats), 1 + int(rng.expovariate(1 / 15))))
                chat = [*chat, *(next(blocks) for _ in range(rng.randint(1, 3)))]
            else:
                chat = [0, 1, *(next(blocks) for _ in range(rng.randint(4, 12)))]
            chats = [*chats, chat][-60:]
            entry = {"timestamp": 1000 * number, "input_length": 512 * len(chat), "output_length": 1, "hash_ids": chat}
            file.write(json.dumps(entry) + "\n")
    return path


@pytest.mark.parametrize(
    ("times", "eviction", "write", "found", "written"),
    [(2, "lru", "write_through", 0.406, 6.82), (2, "arc", "adaptive", 0.436, 7.68)],
)
def test_what_a_way_finds_and_writes_is_known(
    trace: pathlib.Path, times: int, eviction: str, write: str, found: float, written: float
) -> None:
    outcome = tiers.replay(read_trace(trace), 60, times, eviction=eviction, write=write)
    assert (round(outcome.found, 3), round(outcome.written_each, 2)) == (found, written)


def test_a_host_that_holds_all_finds_all_that_was_there_before(trace: pathlib.Path) -> None:
    requests = read_trace(trace)
    seen: set[int] = set()
    again = 0
    for request in requests:
        again += len(seen & set(request.prompt.tolist()))
        seen |= set(request.prompt.tolist())
    for write in ("write_through", "write_back", "adaptive"):
        outcome = tiers.replay(requests, 60, 200, eviction="arc", write=write)
        assert outcome.on_device + outcome.on_host == again
        assert outcome.written <= len(seen)


def test_the_seconds_saved_are_those_of_prefill_less_the_loads() -> None:
    outcome = tiers.Outcome(num_requests=2, asked=10, on_device=3, on_host=2, written=4)
    assert (outcome.found, outcome.written_each) == (0.5, 2.0)
    assert outcome.saved_s(512.0, 5120.0) == pytest.approx((5 - 0.2) / 2)


def test_the_command_prints_every_way_and_marks_the_first(
    trace: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers.main(["--quick", "--trace", str(trace)])
    printed = capsys.readouterr().out
    assert "chats: share of pages found on the device or the host" in printed
    assert "200 x2" in printed
    assert "200 x8" in printed
    assert "first at 200 x2" in printed
    assert "(default)" in printed


def test_without_a_trace_it_says_where_to_put_one(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(tiers, "TRACES", tmp_path)
    with pytest.raises(SystemExit, match="there is no trace: put conversation"):
        tiers.main([])
    (tmp_path / "bad_trace.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="line 1 is not a request"):
        tiers.main([])
