"""What ten minutes on a GPU can show of Manta, the least proved first, and what they showed as tables.

    python -m benchmarks gpu ten-minutes [--fake] [--minutes 10] [--since COMMIT] [--json FILE]
    python -m benchmarks gpu report FILE

Runs on a bare machine, without Ray and NIXL: `make gpu-ten-minutes` names the packages that are missing. Each part runs
in processes of its own and has a share of the time, and what the parts before it left over; then it is interrupted, and
killed. FILE is written before and after each part, so it is whole whenever the run is cut. FlashInfer's kernels are
compiled beside the first parts. A run that is not whole exits with status 1, one that was interrupted with 130.

``--fake``: a few tests of each part on a GPU that is not there (tests/gpu/fake_cuda.py), and the smallest measurements
on the CPU, to see that the command itself works.

Owns:      the order of the parts, their shares, and the form of FILE.
Never:     imports PyTorch: what breaks it is a part's verdict.
As a plugin of pytest this file writes down each test's outcome as soon as it is known.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from benchmarks import harness
from benchmarks.harness import ROOT, Row, say

FILE = pathlib.Path("bench_results/gpu_ten_minutes.json")
VERSION = 1  # of FILE's form
LAST_RUN = "4884c6c"  # the commit that last ran on a GPU, where no FILE tells
GRACE_S, LOOK_S = 5.0, 0.2  # from a part's interruption to its end; between two looks at it
PROCESSES = 6  # of pytest, where xdist is installed
LINES = "MANTA_TEST_LINES"  # the file for the outcomes of tests, in the environment of pytest
PLUGIN = "benchmarks.gpu.ten_minutes"  # this file, whatever its name is when it is run
UNFIT = 77  # exit status of a process that finds here nothing to do, and says why
ENGINE, FIRST = "tests/gpu/test_gpu_engine.py", "tests/gpu/test_first_runs.py"
FP8 = "tests/gpu/test_fp8_weights.py"
CHANGED = (ENGINE, "tests/gpu/test_fences.py", "tests/gpu/test_host_tier.py", "tests/gpu/test_adapters_on_gpu.py")
ALONE = ("tests/gpu/test_runner_memory.py", "tests/gpu/test_bench_gpu.py")  # they measure what others would take
REST = ("tests/gpu", "tests/unit/runner/test_device_draw.py", "tests/unit/runner/test_token_counts.py")
IMPORTED = re.compile(r"^\s*(?:from|import) ([\w.]+)", re.MULTILINE)
COMPILE = f"""
import sys
try:
    import flashinfer
except ImportError as error:
    print(f"FlashInfer cannot be imported ({{error}}): Triton's kernels are used"); sys.exit({UNFIT})
import torch
from replicas.attention.base import AttentionSpec
from replicas.attention.choice import make_attention, try_out
from replicas.memory.scaled_pool import kv_pool
for latent, heads, dim in ((None, (32, 8), 128), (512, (16, 1), 576)):
    shape = dict(num_pages=4, page_size=16, num_layers=1, num_kv_heads=heads[1], head_dim=dim, device="cuda")
    pool = kv_pool("bfloat16", **shape, latent=latent and (latent, dim - latent))
    spec = AttentionSpec(pool=pool, dtype=torch.bfloat16, num_heads=heads[0], num_kv_heads=heads[1], head_dim=dim)
    try_out(make_attention("flashinfer", spec)[0], spec)
    print(f"heads of {{dim}}: a step has run", flush=True)
