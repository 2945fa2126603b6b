"""The comparison's rows: medians, spreads, ratios, and what has no numbers."""

from collections.abc import Mapping, Sequence
from typing import cast

import pytest

from benchmarks.client import Client, Run, Sample
from benchmarks.harness import Row
from benchmarks.peers import compare as compare_module
from benchmarks.peers.compare import PROMPTS, Cell, Measured, compare, rows_of, same
from benchmarks.workloads import random_lengths

CELL = Cell(
    name="random-8",
    make=lambda vocab_size, seed: random_lengths(
        num_requests=8, input_len=4, output_len=10, vocab_size=vocab_size, seed=seed
    ),
    concurrency=8,
    max_s=30,
)


def run(system: str, wall_s: float, *, round_: int = 0, problem: str | None = None) -> Measured:
    samples = [Sample(name=str(at), ttft_s=wall_s / 10, completion_tokens=10, error=problem) for at in range(8)]
    whole = Run(samples=tuple(samples), wall_s=wall_s, client_cpu_s=0.0, answers_known=True)
    return Measured(
        cell="random-8", system=system, round=round_, run=whole, server_cpu_s=2 * wall_s, elsewhere_cpu_s=0.1
    )


def lines(runs: Sequence[Measured], absent: Mapping[str, str], ours: Sequence[str] = ()) -> dict[str, dict[str, Row]]:
    """The rows of manta and vllm by figure."""
    rows = rows_of(runs, absent, [CELL], ["manta", "vllm"], ours)
    assert {row.section for row in rows} == {"random-8: random 8 x 4 in, 10 out; 8 at once"}
    return {name: {row.figure: row for row in rows if row.name == name} for name in ("manta", "vllm")}


def test_a_line_has_median_and_spread_and_the_ratio_of_ours_to_that_system() -> None:
    found = lines([run("manta", 4), run("manta", 5), run("manta", 2), run("vllm", 8)], {}, ["manta"])
    throughput = found["manta"]["throughput"]
    assert (throughput.value, throughput.low, throughput.high) == (20, 16, 40)  # 80 tokens in 4 s
    assert (found["vllm"]["throughput"].value, found["vllm"]["wall"].value) == (10, 8)
    assert (found["manta"]["manta /"].value, found["vllm"]["manta /"].value) == (1, 2)  # 20 over 10
    assert found["manta"]["runs"].value == 3
    assert "hit" not in found["vllm"]  # a rate that a server does not tell is no zero


@pytest.mark.parametrize(
    ("others", "absent", "num_whole", "why"),
    [
        ([], {"vllm": "not installed: no wheel"}, 0, "not installed: no wheel"),
        ([], {}, 0, "not run"),
        ([(30, 0, "full")], {}, 0, "round 1: 0 of 8 answered; 8 x full"),
        ([(8, 0, None), (99, 1, "full")], {}, 1, "round 2: 0 of 8 answered; 8 x full"),
        ([(8, 0, None)], {"vllm": "round 2: ended with -9"}, 1, "round 2: ended with -9"),
    ],
)
def test_what_could_not_be_measured_says_why_and_gives_no_number(
    others: list[tuple[float, int, str | None]], absent: dict[str, str], num_whole: int, why: str
) -> None:
    """A failed repeat beside whole ones does not count."""
    runs = [run("vllm", wall_s, round_=round_, problem=problem) for wall_s, round_, problem in others]
    vllm = lines([run("manta", 4), *runs], absent, ["manta"])["vllm"]
    assert (vllm["runs"].value, vllm["runs"].note) == (num_whole, why)
    assert ("throughput" in vllm) == ("manta /" in vllm) == bool(num_whole)
    if num_whole:
        assert vllm["throughput"].value == 10


def test_cpu_time_is_split_by_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ran:
        async def run(self, *args: object, **more: object) -> Run:
            return Run(samples=(), wall_s=4.0, client_cpu_s=0.5, answers_known=False)

    looks = iter([(100.0, 399.0), (107.0, 400.5)])
    monkeypatch.setattr(compare_module, "_cpu_s", lambda server: next(looks))
    workload = random_lengths(num_requests=1, input_len=1, output_len=1, vocab_size=300, seed=0)
    found = compare_module.measure(cast(Client, Ran()), CELL, workload, system="vllm", round_=0)
    assert (found.server_cpu_s, found.elsewhere_cpu_s, found.problem) == (7.0, 1.5, None)


def test_a_run_with_a_request_cut_off_has_a_problem_with_the_count_and_the_reason() -> None:
    whole = Sample(name="0/0", ttft_s=0.5, e2e_s=1.0, completion_tokens=10)
    cut = Sample(name="1/0", error="cut off after 30 s")
    client_run = Run(samples=(whole, cut), wall_s=30.0, client_cpu_s=0.5, answers_known=False)
    found = Measured(cell="x", system="vllm", round=0, run=client_run, server_cpu_s=0.0, elsewhere_cpu_s=0.0)
    assert found.problem == "1 of 2 answered; 1 x cut off after 30 s"


def answer(text: str, *token_ids: int) -> Sample:
    return Sample(name="", text=text, token_ids=list(token_ids))


def test_answers_are_compared_by_ids_where_both_tell_them_and_by_text_where_not() -> None:
    one = answer("a b", 1, 2)
    assert not same(one, answer("a b", 1, 3))
    assert same(one, answer("a b"))
    assert not same(one, answer("a c"))


def test_only_a_difference_between_fp32_systems_is_a_failure() -> None:
    right, wrong = [answer("x")], [answer("y")]
    right, wrong = right * len(PROMPTS), wrong * len(PROMPTS)
    rows, agreed = compare({"manta": right, "vllm": right, "llama.cpp": wrong}, ["manta", "vllm"])
    assert agreed
    assert [(row.name, row.value) for row in rows] == [("vllm", 4), ("llama.cpp", 0)]
    assert rows[0].section == "prompts of 4 that are answered as by manta"
    assert "'The quick brown fox': 'y', manta 'x'" in rows[1].note
    assert not compare({"manta": right, "vllm": wrong}, ["manta", "vllm"])[1]
    rows, agreed = compare({"vllm": right, "llama.cpp": right}, ["manta", "vllm"])
    assert ([row.name for row in rows], agreed) == (["llama.cpp"], True)
    assert compare({"vllm": right}, ["manta", "vllm"]) == ([], True)
