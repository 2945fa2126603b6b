"""The mutation tool finds what tests miss, and says which test alone finds something."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUMS = '''
class Sum:
    def __init__(self) -> None:
        self.found = 0

    def add(self, each: int) -> None:
        """Add it; 0 - 1 in a docstring is no code."""
        if each > 0:
            self.found += each

    @property
    def twice(self) -> int:
        return self.found + self.found

    def check(self) -> None:
        assert self.found >= 0


def untested(number: int) -> int:
    while number > 10:
        number -= 1
    return number
'''
TESTS = """
from tiny.sums import Sum, untested

def test_add():
    total = Sum()
    for each in (3, -1, 2):
        total.add(each)
    total.check()
    assert total.twice == 10

def test_empty():
    assert Sum().twice == 0

def test_runs():
    untested(12)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("mutants")
    for name, text in (("tiny/__init__.py", ""), ("tiny/sums.py", SUMS), ("tests/test_sums.py", TESTS)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "tools.mutants", "tiny", "--alone", "--limit", "2"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def ends(said: str, source: str) -> dict[str, str]:
    """Change -> its end, of the line of SUMS that holds ``source``."""
    number = next(at for at, line in enumerate(SUMS.splitlines(), 1) if source in line)
    found = re.findall(rf"^(\S+(?: out)?) +tiny/sums.py:{number}  (.*)  \[.*\]$", said, re.M)
    return {change: end for end, change in found}


def test_a_well_tested_function_keeps_only_the_mutant_that_its_tests_cannot_tell_from_it(said: str) -> None:
    assert ends(said, "each > 0") == {
        "each > 0  ->  each <= 0": "killed",
        "each > 0  ->  each >= 0": "survived",
        "0  ->  1": "survived",
    }
    assert ends(said, "+= each") == {
        "self.found += each  ->  deleted": "killed",
        "self.found += each  ->  self.found -= each": "killed",
    }


def test_a_property_is_changed_and_its_check_is_not(said: str) -> None:
    assert set(ends(said, "self.found + self.found").values()) == {"killed"}
    assert not ends(said, "assert self.found")


def test_what_runs_without_being_compared_survives_and_an_endless_loop_is_ended(said: str) -> None:
    assert ends(said, "return number") == {"return number  ->  return None": "survived"}
    assert ends(said, "number -= 1")["number -= 1  ->  deleted"] == "timed out"


def test_each_test_has_its_numbers_and_the_folder_its_score(said: str) -> None:
    rows = re.findall(r"^ +\S+ +(\d+) +\d+ +(\d+)  tests/test_sums.py::(\w+)$", said, re.M)
    assert {name: (int(run), int(alone)) for run, alone, name in rows} == {
        "test_runs": (7, 2),
        "test_add": (9, 4),
        "test_empty": (4, 0),  # test_add kills what it kills
    }
    assert "tiny: 56.2% of 16 mutants (7 killed, 2 timed out, 7 survived, 0 unrun)" in said
