"""Compiles the CPU's slow kernels and keeps them beside the code, several at once: ``python -m tools.kernels``.

`make serve` does so while the model is converted, and `make test` first: a replica, or a test, that wants one of them
would take half a minute for it, on one core.
"""

import os
import subprocess
import sys

PROGRAMS = (  # that take about as long as each other; the other kernels take a second or less
    "from replicas.attention.cpu_decode import decode; decode.address",
    "from replicas.attention.cpu_extend import extend; from replicas.kernels.linear import product_float32 as product; "
    "extend.address, product.address",
)


def compile_all() -> int:
    """Compile what is not kept yet. Returns: 0, or the exit status of a process that failed, which says why."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for each other spin
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    processes = [subprocess.Popen([sys.executable, "-c", program], env=environment) for program in PROGRAMS]
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    print("Compiling kernels (once)", flush=True)
    sys.exit(compile_all())
