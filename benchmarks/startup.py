"""`python -m benchmarks.startup [--json OUT] [--model FOLDER]`: seconds from a fresh process to a ready engine.

Weights lie on disk, and in the page cache after the first run; kernels are compiled at the first start of a machine and
read from numba's cache at all later ones. Ray's own start is not counted: nothing of it is ours.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.report import Row, publish

MODEL = "models/SmolLM2-135M-Instruct"
RUNS = 3
PROGRAM = """
import json, sys, time
started_s = time.perf_counter()
from replicas.launch import load_engine
imported_s = time.perf_counter()
engine = load_engine(sys.argv[1], num_threads=int(sys.argv[2]))
print(json.dumps({"imports": imported_s - started_s, **engine.start_times}))
engine.close()
"""
PHASES = {"imports": "imports", "load_weights": "weights", "warm_up": "warm-up", "total": "load_engine"}


def measure(model: str, threads: int) -> list[Row]:
    """The second start by its phases, and what the first one takes."""
    with tempfile.TemporaryDirectory() as folder:
        first_s, _ = start(model, threads, folder)
        runs = [start(model, threads, folder) for _ in range(RUNS)]
    section = f"start of an engine in a fresh process, {threads} threads"
    whole = [seconds for seconds, _ in runs]
    rows = [
        Row.of(section, "first on a machine: kernels are compiled", [first_s], "s"),
        Row.of(section, "later", whole, "s", target="< 10 s"),
    ]
    for phase, name in PHASES.items():
        rows.append(Row.of(section, f"later, of it: {name}", [times[phase] for _, times in runs], "s"))
    return rows


def start(model: str, threads: int, cache_folder: str) -> tuple[float, dict[str, float]]:
    """Seconds of a process that loads the engine and ends, and of its phases. Kernels are kept in ``cache_folder``.

    Raises: RuntimeError with what the process wrote, when it fails.
    """
    started_s = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, model, str(threads)]
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache_folder}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    took_s = time.perf_counter() - started_s
    if done.returncode:
        raise RuntimeError(f"the engine did not start (exit status {done.returncode}); it wrote:\n{done.stderr}")
    return took_s, json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    parse = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parse.add_argument("--json", metavar="OUT", help="also write JSON here")
    parse.add_argument("--model", default=MODEL)
    parse.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parse.parse_args(argv)
    publish(measure(options.model, options.threads), json_path=options.json)


if __name__ == "__main__":
    main()
