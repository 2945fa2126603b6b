"""Products by weights in e4m3, stored so or rounded as they are loaded. Compiled on a GPU, interpreted on a CPU, where
PyTorch's own product of e4m3 runs too."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas import launch
from replicas.checkpoints.stored import Floats8, Window
from replicas.config import AdapterLimits, Hardware
from replicas.errors import InvalidConfig
from replicas.kernels import gpu as fused
from replicas.kernels import triton_rows
from replicas.kernels.experts import fp8, on_gpu
from replicas.kernels.experts.fp8 import Weight8
from replicas.kernels.panels import Rows
from replicas.loading.model_files import load_model_config
from replicas.memory import sizing
from tests.adapters import make_adapter
from tests.gpu import fake_cuda, flashinfer_stand_in
from tests.gpu.device_steps import DEVICE
from tests.gpu.test_experts_on_gpu import EXPERTS, PLAIN, by_hand, step
from tests.gpu.test_gpu_engine import SMALL, ask, model, start
from tests.gpu.triton_or_skip import triton_paged
from tests.numerics import quantised, tiny
from tests.unit.tokenizer_folders import byte_level_folder

assert triton_paged  # Triton is here, at least interpreted
PROMPT = list(range(70, 95))
BLOCKS = {"quant_method": "fp8", "weight_block_size": [48, 32], "modules_to_not_convert": ["lm_head", "down_proj"]}
TENSOR = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "down_proj"]}
CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head", "re:.*down_proj"],
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}  # fmt: skip
STORED = {
    "tensor": (TENSOR, quantised.fp8_tensor), "channels": (CHANNELS, quantised.fp8_rows),
    "blocks": (BLOCKS, quantised.fp8_blocks(48, 32)),
}  # fmt: skip


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(fused, "kernels", lambda: triton_rows)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def stored(weight: Tensor, high: int, wide: int) -> tuple[Window, Tensor]:
    """A weight of a checkpoint, and what it stands for."""
    parts, stands_for = quantised.fp8_blocks(high, wide)(weight)
    return Window.of(Floats8(parts["weight"], parts["weight_scale_inv"], (high, wide))), stands_for


def packed(pieces: list[Any], dtype: torch.dtype, *, rounds: bool = False) -> Weight8:
    rows, device = Rows(pieces), torch.device(DEVICE)
    assert fp8.keeps(rows, device, rounds=rounds)
    return fp8.pack(rows, device, dtype)


def apart(made: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    return float((made.float().cpu() - wanted.cpu()).abs().max() / wanted.abs().max())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("high", "wide"), [(128, 128), (48, 32), (1, 272), (1000, 1000)])
def test_a_stored_weight_is_multiplied_as_the_numbers_that_it_stands_for(rows: int, high: int, wide: int) -> None:
    """In fp32, so by Triton, which rounds nothing: two weights of one input, one below the other, and a bias. 272
    inputs fill no block."""
    torch.manual_seed(rows)
    weights = [stored(torch.randn(n, 272), high, wide) for n in (200, 96)]
    weight = packed([piece for piece, _ in weights], torch.float32)
    x, bias = torch.randn(rows, 272), torch.randn(296)
    wanted = x @ torch.cat([floats for _, floats in weights]).T + bias
    assert weight.scales.shape == (296, 1 if wide >= 272 else -(-272 // wide))
    assert not weight.by_torch
    assert apart(on_gpu.multiply(x.to(DEVICE), weight, bias.to(DEVICE)), wanted) < 1e-5
    assert on_gpu.multiply(x[:0].to(DEVICE), weight, None).shape == (0, 296)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("made", ["stored", "rounded"])
def test_pytorch_multiplies_by_rows_with_one_scale_activations_that_one_launch_rounds(made: str) -> None:
    """In bf16: the product of the rounded numbers. Both sides are 2.6 % off on average (three bits, evenly spread), so
    the product is 3.7 % from that of the floats."""
    torch.manual_seed(1)
    weight, bias = torch.randn(96, 272), torch.randn(96).bfloat16()
    x = torch.randn(9, 300).bfloat16()[:, :272]  # rows a stride apart
    x[3] = 0.0
    piece, floats = stored(weight, 1, 272)
    eights = packed([piece] if made == "stored" else [weight], torch.bfloat16, rounds=made == "rounded")
    assert eights.by_torch
    numbers, scales = fp8.quantise(x.to(DEVICE))
    assert float(numbers.float().abs().amax(1).max()) == fp8.LARGEST
    assert numbers.float().isfinite().all()
    rounded = (numbers.float() * scales).cpu()
    assert apart(rounded, x.float()) < 0.04
    as_stored = (eights.numbers.float() * eights.scales).cpu()
    assert apart(as_stored, floats) < 1e-6
    got = on_gpu.multiply(x.to(DEVICE), eights, bias.to(DEVICE))
    assert got.dtype == torch.bfloat16
    assert apart(got, rounded @ as_stored.T + bias.float()) < 6e-3
    plain = x.float() @ weight.T + bias.float()
    assert 0.03 < float((got.float().cpu() - plain).norm() / plain.norm()) < 0.045


@pytest.mark.usefixtures("interpreted")
def test_sizes_that_pytorch_does_not_take_are_tritons() -> None:
    """90 outputs are no multiple of 16; in fp16, whose products the interpreter knows."""
    assert not packed([torch.randn(90, 272)], torch.bfloat16, rounds=True).by_torch
    odd, x = packed([torch.randn(90, 272)], torch.float16, rounds=True), torch.randn(40, 272).half()
    wanted = x.float() @ (odd.numbers.float() * odd.scales).cpu().T
    assert apart(on_gpu.multiply(x.to(DEVICE), odd, None), wanted) < 1e-3


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dim", [0, 1], ids=["outputs", "inputs"])
def test_ranks_cut_scales_with_the_weights(dim: int) -> None:
    """Three ranks of 64 rows or 64 inputs, where a block has 48 x 128: the second one begins within a block."""
    torch.manual_seed(2)
    whole, floats = stored(torch.randn(192, 192), 48, 128)
    x, made = torch.randn(5, 192), list[Tensor]()
    for rank in range(3):
        weight = packed([whole.narrow(dim, 64 * rank, 64)], torch.float32)
        own = x if dim == 0 else x[:, 64 * rank : 64 * rank + 64]
        made.append(on_gpu.multiply(own.contiguous().to(DEVICE), weight, None))
    assert apart(torch.cat(made, 1) if dim == 0 else sum(made[1:], made[0]), x @ floats.T) < 1e-5


@pytest.mark.usefixtures("interpreted")
def test_a_cut_that_is_too_fine_is_widened_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    fp8._tell.cache_clear()
    whole, _ = stored(torch.randn(16, 256), 16, 128)
    assert not fp8.keeps(Rows([whole.narrow(1, 8, 200)]), torch.device(DEVICE), rounds=False)
    assert "weights: some are widened from fp8, which need ranks that cut" in caplog.text
    assert not fp8.keeps(Rows([whole, torch.randn(16, 256)]), torch.device(DEVICE), rounds=False), "as it was stored"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("blocks", [(32, 16), (1, 128)])
def test_experts_in_8_bits_are_those_of_their_numbers(blocks: tuple[int, int]) -> None:
    x, ids, weights, *plain = step(20, torch.float32)
    eights, floats = list[Weight8](), list[Tensor]()
    for each in plain:
        made = [stored(expert.cpu(), *blocks) for expert in each]
        parts = [packed([piece], torch.float32) for piece, _ in made]
        stacked = [torch.stack([getattr(part, name) for part in parts]) for name in ("numbers", "scales")]
        eights.append(Weight8(*stacked, parts[0].wide, torch.float32))
        floats.append(torch.stack([whole for _, whole in made]).to(DEVICE))
    assert len(eights[0].numbers) == EXPERTS
    gate_up, down = eights
    got = on_gpu.gated_experts(x, ids, weights, gate_up, down, PLAIN)
    assert apart(got, by_hand(x, ids, weights, floats[0], floats[1])) < 1e-5


def answers(engine: Any, ref: Any = None) -> list[int]:
    made: list[int] = []
    assert engine.submit(replace(ask("a", PROMPT, max_new_tokens=3), adapter=ref)) == []
    while engine.open_rids:
        for delta in engine.step():
            made += delta.token_ids
            assert delta.finish is None or delta.finish.message is None, delta.finish
    return made


@pytest.mark.parametrize("kind", STORED)
def test_an_engine_keeps_a_stored_checkpoint_in_8_bits_and_answers_as_it_stands_adapters_too(
    kind: str, tmp_path: Path, gpu: fake_cuda.FakeCuda | None
) -> None:
    """In fp32, where no activation is rounded. What the method left out, ``down_proj``, stays a float."""
    from peft import PeftModel

    config, quantise = STORED[kind]
    folder = tmp_path / "model"
    byte_level_folder(folder)
    reference = quantised.save(folder, config, quantise, **SMALL)
    wanted = tiny.reference(reference, PROMPT, 3)[1]
    engine = start(str(folder), dtype="float32", cuda_graphs=False, adapters=AdapterLimits(max_rank=20))
    runner = engine.steps.launch.__self__.runner  # type: ignore[attr-defined]
    block = runner._model.blocks[0]
    for product in (block.attn.qkv, block.attn.o_proj, block.mlp.gate_up):
        weight = product.matmul.weight
        assert isinstance(weight, Weight8)
        assert weight.numbers.element_size() == 1
    assert isinstance(block.mlp.down.matmul.weight, Tensor)
    assert engine.config.model.stored.products == "fp8"
    assert "multiplied as they are (fp8)" in engine.config.model.describe_weights()
    assert answers(engine) == wanted
    if kind == "blocks":
        ref = make_adapter(tmp_path / "adapter", folder, rank=16, seed=1, targets=("q_proj", "o_proj"), size=0.5)
        merged = PeftModel.from_pretrained(reference, ref.path).merge_and_unload()
        assert answers(engine, ref) == tiny.reference(merged, PROMPT, 3)[1]
    engine.close()


@pytest.mark.parametrize(("kind", "dtype"), [("llama", "bfloat16"), ("qwen3-moe", "float16")])
def test_an_engine_rounds_a_plain_model_where_it_is_told_to(
    kind: str, dtype: Any, tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From graphs, in bf16 by PyTorch's product, in fp16 by Triton's. The logit of the first token is near the model's
    own best, of which 95 % are 3 less."""
    if gpu is not None:
        flashinfer_stand_in.install(monkeypatch)  # in bf16 an interpreted product of attention is nonsense
    byte_level_folder(tmp_path)
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "head_dim": 64}
    reference = tiny.save(kind, tmp_path, **shape)
    multiply, calls = torch._scaled_mm, list[torch.dtype]()

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append(args[0].dtype)
        return multiply(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    engine = start(str(tmp_path), dtype=dtype, quantization="fp8", scheduler={"max_running_requests": 1})
    assert set(calls) == ({fp8.E4M3} if dtype == "bfloat16" else set())
    compiled = set(gpu.programs) if gpu is not None else set()
    runner = engine.steps.launch.__self__.runner  # type: ignore[attr-defined]
    if kind == "qwen3-moe":
        assert runner._model.blocks[0].mlp.gate_up.weight.numbers.dtype == fp8.E4M3
    held, plain = runner.weight_bytes, sizing.weight_bytes(replace(engine.config.model, quantization="none"), 1)
    assert held < 0.8 * plain
    assert sizing.weight_bytes(engine.config.model, 1) < 0.8 * plain
    with torch.inference_mode():
        logits = reference(torch.tensor([PROMPT])).logits[0, -1]
    assert float(logits.max() - logits[answers(engine)[0]]) < 0.4
    assert float(logits.max() - logits.quantile(0.05)) > 3.0
    assert gpu is None or gpu.programs == compiled, "a program was compiled while requests waited"
    engine.close()


def test_a_gpu_without_e4m3_widens_what_is_stored_and_refuses_to_round(
    tmp_path: Path, gpu: fake_cuda.FakeCuda | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fp8._tell.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(InvalidConfig, match="quantization: fp8 needs a GPU that has e4m3"):
        start(model(tmp_path / "plain"), dtype="float32", quantization="fp8")
    piece, floats = stored(torch.randn(32, 64), 32, 32)
    from replicas.layers.linear import loaded_on_gpu

    made = loaded_on_gpu(Rows([piece]), torch.device("cuda", 0), torch.float32, rounds=False)
    assert isinstance(made, Tensor)
    assert apart(made, floats) < 1e-6
    assert "widened from fp8, which need a GPU that has e4m3" in caplog.text


@pytest.mark.parametrize(("device", "products"), [("cuda", "fp8"), ("cpu", None)])
def test_a_cpu_widens_as_it_did_and_a_gpu_counts_a_byte(device: Any, products: str | None, tmp_path: Path) -> None:
    quantised.save(tmp_path, BLOCKS, quantised.fp8_blocks(48, 32))
    config = load_model_config(str(tmp_path), device=device, dtype="bfloat16" if device == "cuda" else None)
    assert config.stored is not None
    assert config.stored.products == products
    assert config.weight_number_bytes == ((1, 2) if device == "cuda" else (4, 4))


def test_a_gpu_widens_e5m2_and_counts_two_bytes(tmp_path: Path) -> None:
    def wide(weight: Tensor) -> quantised.Made:
        numbers = weight.to(torch.float8_e5m2)
        return {"weight": numbers, "weight_scale": torch.ones(1)}, numbers.float()

    quantised.save(tmp_path, TENSOR, wide)
    config = load_model_config(str(tmp_path), device="cuda", dtype="bfloat16")
    assert config.stored is not None
    assert config.stored.products is None
    assert config.weight_number_bytes == (2, 2)


def test_fp8_is_refused_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Hardware(device="cpu", num_cpus=1, available_memory_bytes=1 << 30)
    monkeypatch.setattr(launch, "measure_hardware", lambda: cpu)
    with pytest.raises(InvalidConfig, match="quantization = 'fp8' on cpu: such products are made on a GPU alone"):
        start(model(tmp_path), quantization="fp8")
