"""Holds kernels, PyTorch and its libraries to the instruction set that MANTA_CPU names.

Owns:      the variables of the environment by which numba, ATen, oneDNN and MKL are held to fewer instructions than the
           CPU has. The package's import sets them, which replicas.config causes: before any of the four reads them, and
           in the process that starts Ray, whose workers inherit them.
Never:     loads a library unless something is asked for.
Invariant: a name that this CPU cannot run is refused: LLVM would compile for it, and the process end at an instruction.
"""

import os
import platform
import sys
from collections.abc import MutableMapping

VARIABLE = "MANTA_CPU"
NATIVE = "native"  # whatever the CPU has; also where the variable is not set
_X86_64 = ("x86_64", "AMD64")
# LLVM would use half of a 512-bit register without the last one: what it takes for the best on a Skylake
_AVX2, _AVX512 = "+avx2,+f16c,+fma", "+avx512bw,+avx512cd,+avx512dq,+avx512f,+avx512vl,-prefer-256-bit"
SETS: dict[str, dict[str, str]] = {
    "avx2": {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": _AVX2,
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    },
    "avx512": {  # the first generation: no VNNI, no bf16
        "NUMBA_CPU_NAME": "skylake-avx512",
        "NUMBA_CPU_FEATURES": f"{_AVX2},{_AVX512}",
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}


def allowed() -> list[str]:
    """List the values of MANTA_CPU that this CPU can run, the widest last."""
    if platform.machine() not in _X86_64:
        return [NATIVE]
    import llvmlite.binding  # type: ignore[import-untyped]

    here = llvmlite.binding.get_host_cpu_features()

    def runs(name: str) -> bool:
        features = SETS[name]["NUMBA_CPU_FEATURES"].split(",")
        return all(here.get(each[1:], False) for each in features if each.startswith("+"))

    return [*filter(runs, SETS), NATIVE]


def hold(environment: MutableMapping[str, str]) -> None:
    """Set in ``environment`` what holds each library to its MANTA_CPU; without one nothing is changed.

    `NATIVE` takes the variables away. Raises: ValueError for a value that is unknown, or that this CPU cannot run.
    """
    asked = environment.get(VARIABLE, "")
    if not asked or (asked in SETS and SETS[asked].items() <= environment.items()):
        return  # a child of a process that did this
    if asked not in (can := allowed()):
        known = "is unknown" if asked not in SETS else f"cannot run on this CPU ({platform.machine()})"
        raise ValueError(f"{VARIABLE}={asked} {known}; allowed here: {', '.join(can)}")
    for name in {name for variables in SETS.values() for name in variables}:
        environment.pop(name, None)
    environment.update(SETS.get(asked, {}))
    if environment is os.environ and "numba" in sys.modules:  # it has read them already
        sys.modules["numba"].core.config.reload_config()
