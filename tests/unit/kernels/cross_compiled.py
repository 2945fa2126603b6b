"""`python -m tests.unit.kernels.cross_compiled`: every CPU kernel as machine code for aarch64, made on any machine.

Prints one JSON object: what is compiled for, and of each kernel the machine of its object (183: aarch64), how many
multiply-adds of four floats and products of 2 x 4 bf16 numbers it has, and how many vectors it keeps in memory; null
for one that is made of x86's own instructions. numba compiles for the machine that it runs on: its IR is taken before
it is optimised, with tiles chosen as on a CPU that has NEON, and LLVM does the rest for the other target.

`python -m tests.unit.kernels.cross_compiled KERNEL FILE`: writes the object of one, in which it is called `kernel`.
"""

import importlib
import json
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba
import numpy as np
from numba.core import config, types
from numba.core.codegen import CPUCodeLibrary, JITCodeLibrary, JITCPUCodegen
from numba.core.compiler_lock import global_compiler_lock

TRIPLE, CPU = "aarch64-unknown-linux-gnu", "neoverse-n1"  # no SVE
BF16, BF16_CPU = "@llvm.aarch64.neon.bfmmla", "neoverse-n2"
_IR: dict[str, str] = {}  # by the name of a library of numba's


def as_on_aarch64() -> None:
    """Have `compiles_for` answer as there, and numba stop before it makes code. Before any kernel is imported."""
    config.CPU_NAME, config.CPU_FEATURES = "x86-64-v2", "+neon"
    llvm.get_host_cpu_features = lambda: {"neon": True}

    def keep(library: Any) -> None:
        _IR[library.name] = str(library._final_module)
        library._finalized = True

    CPUCodeLibrary._optimize_final_module = lambda library: None
    CPUCodeLibrary._finalize_final_module = keep
    JITCodeLibrary.get_pointer_to_function = lambda library, name: 0
    JITCPUCodegen.set_env = lambda codegen, name, env: None


def kernels() -> Iterator[tuple[str, Any]]:
    """Find the kernels of the CPU in the modules that may have some."""
    from replicas import attention
    from replicas import kernels as package
    from replicas.kernels.team import Kernel

    found = set()
    for folder, first in ((package, ""), (attention, "cpu")):
        for info in pkgutil.iter_modules(folder.__path__):
            if info.name.startswith(first):
                module = importlib.import_module(f"{folder.__name__}.{info.name}")
                for name, each in vars(module).items():
                    if isinstance(each, Kernel) and each not in found:
                        found.add(each)
                        yield f"{each.function.__module__}.{name}", each


@global_compiler_lock  # type: ignore[untyped-decorator]  # numba's is not typed
def ir_of(kernel: Any) -> str:
    from replicas.kernels.team import _OPTIONS

    signature = types.void(types.CPointer(numba.from_dtype(np.dtype(kernel.arguments))))
    library = numba.cfunc(signature, **_OPTIONS)(kernel.function)._library
    library._ensure_finalized()
    return _IR[library.name]


def compiled(ir: str) -> tuple[bytes, str]:
    """Return object and assembly of a module that was made for this machine."""
    cpu = BF16_CPU if BF16 in ir else CPU
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=cpu, opt=3)
    target = f'target triple = "{TRIPLE}"\ntarget datalayout = "{machine.target_data}"\n'
    module = llvm.parse_assembly(target + re.sub("^target (triple|datalayout) = .*$", "", ir, flags=re.M))
    for function in module.functions:
        if function.name.startswith("cfunc."):
            function.name = "kernel"
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module), machine.emit_assembly(module)


def main() -> None:
    as_on_aarch64()
    from replicas.kernels.simd import instruction_set

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    if sys.argv[1:]:
        name, file = sys.argv[1:]
        Path(file).write_bytes(compiled(ir_of(dict(kernels())[name]))[0])
        return
    made = {}
    for name, kernel in kernels():
        ir = ir_of(kernel)
        if "@llvm.x86." in ir:
            made[name] = None
            continue
        code, assembly = compiled(ir)
        made[name] = {
            "machine": int.from_bytes(code[18:20], "little"),
            "fmla": len(re.findall("fmla\tv.*4s", assembly)),
            "bfmmla": len(re.findall("\tbfmmla\t", assembly)),
            "spills": assembly.count("16-byte Folded Spill"),
        }
    print(json.dumps({"instructions": instruction_set(), "kernels": made}))


if __name__ == "__main__":
    main()
