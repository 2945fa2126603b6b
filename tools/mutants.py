"""Measures what the tests of a package find: changes one place of a function at a time and runs its tests again.

    python -m tools.mutants FOLDER ... [--sample 100] [--seed 0] [--alone] [--limit 20] [--tests PATH ...]

Prints the end of each mutant of a sample (killed, timed out, survived, or unrun: no test executes its statement), and
for each folder the share that was killed or timed out. `--alone` goes on until a second test kills, and lists for each
test how many mutants it runs, how many no cheaper test kills, and how many no other test kills.

The tests are those of files under tests/ (or `--tests`) that import the package, or whose helpers in tests/ do. A first
run records which lines each executes; of a file that takes more than `--limit` CPU seconds only the tests before that
count. A mutant is run by the tests that execute its statement, the cheapest first. Each run is a fork of a process that
has collected all tests, so it starts within milliseconds, and gets the mutant as a new `__code__` of its function.
Hence only bodies of functions change, and what runs in another process or compiled by Numba is not seen.

Not mutmut: it leaves out properties and what else is decorated, and takes no sample. Not cosmic-ray: it starts Python,
and imports PyTorch, for every mutant.
"""

import argparse
import ast
import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import IO, Any

import hypothesis
import pytest

ROOT = Path.cwd()
ELSEWHERE = {"serve", "browser", "gpu", "clients"}  # of tests/: they need what a fork lacks
TRACED_CALLS = 200  # of a function in one test: tracing is slow
HANG_S = 120.0  # of the clock, for a test of the first run
HUNG = (1, -signal.SIGPROF)  # exit codes of a process that faulthandler or the CPU timer ended
SWAPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.GtE, ast.LtE), ast.GtE: (ast.Lt, ast.Gt), ast.Gt: (ast.LtE, ast.GtE), ast.LtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,), ast.And: (ast.Or,), ast.Or: (ast.And,), ast.Add: (ast.Sub,), ast.Sub: (ast.Add,),
}  # fmt: skip
Change = tuple[ast.AST, dict[str, Any], range]  # a node, the fields that it gets, and the lines of its statement
Swaps = list[tuple[FunctionType, CodeType]]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a test took in the first run, and the lines that it executed."""

    cpu_s: float
    clock_s: float
    lines: set[tuple[str, int]]


def places(node: ast.AST, lines: range | None = None) -> Iterator[tuple[ast.AST, range]]:
    """Yield what may be changed under ``node``, with the lines of its statement, or of a compound statement's head.

    Not: texts, what errors and logs say, assertions, annotations, defaults, decorators, and ``check()``.
    """
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                continue
            if isinstance(child, ast.Expr | ast.FunctionDef) and ast.unparse(child).startswith(("log.", "def check(")):
                continue
            here = lines
            if lines is None and isinstance(child, ast.stmt | ast.expr) and not {"body", "cases"} & {*child._fields}:
                here = range(child.lineno, (child.end_lineno or 0) + 1)
            if here is not None:
                yield child, here
            yield from places(child, here)


def changed_fields(node: ast.AST) -> Iterator[dict[str, Any]]:
    """Yield the fields that ``node`` gets, for each of its changes."""
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield from ({"ops": [*ops[:at], other(), *ops[at + 1 :]]} for other in SWAPPED.get(type(op), ()))
        case ast.BoolOp(op=op) | ast.BinOp(op=op):
            yield from ({"op": other()} for other in SWAPPED.get(type(op), ()))
        case ast.UnaryOp(op=ast.Not()):
            yield {"operand": ast.UnaryOp(ast.Not(), node.operand)}
        case ast.Constant(value=value) if type(value) is int:
            yield {"value": value + 1}
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield {"value": ast.Constant(None)}
        case ast.AugAssign(op=op):
            yield from ({"op": other()} for other in SWAPPED.get(type(op), ()))
            yield {"__class__": ast.Pass}
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) | ast.Expr(value=ast.Call() | ast.Await()):
            yield {"__class__": ast.Pass}  # deleting a local's assignment would mostly raise where it is read


def changes(node: ast.AST) -> Iterator[Change]:
    """Yield all changes of the functions under ``node``, without those that Numba compiles and ``check()``."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from changes(child)
        elif child.name != "check" and not any("jit" in ast.unparse(each) for each in child.decorator_list):
            for each, lines in places(child):
                yield from ((each, fields, lines) for fields in changed_fields(each))


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from codes(each)


