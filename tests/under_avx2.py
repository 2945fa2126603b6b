"""`python -m tests.under_avx2 [PYTEST ARGUMENTS]`: tests of arithmetic with every library held to AVX2.

Without arguments the tests of kernels and of what is made of them run so on a CPU that has AVX-512. On one that has not
they ran so already, and nothing is left to do (tests/unit/kernels/test_instructions.py holds that the forcing works).
What several ranks, mixed steps and narrow pages add to the same kernels is tested once, on what the CPU has, unless
MANTA_WHOLE_MATRICES is set (tests/pairwise.py). With arguments pytest gets them, on any x86-64 CPU.
"""

import os
import sys
from collections.abc import Sequence

from replicas.kernels import instructions
from tests.__main__ import SHARED
from tests.pairwise import ALL

ARITHMETIC = [
    "tests/unit/kernels",
    "tests/unit/layers",
    "tests/unit/attention",
    *(
        f"tests/numerics/test_{name}.py"
        for name in (
            "attention_native", "fused_blocks", "int8_model", "same_answer", "smollm2", "tiny_models", "weight_formats",
        )
    ),
]  # fmt: skip
MORE = ["tests/numerics/test_kv_dtypes.py", "tests/numerics/test_mixed_answers.py"]


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        if "avx512" not in instructions.allowed():
            print("This CPU has no AVX-512: the tests ran with the most that it has already")
            return
        print("The tests of arithmetic again, held to AVX2 ...", flush=True)
    chosen = [*ARITHMETIC, *MORE] if ALL else ["-m", "not slow", *ARITHMETIC]
    command = [sys.executable, "-m", "pytest", *(arguments or [*SHARED, *chosen])]
    os.execve(sys.executable, command, {**os.environ, instructions.VARIABLE: "avx2"})


if __name__ == "__main__":
    main(sys.argv[1:])
