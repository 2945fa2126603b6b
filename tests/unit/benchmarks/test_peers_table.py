"""The comparison's table: medians, spreads, ratios, and what has no numbers."""

from benchmarks.client import Run, Sample
from benchmarks.peers.answers import Answer, compare
from benchmarks.peers.cells import FULL, QUICK, WARM_UP, Cell
from benchmarks.peers.measure import CpuUse, Measured, figures
from benchmarks.peers.table import Book, ratio, reasons, table
from benchmarks.workloads import random_lengths

CELL = Cell(
    name="random-8",
    make=lambda vocab_size, seed: random_lengths(
        num_requests=8, input_len=4, output_len=10, vocab_size=vocab_size, seed=seed
    ),
    concurrency=8,
    max_s=30,
)
BEFORE = CpuUse(server_s=100.0, client_s=1.0, machine_s=500.0)
AFTER = CpuUse(server_s=107.0, client_s=1.5, machine_s=509.0)


def run(system: str, wall_s: float, *, round_: int = 0, problem: str | None = None) -> Measured:
    return Measured(
        cell="random-8", system=system, round=round_, wall_s=wall_s, answered=8, asked=8, output_tokens=80,
        ttft_p50_s=wall_s / 10, ttft_p95_s=wall_s / 5, tpot_p50_s=0.02, hit_percent=None, server_cpu_s=2 * wall_s,
        elsewhere_cpu_s=0.1, problem=problem,
    )  # fmt: skip