"""


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One process of a part: pytest over files, or another command that takes ``--json``."""

    tests: tuple[str, ...] = ()
    only: str = ""  # pytest's -k
    together: bool = False  # by several processes
    command: tuple[str, ...] = ()  # of Python, in place of tests


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is shown, in which share of the time, by which processes; ``small``: those of ``--fake``."""

    name: str
    proves: str
    share_s: float  # of 600
    runs: tuple[Run, ...]
    small: tuple[Run, ...]


@dataclass(slots=True, kw_only=True)
class Verdict:
    """How a part ended, as FILE has it.

    passed; failed; cut: its time was over; skipped: nothing of it can run here; under way; not reached.
    """

    name: str
    proves: str
    share_s: float
    verdict: str = "not reached"
    seconds: float = 0.0
    tests: list[dict[str, Any]] = field(default_factory=list)  # id, outcome, seconds, why
    rows: list[dict[str, Any]] = field(default_factory=list)  # of `harness.Row`
    said: str = ""  # the end of the output, unless it passed


def steps(*options: str) -> Run:
    return Run(command=("-m", "benchmarks", "gpu", *options))


PARTS = (
    Part(
        name="constrained", proves="schemas and grammars beside plain and drawn rows, graphs on and off", share_s=45,
        runs=(Run(tests=(ENGINE,), only="constrained or inference_mode", together=True),),
        small=(Run(tests=(ENGINE,), only="inference_mode and device"),),
    ),
    Part(
        name="changed", proves="tests of what has changed since the last run", share_s=90,
        runs=(Run(tests=CHANGED, together=True),),
        small=(Run(tests=("tests/gpu/test_device_port.py",)),),
    ),
    Part(
        name="first runs", proves="MLA, Qwen3's experts, a module of Transformers, embeddings, prompt logprobs, host "
        "tier", share_s=80,
        runs=(
            Run(tests=(FIRST,), only="each_kind or come_back", together=True),
            Run(tests=(ENGINE,), only="devices_way or pages_are", together=True),
        ),
        small=(Run(tests=(FIRST,), only="mla"),),
    ),
    Part(
        name="fp8", proves="weights in e4m3, stored and rounded: PyTorch's product, Triton's, experts, adapters",
        share_s=30, runs=(Run(tests=(FP8,), together=True),), small=(Run(tests=(FP8,), only="pytorch or refused"),),
    ),
    Part(
        name="ranks", proves="two ranks on one GPU: plans, followers, collectives through the host", share_s=40,
        runs=(Run(tests=(FIRST,), only="two_ranks"),),
        small=(Run(tests=(FIRST,), only="two_ranks"),),
    ),
    Part(
        name="mla", proves="FlashInfer's MLA beside the reference, strided and contiguous", share_s=45,
        runs=(Run(tests=(FIRST,), only="flashinfers_mla"),),
        small=(Run(tests=(FIRST,), only="flashinfers_mla"),),
    ),
    Part(
        name="speed", proves="decode in steady state and prefill, FlashInfer and Triton in one process", share_s=150,
        runs=(
            steps("steps", "--shape", "llama-8b", "--attention", "flashinfer", "--attention", "triton", "--what",
                  "served", "--what", "prefill"),
        ),
        small=(steps("steps", "--quick", "--what", "served", "--batch", "4"),),
    ),
    Part(
        name="rest", proves="every other test of a GPU", share_s=110,
        runs=(Run(tests=REST, together=True), Run(tests=ALONE)),
        small=(Run(tests=("tests/gpu/test_warm_up.py",)),),
    ),
)  # fmt: skip
BESIDE = Part(
    name="compile", proves="FlashInfer compiles and runs a step, its MLA too", share_s=300,
    runs=(Run(command=("-c", COMPILE)),), small=(Run(command=("-c", COMPILE)),),
)  # fmt: skip


def run(
    parts: Sequence[Part], out: pathlib.Path, *, budget_s: float, fake: bool, beside: Part | None = None,
    clock: Clock = time.monotonic,
) -> int:  # fmt: skip
    """Run ``parts`` in turn, each to its place in the time at most, ``beside`` beside the first of them; write ``out``.

    Returns: 0 when all passed or were skipped, 130 when interrupted, else 1.
    """
    scale = budget_s / sum(part.share_s for part in parts)
    verdicts = [Verdict(name=p.name, proves=p.proves, share_s=scale * p.share_s) for p in parts]
    compiled = [Verdict(name=p.name, proves=p.proves, share_s=scale * p.share_s) for p in (beside,) if p is not None]
    record = {**harness.to_json((), command=sys.orig_argv), "version": VERSION, "fake": fake, "gpu": _gpu_facts()}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}  # no worker's
    environment = {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if fake:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def write() -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        whole = out.with_name(f"{out.name}.tmp")
        whole.write_text(json.dumps({**record, "parts": [asdict(v) for v in (*compiled, *verdicts)]}, indent=1) + "\n")
        whole.replace(out)

    began_s, ends_s, told = clock(), 0.0, set[str]()
    with tempfile.TemporaryDirectory() as name, _interrupted_by_sigterm():
        folder = pathlib.Path(name)
        compiling = [_Running(p, folder, environment, fake, told) for p in (beside,) if p is not None]
        try:
            for part, mine in zip(parts, verdicts, strict=True):
                ends_s += scale * part.share_s
                mine.verdict = "under way"
                write()
                try:
                    _Running(part, folder, environment, fake, told).finish(mine, began_s + ends_s, clock)
                finally:
                    say(f"{mine.verdict}: {part.name}, {mine.seconds:.0f} s, {_counts(mine.tests)}")
                told |= {each["id"] for each in mine.tests if each["outcome"] != "skipped"}
                for running, verdict in zip(compiling, compiled, strict=True):
                    if clock() - began_s >= verdict.share_s:
                        running.finish(verdict, 0.0, clock)
        except KeyboardInterrupt:
            return 130
        finally:
            for running, verdict in zip(compiling, compiled, strict=True):
                running.finish(verdict, 0.0, clock)
            write()
    return int(any(each.verdict not in ("passed", "skipped") for each in (*compiled, *verdicts)))


class _Running:
    """A part under way: its processes in turn, each the head of a session, so that what it starts ends with it."""

    def __init__(
        self, part: Part, folder: pathlib.Path, environment: Mapping[str, str], fake: bool, told: set[str]
    ) -> None:
        """``told``: the tests that have a verdict, which a run that chooses none by name leaves out."""
        self._runs = list(part.small if fake else part.runs)
        self._folder, self._environment, self._told = folder / part.name.replace(" ", "_"), environment, told
        self._folder.mkdir()
        self._began_s, self._statuses, self._done = time.time(), list[int](), False
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        run = self._runs.pop(0)
        command = [*run.command]
        if run.tests:
            command = ["-m", "pytest", *run.tests, "-p", PLUGIN, "-q", "-o", "timeout=120", "-p", "no:cacheprovider"]
            if run.only:
                command += ["-k", run.only]
            else:
                command += [word for each in sorted(self._told) for word in ("--deselect", each)]
            if run.together and importlib.util.find_spec("xdist"):
                command += ["-n", str(PROCESSES), "--max-worker-restart", "2"]
        elif command[0] == "-m":
            command += ["--json", str(self._folder / f"rows{len(self._statuses)}.json")]
        environment = {**self._environment, LINES: str(self._folder / "tests.jsonl")}
        with (self._folder / "said").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment,
            )  # fmt: skip

    def finish(self, verdict: Verdict, ends_s: float, clock: Clock) -> None:
        """Wait for its processes until ``ends_s`` of ``clock``, then end them; put what they have told into
        ``verdict``. A second call does nothing."""
        if self._done:
            return
        self._done, cut = True, True
        over = not self._runs and self._process.poll() is not None  # since it last said something
        try:
            while True:
                while self._process.poll() is None and clock() < ends_s - GRACE_S:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(LOOK_S)
                cut = self._process.poll() is None
                self._end()
                self._statuses.append(self._process.returncode)
                if cut or not self._runs:
                    break
                cut, self._process = True, self._start()
        finally:
            self._end()
            ended_s = (self._folder / "said").stat().st_mtime if over else time.time()
            verdict.seconds = round(ended_s - self._began_s, 1)
            self._read(verdict, cut)

    def _end(self) -> None:
        """Interrupt the process and all that it started, and kill what is left of them."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S - 1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self, verdict: Verdict, cut: bool) -> None:
        lines, by_test = self._folder / "tests.jsonl", dict[str, dict[str, Any]]()
        for line in lines.read_text().splitlines() if lines.exists() else ():
            with contextlib.suppress(ValueError):  # the last one of a process that was killed
                _add(by_test, json.loads(line))
        verdict.tests = list(by_test.values())
        for path in sorted(self._folder.glob("rows*.json")):
            verdict.rows += json.loads(path.read_text())["rows"]
        outcomes, statuses = {each["outcome"] for each in verdict.tests}, set(self._statuses)
        if "failed" in outcomes or (statuses - {0, UNFIT} and not cut):
            verdict.verdict = "failed"
        elif cut:
            verdict.verdict = "cut"
        else:
            verdict.verdict = "skipped" if outcomes == {"skipped"} or statuses == {UNFIT} else "passed"
        if verdict.verdict != "passed":
            verdict.said = (self._folder / "said").read_text(errors="replace")[-3000:]


