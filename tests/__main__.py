"""`python -m tests [quick] [slow]`: the tests, as `make test` (quick) and `make test-all` (both) run them. Exit code 1
when any of them failed.

Tests that start Ray mostly wait for its processes, so they run beside the others, one application at a time; what they
said is printed at the end. The others give way to them, which measure times, but not to all else: under `nice -n 19`
two busy programs of the user leave a test so little time that its limit ends it. They share two processes: a hung test
ends its process, with all stacks, since Hypothesis would run one that pytest fails again, with no limit, and xdist
would give its file to the next process.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.kernels import compile_all

PYTEST = [sys.executable, "-m", "pytest"]
LAST = ["nice", "-n", "5"]
COMPILED_ONCE = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
ONE_THREAD = {**COMPILED_ONCE, "OMP_NUM_THREADS": "1"}  # two busy processes: threads that wait for each other spin
SHARED = [
    "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--timeout-method", "thread",
    "--max-worker-restart", "0",
]  # fmt: skip
TESTS = Path(__file__).parent
MARKED = {"quick": "not slow", "slow": "slow and not cluster"}


def main(wanted: Sequence[str]) -> int:
    if unknown := set(wanted) - set(MARKED):
        sys.exit(f"there are no {', '.join(unknown)} tests: name {' or '.join(MARKED)}, or none for all")
    compile_all()  # what fails here fails in a test that says more
    return max([run(which) for which in wanted or MARKED])


def run(which: str) -> int:
    """Run the tests of MARKED[which]; return 1 if any of them failed, else 0."""
    with tempfile.TemporaryFile() as said:
        with_ray = subprocess.Popen(
            [*PYTEST, *files_that_say("serve"), "-m", f"serve and {MARKED[which]}"],
            stdout=said, stderr=subprocess.STDOUT, env={**COMPILED_ONCE, "RAY_worker_niceness": "0"},  # not 15
        )  # fmt: skip
        try:
            files = files_that_say("slow") if which == "slow" else []
            others = [*LAST, *PYTEST, *SHARED, *files, "-m", f"not serve and {MARKED[which]}"]
            statuses = [subprocess.call(others, env=ONE_THREAD)]
            if which == "slow":
                statuses.append(subprocess.call([*LAST, sys.executable, "-m", "tests.under_avx2"], env=ONE_THREAD))
            if with_ray.poll() is None:
                print("The tests with Ray are still under way ...", flush=True)
        finally:
            ray_status = with_ray.wait()  # after a Ctrl-C too, which it has got: it stops what it started
            said.seek(0)
            print(said.read().decode(errors="replace"), flush=True)
    return int(any([*statuses, ray_status]))


def files_that_say(mark: str) -> list[str]:
    """Find the files with tests that few files have: to collect all others too takes each process half a minute."""
    return [str(file) for file in sorted(TESTS.rglob("test_*.py")) if says(file, mark)]


def says(file: Path, mark: str) -> bool:
    """Whether ``file`` or the conftest.py beside it names a mark; tests/conftest.py refuses tests where none does."""
    paths = [file, file.with_name("conftest.py")]
    return any(f"pytest.mark.{mark}" in path.read_text() for path in paths if path.exists())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
