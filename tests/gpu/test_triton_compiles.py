"""The Triton kernels compile to machine code of a Hopper GPU, with no GPU there: what a model's first step would do.

Compiled in a process of its own: here the kernels are interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicas.kernels import gpu
from replicas.kernels.adapters import on_gpu as low_rank
from replicas.kernels.experts import fp8, on_gpu
from replicas.runner import device_draw, token_counts
from replicas.runner.device_draw import HEAD
from tests.gpu.device_steps import DEVICE
from tests.gpu.triton_or_skip import triton_paged

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = 227 << 10  # that a program of a Hopper GPU can have
PROGRAM = """
import importlib, json, pathlib, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from replicas.kernels import gpu

KINDS = [
    ("*i32", "counts table rows seq_lens tiles qo_indptr prefix_lens choices experts follows indptr indices "
             "last_page_len"),
    ("*i64", "ids out_slots index rules tokens head_ids places penalties records source positions"),
    ("*fp32", "low part_out part_lse logits peaks scaled head_values made weights bias scales weight_scales"),
    ("fp32", "scaling scale cap eps v_scale k_inverse v_inverse"),
    (sys.argv[3], "keys values"), (sys.argv[1], "q out k v sinks cos sin q_norm k_norm x term weight gate_up"),
]
types = {name: kind for kind, names in KINDS for name in names.split()}
in_8_bits = {"quantise": "out", "grouped_product": "weight"}  # its argument in e4m3, of the latter where SCALED
cuobjdump = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
made_of = {}
for module, name, constants, num_warps, *exact in json.loads(sys.argv[2]):
    kernel = getattr(importlib.import_module("replicas." + module), name)
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    if constants.get("SCALED", True) and name in in_8_bits:
        signature[in_8_bits[name]] = "*fp8e4nv"
    values = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
    aligned = [arg for arg, kind in signature.items() if kind[0] == "*" or arg.endswith("stride")]
    attrs = {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned}  # as a launch finds them
    options = {"num_warps": num_warps} | (exact or [gpu.FUSED])[0]
    source = ASTSource(kernel, signature, values, attrs)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\\d+)", usage)}
    fused = made.asm["ptx"].count("fma.rn.f")
    made_of[name + " again" * (name in made_of)] = {"shared": made.metadata.shared, "fused": fused, **numbers}
