"""Holds kernels, PyTorch and its libraries to the instruction set that MANTA_CPU names.

Owns:      the variables of the environment by which numba, ATen, oneDNN and MKL are held to fewer instructions than the
           CPU has. The package's import sets them, which replicas.config causes: before any of the four reads them, and
           in the process that starts Ray, whose workers inherit them.
           To add an instruction set, give `SETS` an entry.
Never:     loads a library unless something is asked for.
Invariant: a name that this CPU cannot run is refused: LLVM would compile for it, and the process end at an instruction.
"""

import os
import platform
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

VARIABLE = "MANTA_CPU"
NATIVE = "native"  # whatever the CPU has; also where the variable is not set
_X86_64 = ("x86_64", "AMD64")
# LLVM would use half of a 512-bit register without the last one: what it takes for the best on a Skylake
_AVX2, _AVX512 = "+avx2,+f16c,+fma", "+avx512bw,+avx512cd,+avx512dq,+avx512f,+avx512vl,-prefer-256-bit"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionSet:
    """One set of vector instructions."""

    machines: tuple[str, ...]  # that may have it, as `platform.machine` calls them
    feature: str  # LLVM's name of what kernels that are compiled for it use
    more: Mapping[str, str] = field(default_factory=dict)  # beside it, that products use: a word, LLVM's name
    # what holds numba and PyTorch's libraries to it; empty: all such machines have it, so there is no choice
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def needs(self) -> list[str]:
        """LLVM's names of the instructions that a CPU must have to be held to it."""
        features = self.variables["NUMBA_CPU_FEATURES"].split(",")
        return [each[1:] for each in features if each.startswith("+")]


SETS: dict[str, InstructionSet] = {  # of one kind of machine, the widest last
    "neon": InstructionSet(machines=("aarch64", "arm64"), feature="neon"),
    "avx2": InstructionSet(
        machines=_X86_64,
        feature="avx2",
        variables={
            "NUMBA_CPU_NAME": "haswell",
            "NUMBA_CPU_FEATURES": _AVX2,
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        },
    ),
    "avx512": InstructionSet(  # held to, the first generation: no VNNI, no bf16, no AMX
        machines=_X86_64,
        feature="avx512f",
        more={"vnni": "avx512vnni", "bf16": "avx512bf16", "amx": "amx-bf16"},
        variables={
            "NUMBA_CPU_NAME": "skylake-avx512",
            "NUMBA_CPU_FEATURES": f"{_AVX2},{_AVX512}",
            "ATEN_CPU_CAPABILITY": "avx512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        },
    ),
}


def allowed() -> list[str]:
    """List the values of MANTA_CPU that this CPU can run, the widest last."""
    here = [name for name, each in SETS.items() if each.variables and platform.machine() in each.machines]
    if not here:
        return [NATIVE]
    import llvmlite.binding  # type: ignore[import-untyped]

    has = llvmlite.binding.get_host_cpu_features()
    return [*(name for name in here if all(has.get(each, False) for each in SETS[name].needs)), NATIVE]


def hold(environment: MutableMapping[str, str]) -> None:
    """Set in ``environment`` what holds each library to its MANTA_CPU; without one nothing is changed.

    `NATIVE` takes the variables away. Raises: ValueError for a value that is unknown, or that this CPU cannot run.
    """
    asked = environment.get(VARIABLE, "")
    held = {name: each.variables for name, each in SETS.items() if each.variables}
    if not asked or (asked in held and held[asked].items() <= environment.items()):
        return  # a child of a process that did this
    if asked not in (can := allowed()):
        known = "is unknown" if asked not in held else f"cannot run on this CPU ({platform.machine()})"
        raise ValueError(f"{VARIABLE}={asked} {known}; allowed here: {', '.join(can)}")
    for name in {name for variables in held.values() for name in variables}:
        environment.pop(name, None)
    environment.update(held.get(asked, {}))
    if environment is os.environ and "numba" in sys.modules:  # it has read them already
        sys.modules["numba"].core.config.reload_config()
