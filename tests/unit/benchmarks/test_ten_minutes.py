"""The command that runs all that a GPU can show keeps to its time, and its file is whole however it ends."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import ten_minutes
from benchmarks.gpu.ten_minutes import BESIDE, PARTS, ROOT, Part, Run, report

TELL = """
import json, os, signal
def tell(id, outcome, why=""):
    with open(os.environ["MANTA_TEST_LINES"], "a") as lines:
        lines.write(json.dumps({"id": id, "outcome": outcome, "seconds": 0.25, "why": why}) + chr(10))
"""
HANG = f"""{TELL}
signal.signal(signal.SIGINT, signal.SIG_IGN)
tell("a::quick", "passed"); tell("a::quick", "passed")
if child := os.fork():
    with open("THERE.new", "w") as there:
        there.write(f"{{os.getpid()}} {{child}}")
    os.rename("THERE.new", "THERE")
signal.pause()
"""


def part(name: str, *programs: str, share_s: float = 10.0) -> Part:
    runs = tuple(Run(command=("-c", program)) for program in programs)
    return Part(name=name, proves=f"that {name} runs", share_s=share_s, runs=runs, small=runs)


def run(parts: list[Part], out: Path, **options: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    status = ten_minutes.run(parts, out, budget_s=sum(each.share_s for each in parts), fake=True, **options)
    return status, {each["name"]: each for each in json.loads(out.read_text())["parts"]}


def over_when(there: Path) -> Callable[[], float]:
    """A clock at which 15 s are over as soon as a file is there: no part is cut before it has told something."""
    return lambda: 15.0 if there.exists() else 0.0


def test_each_part_has_a_verdict_and_a_process_that_tells_nothing_is_no_pass(tmp_path: Path) -> None:
    parts = [
        part("passes", f'{TELL}\ntell("a::one", "passed")', f'{TELL}\ntell("a::two", "skipped", "no GPU")'),
        part("fails", f'{TELL}\ntell("b::one", "passed"); tell("b::two", "failed", "x | y")'),
        part("breaks", "raise SystemExit('no such module')"),
        part("cannot run here", "print('nothing to do'); raise SystemExit(77)"),
    ]
    status, told = run(parts, tmp_path / "deep" / "out.json", beside=part("beside", "print('compiled')"))
    assert status == 1
    assert {name: each["verdict"] for name, each in told.items()} == {
        "beside": "passed", "passes": "passed", "fails": "failed", "breaks": "failed", "cannot run here": "skipped"
    }  # fmt: skip
    assert [(test["id"], test["outcome"]) for test in told["passes"]["tests"]] == [
        ("a::one", "passed"), ("a::two", "skipped")
    ]  # fmt: skip
    assert "no such module" in told["breaks"]["said"]
    table = report(tmp_path / "deep" / "out.json")
    assert "| fails | that fails runs | failed | 1 passed, 1 failed |" in table
    assert r"| `b::two` | x \| y |" in table
    assert run(parts[:1], tmp_path / "out.json")[0] == 0


def test_a_part_that_hangs_is_cut_with_what_it_told_and_the_next_one_runs(tmp_path: Path) -> None:
    """It ignores an interruption, and so does the process that it started."""
    there = tmp_path / "there"
    hangs = part("hangs", HANG.replace("THERE", str(there)), "raise SystemExit('not reached')")
    next_one = part("next", f'{TELL}\ntell("n::one", "passed")', share_s=30.0)
    status, told = run([hangs, next_one], tmp_path / "out.json", clock=over_when(there))
    assert status == 1
    assert (told["hangs"]["verdict"], told["next"]["verdict"]) == ("cut", "passed")
    assert told["hangs"]["tests"] == [{"id": "a::quick", "outcome": "passed", "seconds": 0.5, "why": ""}]
    started = [int(pid) for pid in there.read_text().split()]
    assert [alive(pid) for pid in started] == [False, False]


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_an_interrupted_run_leaves_a_whole_file(tmp_path: Path) -> None:
    there = tmp_path / "there"

    def clock() -> float:
        if there.exists():
            raise KeyboardInterrupt
        return 0.0

    hangs = part("hangs", HANG.replace("THERE", str(there)))
    parts = [part("first", f'{TELL}\ntell("f::one", "passed")'), hangs, part("last", "")]
    out = tmp_path / "out.json"
    status = ten_minutes.run(parts, out, budget_s=600, fake=True, clock=clock)
    verdicts = [(each["name"], each["verdict"]) for each in json.loads(out.read_text())["parts"]]
    assert (status, verdicts) == (130, [("first", "passed"), ("hangs", "cut"), ("last", "not reached")])
    assert "| hangs | that hangs runs | cut | 1 passed |" in report(out)


def test_tests_and_figures_are_told_as_pytest_and_the_benchmarks_have_them(tmp_path: Path) -> None:
    """pytest itself, and a command that writes rows; what has passed is left out where no test is named."""
    toy = tmp_path / "test_toy.py"
    toy.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2, 'one'\n"
        "@pytest.mark.skip(reason='no GPU')\ndef test_c(): pass\n"
    )
    rows = tmp_path / "rows.py"
    rows.write_text(
        "import pathlib, sys\nfrom benchmarks import harness\nfrom benchmarks.harness import Part, Row\n"
        "harness.run('x', '', {'a': Part(about='', measure=lambda options: ["
        "Row.of('a shape', 'decode', [5.6], 'ms', figure='step'), Row.of('a shape', 'decode', [65.0], '%', "
        "figure='of the limit')])}, sys.argv[1:])\n"
    )
    named, rest = Run(tests=(str(toy),), only="test_a"), Run(tests=(str(toy),))
    measured = Run(command=("-m", "rows"))
    parts = [
        Part(name="named", proves="x", share_s=300.0, runs=(named,), small=(named, measured)),
        Part(name="rest", proves="y", share_s=300.0, runs=(rest,), small=(rest,)),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        status, told = run(parts, tmp_path / "out.json")
    assert status == 1
    assert [name(test) for test in told["named"]["tests"]] == [("test_a", "passed")]
    assert [name(test) for test in told["rest"]["tests"]] == [("test_b", "failed"), ("test_c", "skipped")]
    assert "one" in told["rest"]["tests"][0]["why"]
    assert "a shape:\n\n|  | step ms | of the limit % |\n| --- | --- | --- |\n| decode | 5.6 | 65 |" in report(
        tmp_path / "out.json"
    )


def name(test: dict[str, Any]) -> tuple[str, str]:
    return test["id"].rpartition("::")[2], test["outcome"]


def test_a_test_that_is_named_and_is_not_there_is_no_pass(tmp_path: Path) -> None:
    toy = tmp_path / "test_toy.py"
    toy.write_text("def test_a(): pass\n")
    wrong = (Run(tests=(str(toy),), only="test_z"),)
    _, told = run([Part(name="wrong", proves="x", share_s=300.0, runs=wrong, small=wrong)], tmp_path / "out.json")
    assert told["wrong"]["verdict"] == "failed"


def test_the_parts_share_ten_minutes_and_name_tests_that_are_there() -> None:
    assert sum(each.share_s for each in PARTS) <= 600 - ten_minutes.GRACE_S
    assert BESIDE.share_s < 600
    for each in (run for part in PARTS for run in (*part.runs, *part.small) if run.tests):
        files = [
            path
            for name in each.tests
            for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).glob("test_*.py"))
        ]
        tests = re.findall(r"def (test_\w+)", "".join(path.read_text() for path in files))
        for words in filter(None, each.only.split(" or ")):
            assert any(words.split(" and ")[0] in test for test in tests), words


def test_what_changed_is_asked_of_git_and_all_is_run_where_it_cannot_tell() -> None:
    assert ten_minutes.changed_tests("no such commit") == ten_minutes.CHANGED
    assert set(ten_minutes.CHANGED + ten_minutes.ALONE) <= {
        str(path.relative_to(ROOT)) for path in ROOT.glob("tests/gpu/*")
    }


def test_another_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    for file in ("other.json", "missing.json"):
        with pytest.raises(SystemExit, match="is no file of `make gpu-ten-minutes`"):
            report(tmp_path / file)