def line_of(text: str, system: str) -> list[str]:
    """The cells of a system's line, the workload's name left out."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(line[1:] for line in lines if line[1] == system)


def test_a_line_tells_median_and_spread_and_the_ratio_of_ours_to_that_system() -> None:
    book = Book(runs=[run("manta", 4), run("manta", 5), run("manta", 2), run("vllm", 8)], absent={})
    text = table(book, [CELL], ["manta", "vllm"], ["manta"])
    manta, vllm = line_of(text, "manta"), line_of(text, "vllm")
    assert manta[1:3] == ["20 (16..40)", "4 (2..5)"]  # 80 tokens in 4 s
    assert vllm[1:3] == ["10", "8"]
    assert manta[-1] == "1.00x"
    assert vllm[-1] == "2.00x"  # 20 over 10
    assert manta[-2] == "3 of 3"


def test_a_hit_rate_that_a_server_does_not_tell_is_a_dash_not_a_zero() -> None:
    text = table(Book(runs=[run("vllm", 8)], absent={}), [CELL], ["vllm"], [])
    assert line_of(text, "vllm")[6] == "-"


def test_a_system_that_is_absent_has_a_line_and_a_reason() -> None:
    book = Book(runs=[run("manta", 4)], absent={"vllm": "not installed: no wheel"})
    assert line_of(table(book, [CELL], ["manta", "vllm"], ["manta"]), "vllm")[1] == "not installed or not started"
    assert reasons(book, [CELL], ["manta", "vllm"]) == ["vllm: not installed: no wheel"]
    assert book.problem("random-8", "vllm") == "not installed: no wheel"
    assert ratio(book, "random-8", "manta", "vllm") is None


def test_a_workload_that_did_not_finish_gives_no_number_and_no_ratio() -> None:
    cut = run("vllm", 30, problem="5 of 8 answered; 3 x cut off after 30 s")
    book = Book(runs=[run("manta", 4), cut], absent={})
    line = line_of(table(book, [CELL], ["manta", "vllm"], ["manta"]), "vllm")
    assert line[1] == "did not finish"
    assert line[-1] == ""
    assert reasons(book, [CELL], ["vllm"]) == ["vllm, random-8, round 1: 5 of 8 answered; 3 x cut off after 30 s"]


def test_a_failed_repeat_beside_whole_ones_is_told_and_does_not_count() -> None:
    book = Book(runs=[run("vllm", 8), run("vllm", 99, round_=1, problem="0 of 8 answered; 8 x refused")], absent={})
    line = line_of(table(book, [CELL], ["vllm"], []), "vllm")
    assert (line[1], line[-1]) == ("10", "1 of 2")
    assert reasons(book, [CELL], ["vllm"]) == ["vllm, random-8, round 2: 0 of 8 answered; 8 x refused"]


def test_a_system_that_died_in_a_later_round_keeps_its_numbers_and_the_reason_is_told() -> None:
    book = Book(runs=[run("vllm", 8)], absent={"vllm": "round 2: ended with -9 while it started"})
    assert line_of(table(book, [CELL], ["vllm"], []), "vllm")[1] == "10"
    assert reasons(book, [CELL], ["vllm"]) == ["vllm: round 2: ended with -9 while it started"]


def test_figures_are_those_of_a_run_and_cpu_time_is_split_by_whose_it_is() -> None:
    samples = tuple(
        Sample(
            name=f"{index}/0", ttft_s=0.5 + index, gaps_s=[0.1] * 9, e2e_s=2.0, prompt_tokens=100,
            completion_tokens=10, cached_tokens=25 * index, tells_cached=index > 0,
        )
        for index in range(2)
    )  # fmt: skip
    client_run = Run(samples=samples, wall_s=4.0, client_cpu_s=0.5, answers_known=False)
    found = figures(client_run, CELL, system="vllm", round_=0, before=BEFORE, after=AFTER)
    assert found.tokens_per_s == 5.0  # 20 tokens in 4 s
    assert found.ttft_p50_s == 1.0  # of 0.5 and 1.5
    assert found.tpot_p50_s is not None
    assert round(found.tpot_p50_s, 6) == 0.1
    assert found.hit_percent == 12.5  # 25 of 200
    assert (found.server_cpu_s, found.elsewhere_cpu_s) == (7.0, 1.5)  # 9 s in all, of which 7 and 0.5
    assert found.problem is None


def test_a_run_with_a_request_cut_off_has_a_problem_with_the_count_and_the_reason() -> None:
    whole = Sample(name="0/0", ttft_s=0.5, e2e_s=1.0, completion_tokens=10)
    cut = Sample(name="1/0", error="cut off after 30 s")
    client_run = Run(samples=(whole, cut), wall_s=30.0, client_cpu_s=0.5, answers_known=False)
    found = figures(client_run, CELL, system="vllm", round_=0, before=BEFORE, after=AFTER)
    assert found.problem == "1 of 2 answered; 1 x cut off after 30 s"


def test_answers_are_compared_by_ids_where_both_tell_them_and_by_text_where_not() -> None:
    one, same_text = Answer(text="a b", token_ids=(1, 2)), Answer(text="a b", token_ids=(1, 3))
    assert not one.same(same_text)
    assert one.same(Answer(text="a b", token_ids=()))
    assert not one.same(Answer(text="a c", token_ids=()))


def test_only_a_difference_between_fp32_systems_is_a_failure() -> None:
    right, wrong = [Answer(text="x", token_ids=())] * 3, [Answer(text="y", token_ids=())] * 3
    sentences, agreed = compare({"manta": right, "vllm": right, "llama.cpp": wrong}, ["manta", "vllm"])
    assert agreed
    assert sentences[:2] == [
        "answers: vllm = manta on 3 of 3 prompts",
        "answers: llama.cpp = manta on 0 of 3 prompts",
    ]
    assert not compare({"manta": right, "vllm": wrong}, ["manta", "vllm"])[1]
    assert compare({"vllm": right, "llama.cpp": right}, ["manta", "vllm"]) == (
        ["answers: llama.cpp = vllm on 3 of 3 prompts"],
        True,
    )
    assert "no two systems" in compare({"vllm": right}, ["manta", "vllm"])[0][0]


def test_quick_has_the_workloads_of_the_full_run_at_smaller_sizes() -> None:
    assert [cell.name for cell in QUICK] == [cell.name for cell in FULL]
    for quick, full in zip(QUICK, FULL, strict=True):
        assert quick.make(5000, 0).prompt_tokens < full.make(5000, 0).prompt_tokens
    sizes = [(cell.make(5000, 0).num_requests, cell.make(5000, 0).output_tokens) for cell in FULL]
    assert sizes == [(2, 256), (8, 512), (32, 2048), (64, 2048), (40, 2560)]  # notes of issue 6, section 2
    assert FULL[1].title == "random 8 x 256 in, 64 out; 8 at once"
    assert max(make(5000, 0).prompt_tokens for make in WARM_UP) == 600