def place_of(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class Runner:
    """Takes pytest's place once all tests are collected: runs them in forks, first as they are, then with mutants."""

    def __init__(self, options: argparse.Namespace, files: dict[str, list[Path]], tests: dict[str, set[Path]]) -> None:
        self.options, self.files, self.tests = options, files, tests
        self.output = os.fdopen(os.dup(1), "w", buffering=1)
        self.sources = {str(source) for paths in files.values() for source in paths}
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)  # by where they stand
        self.costs: dict[pytest.Item, Cost] = {}
        self.limits: dict[Path, tuple[float, float]] = {}  # CPU and clock seconds of a test of a file
        self.is_failed = False  # from here on: of the test that runs, in a fork
        self.lines: set[tuple[str, int]] = set()
        self.shared: set[tuple[str, int]] = set()  # of the fixtures that other tests of its file have as well
        self.calls: Counter[CodeType] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Make Hypothesis repeat itself, and not look for each mutant's smallest example."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.is_failed |= report.failed

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        own = self.lines
        self.lines = own if fixturedef.scope == "function" else self.shared
        try:
            return (yield)
        finally:
            self.lines = own

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for source in sorted(self.sources):
            with contextlib.suppress(ImportError):  # it needs what this machine lacks: no test runs it
                importlib.import_module(module_name(Path(source)))
        gc.unfreeze()  # what tests/conftest.py froze would not be listed
        for each in gc.get_objects():
            if isinstance(each, FunctionType) and each.__code__.co_filename in self.sources:
                self.functions[place_of(each.__code__)].append(each)
        gc.freeze()  # a fork that collects garbage copies nothing
        files: dict[Path, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            files[item.path].append(item)
        for path, items in files.items():
            ends = self.run(items, len(items) + 1, [])
            passed = {item: cost for item, end, cost in ends if cost and end == "passed"}
            self.costs |= passed
            most_s = [max((getattr(cost, of) for cost in passed.values()), default=0.0) for of in ("cpu_s", "clock_s")]
            self.limits[path] = 1 + 5 * most_s[0], 10 + 5 * most_s[1]
            if len(passed) < len(items):
                self.say(f"left out: {len(items) - len(passed)} of {len(items)} tests of {path.relative_to(ROOT)}")
        for folder in self.files:
            self.score(folder)
        return True

    def run(self, items: Sequence[pytest.Item], most: int, swaps: Swaps) -> list[tuple[pytest.Item, str, Cost | None]]:
        """Run ``items`` in a fork until ``most`` failed or one ended it; return each with its end and its cost."""
        with tempfile.TemporaryFile() as results:
            if not (pid := os.fork()):
                os.setsid()
                for function, code in swaps:
                    function.__code__ = code
                with contextlib.suppress(BaseException):
                    self._child(items, most, results)
                os._exit(0)
            try:
                _, status = os.waitpid(pid, 0)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # processes that its tests left, or all of it after a Ctrl-C
            ends: list[tuple[pytest.Item, str, Cost | None]] = []
            results.seek(0)
            with contextlib.suppress(EOFError, pickle.UnpicklingError):
                for item in items:
                    is_failed, cost = pickle.load(results)
                    ends.append((item, "killed" if is_failed else "passed", cost))
                    most -= is_failed
            if len(ends) < len(items) and most:
                is_hung = os.waitstatus_to_exitcode(status) in HUNG
                ends.append((items[len(ends)], "timed out" if is_hung else "killed", None))
            return ends

    def _child(self, items: Sequence[pytest.Item], most: int, results: IO[bytes]) -> None:
        """Run ``items`` until ``most`` failed; write of each whether it did, and what it took."""
        if is_first := items[0] not in self.costs:
            signal.setitimer(signal.ITIMER_PROF, self.options.limit)  # SIGPROF ends the process
        for item, following in zip(items, [*items[1:], None], strict=True):
            self.is_failed, self.lines, self.calls = False, set(), Counter()
            if is_first:
                faulthandler.dump_traceback_later(HANG_S, exit=True)
                threading.settrace(self._trace)
                sys.settrace(self._trace)
            else:
                signal.setitimer(signal.ITIMER_PROF, self.limits[item.path][0])
                faulthandler.dump_traceback_later(self.limits[item.path][1], exit=True)
            cpu_s, clock_s = time.process_time(), time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sys.settrace(None)
            cost = Cost(time.process_time() - cpu_s, time.monotonic() - clock_s, self.lines | self.shared)
            pickle.dump((self.is_failed, cost), results)
            results.flush()
            most -= self.is_failed
            if not most:
                item.session._setupstate.teardown_exact(None)  # fixtures may have started processes
                return

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if event == "line":
            self.lines.add((code.co_filename, frame.f_lineno))
        elif event == "call":
            if code.co_filename not in self.sources or self.calls[code] == TRACED_CALLS:
                return None
            self.calls[code] += 1
        return self._trace

    def say(self, text: str) -> None:
        print(text, file=self.output)

    def swaps(self, path: Path, index: int) -> tuple[str, range, Swaps]:
        """Return the ``index``-th change of a file in words, its lines, and its functions, each with its new code.

        There are no functions if the new code binds other variables of the function around it.
        """
        tree = ast.parse(path.read_text())
        node, fields, lines = list(changes(tree))[index]
        texts = [ast.unparse(node), "deleted"]
        for name, value in fields.items():
            setattr(node, name, value)
        ast.fix_missing_locations(tree)
        if "__class__" not in fields:
            texts[1] = ast.unparse(node)
        found = [
            (function, code)
            for code in codes(compile(tree, str(path), "exec"))
            for function in self.functions.get(place_of(code), ())
            if function.__code__ != code
        ]
        is_alike = all(function.__code__.co_freevars == code.co_freevars for function, code in found)
        return "  ->  ".join(" ".join(text.split())[:90] for text in texts), lines, found if is_alike else []

    def killers(self, tests: Sequence[pytest.Item], swaps: Swaps) -> list[tuple[pytest.Item, str]]:
        """Return the first test that kills, with ``--alone`` the first two, and whether "killed" or "timed out"."""
        found: list[tuple[pytest.Item, str]] = []
        most = 2 if self.options.alone else 1
        while tests and len(found) < most:
            ends = self.run(tests, most - len(found), swaps)
            found += [(item, end) for item, end, _ in ends if end != "passed"]
            tests = tests[len(ends) :]
        return found

    def score(self, folder: str) -> None:
        """Run a sample of the mutants of ``folder``; say what became of each."""
        began = time.monotonic()
        runners: dict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
        for item, cost in sorted(self.costs.items(), key=lambda each: each[1].cpu_s):
            for line in cost.lines if item.path in self.tests[folder] else ():
                runners[line].append(item)
        mutants = [
            (path, index) for path in self.files[folder] for index, _ in enumerate(changes(ast.parse(path.read_text())))
        ]
        random.Random(f"{self.options.seed} {folder}").shuffle(mutants)
        ends, met, first, alone = Counter[str](), Counter[Any](), Counter[Any](), Counter[Any]()
        while mutants and ends.total() < self.options.sample:
            path, index = mutants.pop()
            text, lines, swaps = self.swaps(path, index)
            tests = {item: self.costs[item].cpu_s for line in lines for item in runners[str(path), line]}
            if tests and not swaps:
                continue
            killers = self.killers(sorted(tests, key=tests.__getitem__), swaps)
            met.update(tests.keys())
            first.update(item for item, _ in killers[:1])
            alone.update(item for item, _ in killers if len(killers) == 1)
            end = killers[0][1] if killers else "survived" if tests else "unrun"
            ends[end] += 1
            by = killers[0][0].nodeid if killers else f"{len(tests)} tests"
            self.say(f"{end:9} {path.relative_to(ROOT)}:{lines.start}  {text}  [{by}]")
        if self.options.alone:
            self.say("  CPU s mutants   first   alone")
            for item in sorted(met, key=lambda item: -self.costs[item].cpu_s):
                self.say(f"{self.costs[item].cpu_s:7.2f} {met[item]:7} {first[item]:7} {alone[item]:7}  {item.nodeid}")
        score = (ends["killed"] + ends["timed out"]) / max(ends.total(), 1)
        numbers = ", ".join(f"{ends[end]} {end}" for end in ("killed", "timed out", "survived", "unrun"))
        self.say(f"{folder}: {score:.1%} of {ends.total()} mutants ({numbers}), {time.monotonic() - began:.0f} s")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the modules that a file of tests/ imports, the conftest.py of its folders among them."""
    found = {".".join((*folder.parts, "conftest")) for folder in path.relative_to(ROOT).parents}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def tests_of(package: str) -> set[Path]:
    """Return the test files that import something of ``package``, or whose helpers in tests/ do."""
    paths = {module_name(path): path for path in ROOT.glob("tests/**/*.py")}
    imports = {name: imported(path) for name, path in paths.items()}
    found = {name for name, used in imports.items() if any(f"{each}.".startswith(f"{package}.") for each in used)}
    while more := {name for name, used in imports.items() if used & found} - found:
        found |= more
    tests = {paths[name] for name in found if name.rpartition(".")[2].startswith("test_")}
    return {path for path in tests if path.relative_to(ROOT).parts[1] not in ELSEWHERE}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--limit", type=float, default=20.0)
    parser.add_argument("--tests", nargs="+", type=Path, default=[Path("tests")])
    options = parser.parse_args()
    files = {folder.strip("/"): sorted(ROOT.joinpath(folder).rglob("*.py")) for folder in options.folders}
    within = {ROOT / path for path in options.tests}
    tests = {
        folder: {path for path in tests_of(folder.replace("/", ".")) if within & {path, *path.parents}}
        for folder in files
    }
    for folder in files:
        if not files[folder] or not tests[folder]:
            parser.error(f"{folder}: a folder is wanted of which tests import modules, as replicas/cache")
    runner = Runner(options, files, tests)
    with tempfile.TemporaryDirectory() as kept, open(f"{kept}/log", "w+") as log:
        os.environ["TMPDIR"] = kept
        for descriptor in (1, 2):  # what pytest and the tests write
            os.dup2(log.fileno(), descriptor)
        arguments = ["-qsp", "no:cacheprovider", f"--basetemp={kept}/pytest", "-m", "not serve and not browser"]
        status = pytest.main(
            [*arguments, *sorted({str(path) for paths in tests.values() for path in paths})], plugins=[runner]
        )
        if status:
            runner.say(Path(log.name).read_text()[-4000:])
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