def _add(by_test: dict[str, dict[str, Any]], line: Mapping[str, Any]) -> None:
    """Add a phase of a test: it failed if one of them did, and is skipped or passed otherwise."""
    mine = by_test.setdefault(line["id"], {"id": line["id"], "outcome": "passed", "seconds": 0.0, "why": ""})
    mine["seconds"] = round(mine["seconds"] + line["seconds"], 2)
    if line["outcome"] == "failed" or (line["outcome"] == "skipped" and mine["outcome"] == "passed"):
        mine["outcome"], mine["why"] = line["outcome"], line["why"]


def pytest_runtest_logreport(report: Any) -> None:
    """Write a phase of a test to the file that LINES names, at once: the process may be killed in the next test."""
    if (path := os.environ.get(LINES)) is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    why = "" if report.outcome == "passed" else str(crash.message if crash else report.longrepr)[-300:]
    line = {"id": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "why": why}
    with open(path, "a") as lines:
        lines.write(json.dumps(line) + "\n")


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _gpu_facts() -> dict[str, str]:
    asked = {
        "gpu": ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
        "nvcc": ["nvcc", "--version"],
    }
    found = {}
    for name, command in asked.items():
        if shutil.which(command[0]):
            with contextlib.suppress(subprocess.SubprocessError):
                said = subprocess.run(command, capture_output=True, text=True, timeout=10)
                found[name] = said.stdout.strip()[-200:]
    return found


