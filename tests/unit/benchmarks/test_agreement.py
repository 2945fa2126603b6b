"""How long two engines' answers agree, and what is said when an engine does not start."""

from pathlib import Path

import pytest

from benchmarks import startup
from benchmarks.accuracy import Agreement


def test_answers_agree_until_their_first_difference() -> None:
    found = Agreement.of([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [5, 6, 7, 8]])
    assert found == Agreement(equal_share=7 / 8, first_differences=(2, 4))


def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)did not start \(exit status 1\); it wrote:.*no-such-model"):
        startup.start("models/no-such-model", 1, str(tmp_path))
