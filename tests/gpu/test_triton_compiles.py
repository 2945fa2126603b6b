"""The Triton kernels compile to machine code of a Hopper GPU, with no GPU there: what a model's first step would do.

Compiled in a process of its own: here the kernels are interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.device_steps import DEVICE
from tests.gpu.triton_or_skip import triton_paged

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = 227 << 10  # that a program of a Hopper GPU can have
PROGRAM = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from replicas.attention import triton_kernels as kernels

KINDS = [
    ("*i32", "table rows seq_lens shared_lens tiles members qo_indptr prefix_lens"), ("*i64", "out_slots"),
    ("*fp32", "part_out part_lse"), ("fp32", "scale"), (sys.argv[1], "q keys values out k v"),
]
types = {name: kind for kind, names in KINDS for name in names.split()}
shared = {}
for name, constants, num_warps in json.loads(sys.argv[2]):
    kernel = getattr(kernels, name)
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    values = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    made = triton.compile(
        ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}
    )
    assert made.asm["cubin"]
    shared[name] = made.metadata.shared
print(json.dumps(shared))
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is here: the other tests run the compiled kernels")
@pytest.mark.parametrize(("dtype", "group", "head_dim"), [("*bf16", 3, 64), ("*fp16", 4, 128)])
def test_every_kernel_compiles_for_a_hopper_gpu(dtype: str, group: int, head_dim: int, tmp_path: Path) -> None:
    """SmolLM2's heads in bf16, Llama-8B's in fp16, pages of 16; with the constants that triton_paged.py gives."""
    rows = triton_paged.triton.next_power_of_2(group)
    shape = {"GROUP": group, "PAGE": 16, "D": head_dim, "BLOCK_D": head_dim}
    common = shape | {"BLOCK": 64, "PRECISION": "tf32"}
    store = {key: shape[key] for key in ("PAGE", "D", "BLOCK_D")}
    merge = {"BLOCK_PARTS": 64, "D": head_dim, "BLOCK_D": head_dim}
    cases = [
        ("extend", common | {"GROUP_ROWS": rows, "TILE": 128 // rows}, 8),
        ("decode_parts", common | {"GROUP_ROWS": max(16, rows), "CASCADE": True}, 4),
        ("group_parts", common | {"GROUP_ROWS": rows, "TILE": triton_paged.GROUP_TILE_ROWS // rows}, 4),
        ("merge_parts", merge, 4),
        ("store", store, 1),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, dtype, json.dumps(cases)]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    shared = json.loads(run.stdout)
    assert len(shared) == 5
    assert max(shared.values()) <= SHARED_BYTES
