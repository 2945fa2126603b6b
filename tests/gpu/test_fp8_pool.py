"""K and V in 8-bit floats with one scale for all of K and one for V, as FlashInfer takes them: pool, attention, engine,
and what a KV transfer says of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtransfer.errors import IncompatibleLayout
from replicas.attention.torch_native import TorchNativeAttention
from replicas.config import FP8_TENSOR, CacheConfig, Hardware, kv_layout
from replicas.errors import InvalidConfig
from replicas.loading.model_files import load_model_config
from replicas.memory.scaled_pool import Fp8KVPool, kv_pool
from replicas.resolve import resolve
from tests.attention_steps import Step
from tests.gpu import fake_cuda, flashinfer_stand_in
from tests.gpu.device_steps import DEVICE, device_step, run
from tests.gpu.rigs import engine_config, make_rig
from tests.gpu.triton_or_skip import triton_paged
from tests.numerics import tiny

SHAPE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}


def fp8_step(lengths: list[tuple[int, int]], k_scale: float, v_scale: float) -> Step:
    """A step over an 8-bit pool that holds what the step's own does; new K and V are numbers of 8 bits, which are not
    rounded: Triton's interpreter loses a carry where a GPU rounds."""
    step = device_step(lengths, dtype=torch.float16, **SHAPE)
    given: Any = step.pool
    pages = given.data.shape[0] - 1
    pool = Fp8KVPool(pages, 16, 2, 2, 64, torch.float8_e4m3fn, DEVICE)
    pool.layer_scales = ((1.0, 1.0), (k_scale, v_scale))
    slots = torch.arange((pages + 1) * 16, device=DEVICE)
    pool.set_kv_buffer(1, slots, *given.read_kv(0, slots))
    for x, scale in ((step.k, k_scale), (step.v, v_scale)):
        x.copy_((x.float() / scale).to(torch.float8_e4m3fn).float() * scale)
    step.v[0, 0, 0] = 1000.0  # is cut
    return replace(step, pool=pool)


@pytest.mark.parametrize("kind", ["triton", "flashinfer"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (2.0**-5, 2.0**-6)], ids=str)
def test_a_mixed_step_equals_the_oracle_over_the_same_bytes(
    kind: str, scales: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request extends, four decode; values above what the format holds, times the
    scale of the second layer, are cut."""
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_paged, "PROGRAMS", 24)
    step = fp8_step([(30, 9), (40, 1), (33, 1), (60, 1), (3, 1)], *scales)
    step.batch.num_decode = 4
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    if kind == "triton":
        got = run(triton_paged.TritonAttention(step.pool, **heads), step, layer=1)
    else:
        module = flashinfer_stand_in.install(monkeypatch) if DEVICE == "cpu" else pytest.importorskip("flashinfer")
        module = module if DEVICE == "cpu" else __import__("replicas.attention.flashinfer", fromlist=["x"])
        got = run(module.FlashInferAttention(step.pool, dtype=torch.float16, **heads), step, layer=1)
    stored: Any = step.pool
    mine = stored.buffer.clone()
    stored.set_kv_buffer(1, step.batch.out_slots, step.k, step.v)
    assert torch.equal(stored.buffer, mine)
    wanted = run(TorchNativeAttention(step.pool), replace(step, q=step.q.float()), layer=1)
    assert float((got.float() - wanted).abs().max()) < 4e-3 * max(1.0, float(wanted.abs().max()))


def test_slots_go_to_another_pool_and_back_bit_for_bit_and_numbers_are_cut_not_lost() -> None:
    pools = [
        kv_pool(FP8_TENSOR, num_pages=4, page_size=size, num_layers=2, num_kv_heads=2, head_dim=8, device=DEVICE)
        for size in (4, 2)
    ]
    slots = torch.tensor([5, 6, 3], device=DEVICE)
    k = torch.full((3, 2, 8), 1000.0, device=DEVICE)
    pools[0].set_kv_buffer(1, slots, k, -k)
    assert [float(x.flatten()[0]) for x in pools[0].read_kv(1, slots)] == [448.0, -448.0]
    host = slots.cpu().numpy().astype(np.int32)
    pools[1].write_slots(host, pools[0].read_slots(host))
    assert torch.equal(pools[1].read_slots(host), pools[0].read_slots(host))
    assert pools[0].page_bytes == 4 * 2 * 2 * 2 * 8


def test_fp8_on_a_gpu_is_one_byte_a_number_and_is_not_handed_to_a_cpu(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    made = []
    for device in ("cuda", "cpu"):
        model = load_model_config(str(tmp_path), device=device, dtype="float32")  # type: ignore[arg-type]
        hardware = Hardware(device=device, num_cpus=1, available_memory_bytes=1 << 30)  # type: ignore[arg-type]
        made.append(resolve(model, hardware, cache=CacheConfig(kv_dtype="fp8")))
    on_gpu, on_cpu = made
    assert (on_gpu.kv_dtype, on_cpu.kv_dtype) == (FP8_TENSOR, "fp8")
    numbers = on_gpu.model.kv_cell_bytes(tp=1, kv_dtype="float32") // 4
    assert on_gpu.model.kv_cell_bytes(tp=1, kv_dtype=on_gpu.kv_dtype) == numbers
    with pytest.raises(IncompatibleLayout, match="dtype: 'fp8_tensor' here, 'fp8' there"):
        kv_layout(on_gpu, "m").require_compatible(kv_layout(on_cpu, "m"))
    for of_a_cpu in ("int8", "fp8_e5m2"):
        with pytest.raises(InvalidConfig, match=rf"{of_a_cpu}.* on cuda.*set bfloat16 or fp8"):
            resolve(model, replace(hardware, device="cuda"), cache=CacheConfig(kv_dtype=of_a_cpu))  # type: ignore[arg-type]


def test_an_engine_on_a_gpu_answers_from_a_pool_of_8_bits(
    tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the scales of the checkpoint. Its own prompt is read back in 8 bits, so the first token is among the three
    most likely of Transformers'. Decode steps end the page of the prompt's last tokens and begin another."""
    monkeypatch.setattr("tests.gpu.rigs.NUM_NEW", 4)
    model = tiny.save("llama", tmp_path)
    layers = [f"model.layers.{i}.self_attn." for i in range(3)]
    scales = {f"{at}{part}_scale": 2.0 ** -(i + (part == "v")) for i, at in enumerate(layers) for part in "kv"}
    weights = load_file(tmp_path / "model.safetensors") | {name: torch.tensor(scale) for name, scale in scales.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = engine_config(tmp_path, "cuda")
    config = replace(config, cache=replace(config.cache, kv_dtype="fp8"), cuda_graphs=False)
    rig = make_rig(config)
    assert isinstance(rig.runner.pool, Fp8KVPool)
    assert [rig.runner.pool.scales(layer) for layer in range(3)] == [(1.0, 0.5), (0.5, 0.25), (0.25, 0.125)]
    for prompt in tiny.PROMPTS[:1]:
        first = rig.answer([prompt])[0][0]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        assert first in logits.topk(3).indices.tolist()