print(json.dumps(made_of))
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU is here: the other tests run the compiled kernels")
@pytest.mark.parametrize(
    ("dtype", "pool", "group", "head_dim", "special"),
    [
        ("*bf16", "*bf16", 3, 64, True), ("*fp16", "*fp16", 4, 128, False), ("*bf16", "*fp8e4nv", 4, 128, False),
        ("*bf16", "*fp8e5", 4, 128, False),
    ],
)
def test_every_kernel_compiles_for_a_hopper_gpu(
    dtype: str, pool: str, group: int, head_dim: int, special: bool, tmp_path: Path
) -> None:
    """SmolLM2's heads in bf16, Llama-8B's in fp16, pages of 16; with the constants that their callers give, of layers
    with windows, caps and sinks too (``special``). No register is spilled to memory."""
    rows = triton_paged.triton.next_power_of_2(group)
    shape = {"GROUP": group, "PAGE": 16, "D": head_dim, "BLOCK_D": head_dim}
    common = shape | {"BLOCK": 64, "LIMITED": special, "CAPPED": special, "PRECISION": "tf32"}
    scaled = {"LARGEST": 0.0 if pool == dtype else 57_344.0 if pool == "*fp8e5" else 448.0}
    store = scaled | {key: shape[key] for key in ("PAGE", "D", "BLOCK_D")}
    merge = {"BLOCK_PARTS": triton_paged.MAX_SPLITS, "D": head_dim, "BLOCK_D": head_dim, "SINKS": special}
    turn = scaled | {"NORMS": True, "PAGE": 16, "D": head_dim, "HALF": head_dim // 2}
    attention, elementwise = "attention.triton_kernels", "kernels.triton_rows"
    experts, tile = "kernels.experts.triton_grouped", {"BLOCK_N": on_gpu.BLOCK_N, "BLOCK_K": on_gpu.BLOCK_K}
    product = {"SHARED": 8, "BLOCK_M": on_gpu.MANY_ROWS, "PRECISION": "tf32", "SCALED": False, "DENSE": False} | tile
    dense = product | {"SHARED": 1, "SCALED": True, "DENSE": special}
    chosen = dict.fromkeys(("TWO", "SIGMOID", "NORMALIZE", "BIASED"), True) | {"EXPERTS": 256, "TOP_K": 8, "GROUPS": 8}
    chosen |= {"TOP_GROUPS": 4, "TINY": 1e-20, "BLOCK_G": 8, "BLOCK_S": 32, "BLOCK_K": 8}
    cut = {"EXPERTS": 256, "ROWS": on_gpu.MANY_ROWS, "BINS": 512, "BLOCK": on_gpu.CUT_BLOCK}
    adapters, chunks = "kernels.adapters.triton_low_rank", low_rank.CHUNKS
    shrink = {"PIECES": 3, "CHUNKS": chunks if special else 1, "BLOCK_K": low_rank.BLOCK_K, "PRECISION": "tf32"}
    expand = {"PARTS": 1 if special else chunks, "BLOCK_N": low_rank.BLOCK_N, "PRECISION": "tf32"}
    cases = [
        (attention, "extend", common | {"GROUP_ROWS": rows, "TILE": 128 // rows, "SINKS": special}, 8),
        (attention, "decode_parts", common | {"GROUP_ROWS": max(16, rows)}, 4),
        (attention, "merge_parts", merge, 4),
        (attention, "store", store, 1),
        (attention, "turn_and_store", turn, 1),
        (attention, "list_pages", {"PAGE": 16, "BLOCK": triton_paged.LISTED}, 4),
        (elementwise, "enter_rows", {}, 1, gpu.EXACT),
        (elementwise, "quantise", {"LARGEST": fp8.LARGEST, "BLOCK": fp8.BLOCK}, 4),
        (elementwise, "add_rms_norm", {"ADDS": True, "BLOCK": gpu.LARGEST_ROW}, 16),
        (elementwise, "silu_mul", {"BLOCK": gpu.SILU_BLOCK}, 4),
        (elementwise, "greatest", {"BLOCK": device_draw.BLOCK}, device_draw.WARPS, gpu.EXACT),
        (elementwise, "penalise", {"BLOCK": token_counts.BLOCK}, 4, gpu.EXACT),
        (elementwise, "scale", {"BLOCK": device_draw.BLOCK}, 4, gpu.EXACT),
        (experts, "grouped_product", product, on_gpu.WARPS),
        (experts, "grouped_product", dense, on_gpu.WARPS_8_BITS),
        (experts, "choose_experts", chosen, 1),
        (experts, "cut_tiles", cut, on_gpu.WARPS, gpu.EXACT),
        (experts, "sum_choices", {"TOP_K": 8, "BLOCK": on_gpu.SUM_BLOCK}, on_gpu.WARPS),
        (adapters, "shrink", shrink, low_rank.WARPS),
        (adapters, "expand", expand, low_rank.WARPS),
        (elementwise, "draw", {"BLOCK": device_draw.BLOCK, "HEAD": HEAD}, device_draw.WARPS, gpu.EXACT),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", PROGRAM, dtype, json.dumps(cases), pool]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    made = json.loads(run.stdout)
    assert len(made) == len(cases)
    for name, uses in made.items():
        assert uses["shared"] <= SHARED_BYTES, name
        assert uses["STACK"] == uses["LOCAL"] == 0, f"{name} spills: {uses}"
    for name in ("greatest", "penalise", "scale"):  # those of `draw` are its logarithms'
        assert not made[name]["fused"], f"{name} rounds a product and a sum once, the host twice"
