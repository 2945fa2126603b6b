"""`python -m tests.under_avx2 [PYTEST ARGUMENTS]`: tests of arithmetic with every library held to AVX2.

Without arguments the tests of kernels and of what is made of them run so on a CPU that has AVX-512. On one that has not
they ran so already, and nothing is left to do (tests/unit/kernels/test_instructions.py holds that the forcing works).
What several ranks, mixed steps and narrow pages add to the same kernels is tested once, on what the CPU has; `make
test-all` has it here too. With arguments pytest gets them, on any x86-64 CPU.
"""

import os
import platform
import sys
from collections.abc import Sequence

from tests.__main__ import SHARED
from tests.pairwise import ALL

AVX2 = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
ARITHMETIC = [
    "tests/unit/kernels",
    "tests/unit/layers",
    "tests/unit/attention",
    *(
        f"tests/numerics/test_{name}.py"
        for name in (
            "attention_native", "fused_blocks", "int8_families", "int8_model", "same_answer", "smollm2", "tiny_models",
        )
    ),
]  # fmt: skip
MORE = ["tests/numerics/test_kv_dtypes.py", "tests/numerics/test_mixed_answers.py"]


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        if platform.machine() not in ("x86_64", "AMD64"):
            print(f"No AVX2 to be held to: this CPU is {platform.machine()}")
            return
        from replicas.kernels.simd import compiles_for

        if not compiles_for("avx512f"):
            print("This CPU has no AVX-512: the tests ran under AVX2 already")
            return
        print("The tests of arithmetic again, held to AVX2 ...", flush=True)
    chosen = [*ARITHMETIC, *MORE] if ALL else ["-m", "not slow", *ARITHMETIC]
    command = [sys.executable, "-m", "pytest", *(arguments or [*SHARED, *chosen])]
    os.execve(sys.executable, command, {**os.environ, **AVX2})


if __name__ == "__main__":
    main(sys.argv[1:])
