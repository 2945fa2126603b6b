"""What a GPU's rank leaves beside the KV pool, in bytes that can be worked out by hand."""

from dataclasses import replace

import pytest

from replicas.attention.workspace import attention_bytes, workspace_bytes
from replicas.config import (
    CacheConfig,
    EngineConfig,
    Hardware,
    ModelConfig,
    RopeConfig,
    SchedulerConfig,
    StateLayer,
    StateTensor,
)
from replicas.resolve import resolve
from replicas.runner import set_aside

LLAMA_70B = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128}
SMALL = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}


def test_a_small_models_workspace_is_flashinfers_own_default() -> None:
    assert workspace_bytes(**SMALL, graph_rows=256, num_sms=132) == 128 << 20


@pytest.mark.parametrize(
    ("graph_rows", "num_sms", "wanted"),
    [
        (256, 132, 64 * (128 + 255) * 16 * 129 * 4),  # 8 heads a group: ceil(256 x 8 / 16) + 255 tiles of 16; 202 MB
        (0, 132, 64 * 33 * 128 * 129 * 4),  # a prompt's: 264 programs for 8 KV heads are 33 tiles of 128; 139 MB
    ],
)
def test_many_heads_need_more(graph_rows: int, num_sms: int, wanted: int) -> None:
    made = workspace_bytes(**LLAMA_70B, graph_rows=graph_rows, num_sms=num_sms)
    assert wanted <= made <= wanted + 4096


def test_flashinfer_takes_its_workspace_integers_of_three_wrappers_and_the_page_numbers_of_graphs() -> None:
    """256 rows of 8,192 pages, 4 bytes each, are 8 MiB."""
    made = attention_bytes(**SMALL, graph_rows=256, num_sms=132, max_pages=8192)
    assert made == (128 + 3 * 8 + 8) << 20


def config(**changes: object) -> EngineConfig:
    model = ModelConfig(
        path="", architecture="LlamaForCausalLM", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336,
        num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, rms_norm_eps=1e-5, rope=RopeConfig(),
        context_len=131_068, tie_embeddings=False, attention_bias=False, output_bias=False, mlp_bias=False,
        qk_norm=False, eos_ids=(), dtype="bfloat16",
    )  # fmt: skip
    made = resolve(
        model,
        Hardware(device="cuda", num_cpus=1, available_memory_bytes=80 << 30),
        cache=CacheConfig(page_size=16),
        scheduler=SchedulerConfig(max_running_requests=1023),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "num_ranks", "copies"), [("bfloat16", 1, 6), ("bfloat16", 8, 6), ("float32", 8, 12)])
def test_logits_are_set_aside_in_the_models_dtype_and_in_fp32(dtype: str, num_ranks: int, copies: int) -> None:
    """512 rows. Of ranks, rank 0 has all parts and what they are joined to, before it makes fp32 of that."""
    made = config()
    made = replace(made, model=replace(made.model, dtype=dtype))
    assert set_aside.bytes_for_logits(made, num_ranks) == 512 * 128_256 * copies


def test_the_request_table_is_a_number_for_each_row_and_position() -> None:
    """(1,023 + 1) rows of 131,068 + 4 positions of 4 bytes are 512 MiB."""
    assert set_aside.bytes_for_table(config(), 1 << 36, 131_072) == 512 << 20


def test_the_rows_of_the_table_have_whole_pages_before_those_that_carry_states() -> None:
    """A context of 131,068 tokens ends within a page of 16: 131,072 positions, and of a state of 4 bytes one page."""
    tensor = StateTensor(kind="conv", number=0, shape=(1,), exact=True)
    layer = StateLayer(module="", layer=0, tensors=(tensor,), whole=True)
    carried = config(hands_off=True, model=replace(config().model, states=(layer,)))
    assert set_aside.bytes_for_table(carried, 1 << 36, 131_072) == 4 * 1024 * (131_072 + 16 + 4)


def test_only_what_attention_may_choose_is_counted() -> None:
    may, cannot = config(), config(attention="triton")
    assert set_aside.bytes_for_attention(may, 1, num_sms=132) > 128 << 20
    assert set_aside.bytes_for_attention(cannot, 1, num_sms=132) == 0


def test_graphs_are_of_256_rows_at_most_and_none_where_they_are_switched_off() -> None:
    assert set_aside.graph_rows(config()) == 256
    assert set_aside.graph_rows(config(cuda_graphs=False)) == 0
    assert set_aside.graph_rows(replace(config(), attention="torch_native")) == 0