def changed_tests(since: str) -> tuple[str, ...]:
    """Return the files of tests/gpu that have changed since a commit, or import what has; CHANGED where git cannot
    tell."""
    command = ["git", "diff", "--name-only", since]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True) if shutil.which("git") else None
    if said is None or said.returncode:
        return CHANGED
    changed = set(said.stdout.split())
    modules = {name.removesuffix(".py").replace("/", ".") for name in changed if name.endswith(".py")}
    names = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/gpu").glob("test_*.py"))]
    found = [
        name
        for name in names
        if name not in ALONE and (name in changed or modules & set(IMPORTED.findall((ROOT / name).read_text())))
    ]
    return tuple(found) or CHANGED


def _counts(tests: Sequence[Mapping[str, Any]]) -> str:
    outcomes = [each["outcome"] for each in tests]
    counts = {each: outcomes.count(each) for each in ("passed", "failed", "skipped")}
    return ", ".join(f"{count} {each}" for each, count in counts.items() if count) or "no tests"


def report(path: pathlib.Path) -> str:
    """Return what FILE tells as the tables of docs/gpu.md. Raises: SystemExit for another file."""
    try:
        record = json.loads(path.read_text())
        parts = record["parts"]
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{path} is no file of `make gpu-ten-minutes` ({error!r}): name the one it wrote") from error
    where = "a GPU that is not there" if record["fake"] else record["gpu"].get("gpu") or "an unknown GPU"
    commit = (record["git"]["commit"] or "no commit")[:10] + " with changes" * bool(record["git"]["changed"])
    lines = [f"{where}, {record['time']}, {commit}", ""]
    lines += ["| part | shows | verdict | tests | s |", "|---|---|---|---|---|"]
    for part in parts:
        cells = (part["name"], part["proves"], part["verdict"], _counts(part["tests"]), f"{part['seconds']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    for section, (header, *grid) in harness.tables(Row(**row) for part in parts for row in part["rows"]).items():
        lines += ["", f"{section}:", ""]
        lines += [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *grid)]
    failed = [test for part in parts for test in part["tests"] if test["outcome"] == "failed"]
    lines += ["", "| failed | why |", "|---|---|"] if failed else []
    for test in failed:
        why = " ".join(test["why"].split()).replace("|", "\\|")
        lines.append(f"| `{test['id']}` | {why} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parse = argparse.ArgumentParser(
        prog="python -m benchmarks gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parse.add_subparsers(dest="command", required=True)
    ten = commands.add_parser("ten-minutes", help="run all parts, and write FILE")
    ten.add_argument("--fake", action="store_true", help="a little of each part, on a GPU that is not there")
    ten.add_argument("--minutes", type=float, default=10.0, help="for all parts together")
    ten.add_argument("--since", help="the commit of the last run; by default that of FILE, if it is there")
    ten.add_argument("--json", metavar="FILE", type=pathlib.Path, default=FILE)
    of_file = commands.add_parser("report", help="print what FILE tells as tables in Markdown")
    of_file.add_argument("file", type=pathlib.Path)
    options = parse.parse_args(argv)
    if options.command == "report":
        print(report(options.file))
        return 0
    if not options.fake and shutil.which("nvidia-smi") is None:
        parse.error("nvidia-smi is not on PATH, so there is no GPU here; --fake runs a little of each part without one")
    changed = (Run(tests=changed_tests(options.since or _commit_of(options.json) or LAST_RUN), together=True),)
    parts = [replace(part, runs=changed) if part.name == "changed" else part for part in PARTS]
    status = run(parts, options.json, budget_s=60 * options.minutes, fake=options.fake, beside=BESIDE)
    print(report(options.json))
    say(f"{options.json}; its tables once more: python -m benchmarks gpu report {options.json}")
    return status


def _commit_of(path: pathlib.Path) -> str | None:
    try:
        commit: str | None = json.loads(path.read_text())["git"]["commit"]
    except (OSError, ValueError, KeyError):
        return None
    return commit


if __name__ == "__main__":
    sys.exit(main())
