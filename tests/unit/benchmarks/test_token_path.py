"""The token path's figures: the pace of the source, what is taken off, and the ratios."""

import numpy as np
import pytest

from benchmarks.overhead import Path, Spent, main, proxies_of, rows_of
from benchmarks.token_alone import Alone
from benchmarks.token_source import PacedSteps
from deployments.command import haproxy
from replicas.scheduler.plan import DecodePlan, ExtendPlan, SampleRow
from replicas.types import SamplingParams

NO_IDS = np.empty(0, dtype=np.int32)


def decode(*tokens_per_s: int) -> DecodePlan:
    """A step of one token for each."""
    rows = tuple(
        SampleRow(
            params=SamplingParams(seed=pace), position=1, num_output=0, stop_ids=frozenset(), prompt_ids=NO_IDS,
            output_ids=NO_IDS,
        )
        for pace in tokens_per_s
    )  # fmt: skip
    return DecodePlan(
        table_writes=(), rows=NO_IDS, token_ids=NO_IDS, seq_lens=NO_IDS, slots=np.empty(0, np.int64), sampling=rows
    )


def test_steps_are_over_at_the_pace_of_their_slowest_request_and_others_at_once() -> None:
    now_s, slept = [100.0], list[float]()
    steps = PacedSteps(7, clock=lambda: now_s[0], sleep=slept.append)
    assert steps.launch(decode(0, 0)).result().token_ids.tolist() == [7, 7]
    assert slept == []
    for _ in range(3):
        assert steps.launch(decode(40, 20)).result().token_ids.tolist() == [7, 7]
        now_s[0] += 0.02  # the step's own work
    assert slept == pytest.approx([0.03, 0.06])  # the first is due now, the others 50 and 100 ms after it
    prefill = ExtendPlan(table_writes=(), rows=(), sampling=decode(20).sampling)
    assert steps.launch(prefill).result().token_ids.tolist() == [7]
    assert len(slept) == 2


def spent(cpu_s: float) -> Spent:
    return Spent.of({"router": cpu_s, "rest": 0.3}, {"router": 0.01, "rest": 0.06}, tokens=1000, events=500, wall_s=5.0)


def test_what_idle_processes_use_is_taken_off() -> None:
    assert spent(0.15).cpu == pytest.approx({"router": 0.1, "rest": 0.0})
    assert spent(0.15).us_a_token == pytest.approx(100)


def test_ratios_are_by_round() -> None:
    alone = Alone(us_a_token={"steady": 50, "flat out": 10}, latency_s={"unary": 0.001, "TTFT": 0.002})
    paths = {"Manta": Path(), "plain": Path()}
    for load in ("steady", "flat out"):
        paths["Manta"].spent[load] = [spent(0.15), spent(0.25)]  # 100 and 200 us
        paths["plain"].spent[load] = [spent(1.05), spent(1.05)]  # 1,000
    for path in paths.values():
        path.added_ms = {"unary": [4.0], "TTFT": [5.0]}
    rows = {row.name: row for row in rows_of(alone, {"HAProxy": paths})}
    ratio = rows["steady: plain / Manta, HAProxy"]
    assert (ratio.low, ratio.high, ratio.runs) == pytest.approx((5, 10, 2))
    assert rows["flat out: Manta, HAProxy"].target == "<= 50"
    assert rows["flat out: Manta, HAProxy"].note.startswith("200 tokens/s, 2.00 an event; router 150")


def test_where_haproxy_cannot_be_had_nothing_is_called_by_its_name() -> None:
    """All are wanted unless one is asked for; who asks for HAProxy gets nothing else."""
    assert proxies_of(None, "") == (["HAProxy", "Serve's proxy"], "")
    assert proxies_of(None, "none found") == (["Serve's proxy"], "none found")
    assert proxies_of(["HAProxy"], "none found") == ([], "none found")
    assert proxies_of(["Serve's proxy"], "none found") == (["Serve's proxy"], "")


def test_who_asks_for_haproxy_where_there_is_none_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(haproxy, "found", lambda environ: "")
    with pytest.raises(SystemExit):
        main(["--proxy", "HAProxy"])
    assert "--proxy HAProxy cannot be measured here: no HAProxy was found: install" in capsys.readouterr().err
