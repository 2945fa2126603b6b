"""Attention by Double Sparsity: the pool's labels, the choice of tokens, engines, calibration (C04)."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from replicas.attention.double_sparse import DoubleSparseAttention, attend_to, choose
from replicas.attention.torch_native import PLAIN, TorchNativeAttention, attend
from replicas.calibrate import ChannelWeights, main, prompt_meta
from replicas.config import CacheConfig, Hardware, ModelConfig, SchedulerConfig
from replicas.engine.engine import Engine
from replicas.errors import InvalidConfig
from replicas.launch import EngineSettings, load_engine, port_spec
from replicas.loading.model_files import load_model_config
from replicas.memory.sparse_pool import DoubleSparseTokenToKVPool, read_channels
from replicas.resolve import resolve
from tests.attention_steps import make_step
from tests.embedded import MODEL
from tests.harness import ask, finish_all
from tests.numerics import tiny

TEXT = "the quick brown fox jumps over the lazy dog, and then it rests a while under a tree by the river. " * 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, and the channels that the command finds for it."""
    made = tmp_path_factory.mktemp("sparse")
    tiny.save("llama", made, vocab_size=49_152)  # the embedded model's, whose tokenizer it has
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL) / name, made)
    text = made / "text.txt"
    text.write_text(TEXT)
    assert main([str(made), str(text), "--channels", "4", "--out", str(made / "channels.json")]) == 0
    return made


def engine(folder: Path, num_tokens: int | None, *, chunk: int = 512, page_size: int = 4) -> Engine:
    """Without ``num_tokens``: of plain attention."""
    cache = CacheConfig(page_size=page_size, max_total_tokens=1024, device_memory_bytes=1 << 28)
    if num_tokens is not None:
        cache = replace(cache, label_channels=str(folder / "channels.json"), sparse_tokens=num_tokens)
    attention = "torch_native" if num_tokens is None else "double_sparse"
    scheduler = SchedulerConfig(chunked_prefill_size=chunk)
    return load_engine(
        EngineSettings(model=str(folder), cache=cache, scheduler=scheduler, attention=attention, num_threads=1)
    )


def answers(made: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """The answers of 12 tokens, one after the other."""
    found = []
    for number, prompt in enumerate(prompts):
        made.submit(ask(f"{number}", prompt, max_new_tokens=12))
        found.append([token for delta in finish_all(made) for token in delta.token_ids])
    made.kv.check([])
    return found


LONG = [(7 * i) % 101 for i in range(60)]


def test_with_as_many_tokens_as_there_are_it_is_exact(folder: Path) -> None:
    sparse, plain = engine(folder, 128), engine(folder, None)
    assert answers(sparse, [LONG, LONG[:9]]) == answers(plain, [LONG, LONG[:9]])


def test_a_decoding_token_reads_no_k_and_v_but_what_each_head_has_chosen() -> None:
    """SPEC C04: the rest of the pool is NaN, which anything that reads it becomes. 4 query heads, 2 of K and V."""
    torch.manual_seed(5)
    channels = torch.tensor([[[0, 3, 5], [1, 2, 7]]])
    pool = DoubleSparseTokenToKVPool(16, 4, channels, 8, torch.float32, "cpu")
    slots = torch.randperm(60)[:50] + 4
    keys, values, q = torch.randn(50, 2, 8), torch.randn(50, 2, 8), torch.randn(1, 4, 8)
    pool.set_kv_buffer(0, slots, keys, values)
    chosen = choose(q, pool.label_buffer[0, slots], channels[0], 6)
    wanted = attend_to(q, keys, values, chosen)
    for kv_head in range(2):
        idle = slots[~chosen[2 * kv_head : 2 * kv_head + 2, 0].any(dim=0)]
        for buffer in (pool.get_key_buffer(0), pool.get_value_buffer(0)):
            buffer[idle // 4, kv_head, idle % 4] = torch.nan
    made = DoubleSparseAttention(pool, num_tokens=6).attended(0, q, slots, PLAIN, None)
    torch.testing.assert_close(made, wanted)


def test_with_fewer_a_long_prompt_gets_another_answer_and_a_short_one_the_same(folder: Path) -> None:
    sparse, plain = engine(folder, 21), engine(folder, None)
    short, of_long = answers(sparse, [LONG[:9], LONG])
    exact_short, exact_long = answers(plain, [LONG[:9], LONG])
    assert short == exact_short  # 9 + 12 tokens
    assert of_long != exact_long


def test_hit_and_miss_chunked_and_whole_answer_the_same(folder: Path) -> None:
    """Same answer: what a token attends to depends on the tokens before it alone."""
    whole = answers(engine(folder, 16), [LONG])[0]
    assert answers(engine(folder, 16, chunk=8), [LONG])[0] == whole
    again = engine(folder, 16)
    assert answers(again, [LONG[:40], LONG, LONG])[1:] == [whole, whole]
    assert again.scheduler.counters["cached_tokens"] > 36


def sparse_copy(step_pool: object, channels: torch.Tensor) -> DoubleSparseTokenToKVPool:
    data = step_pool.buffer  # type: ignore[attr-defined]
    made = DoubleSparseTokenToKVPool(len(data) - 1, data.shape[4], channels, data.shape[5], torch.float32, "cpu")
    made.write_pages(list(range(len(data))), data)
    return made


def test_the_backend_attends_to_the_tokens_of_highest_label_score() -> None:
    """Against the definition, token by token: 9 query heads over 3 KV heads, requests that extend and decode."""
    step = make_step([(40, 3), (17, 1), (3, 4)], kv_dtype="float32", head_dim=16)
    channels = torch.tensor([[[0, 3, 5, 9], [1, 2, 3, 4], [12, 13, 14, 15]]])
    pool = sparse_copy(step.pool, channels)
    backend = DoubleSparseAttention(pool, num_tokens=8)
    backend.begin(step.batch)
    found = backend.forward(0, step.q, step.k, step.v).view(-1, 9, 16)
    at = 0
    for row, (prefix, new) in zip(step.batch.rows.tolist(), [(40, 3), (17, 1), (3, 4)], strict=True):
        for position in range(prefix, prefix + new):
            k, v = pool.read_kv(0, step.batch.table[row, : position + 1].long())
            for head in range(9):
                kv, q = head // 3, step.q[at, head]
                best = (k[:, kv, channels[0, kv]] @ q[channels[0, kv]]).topk(min(8, position + 1)).indices
                weights = (k[best, kv] @ q / 4.0).softmax(0)
                assert torch.allclose(found[at, head], weights @ v[best, kv], atol=1e-5)
            at += 1
    plain = TorchNativeAttention(pool)
    plain.begin(step.batch)
    assert not torch.allclose(found.flatten(1), plain.forward(0, step.q, step.k, step.v), atol=1e-2)


def test_labels_are_the_keys_at_their_channels_whoever_wrote_them() -> None:
    random = torch.Generator().manual_seed(0)
    channels = torch.randint(0, 8, (2, 3, 4), generator=random)
    here, there, pages = (DoubleSparseTokenToKVPool(6, 4, channels, 8, torch.bfloat16, "cpu") for _ in range(3))
    slots = torch.tensor([5, 9, 23, 4])
    for layer in range(2):
        here.set_kv_buffer(layer, slots, *torch.randn(2, 4, 3, 8, generator=random))
    there.write_slots(slots.numpy().astype(np.int32), here.read_slots(slots.numpy().astype(np.int32)))
    pages.write_pages([1, 2, 5], here.read_pages([1, 2, 5]))
    for pool in (here, there, pages):
        for layer in range(2):
            keys = pool.read_kv(layer, slots)[0].float()
            assert keys.abs().sum() > 0
            for i, slot in enumerate(slots.tolist()):
                for head in range(3):
                    wanted = keys[i, head, channels[layer, head]]
                    assert torch.equal(pool.label_buffer[layer, slot, head], wanted)
    here.give_back()
    assert not here.label_buffer.any()


def test_every_token_chooses_as_many_as_it_may() -> None:
    q, labels = torch.randn(5, 4, 8), torch.randn(9, 2, 3)
    chosen = choose(q, labels, torch.tensor([[0, 1, 2], [5, 6, 7]]), 6)
    assert chosen.shape == (4, 5, 9)
    assert chosen.sum(-1).tolist() == [[5, 6, 6, 6, 6]] * 4
    assert not any(chosen[:, row, 5 + row :].any() for row in range(4))  # nothing that comes later
    k, v = torch.randn(2, 9, 2, 8)
    everything = choose(q, labels, torch.tensor([[0, 1, 2], [5, 6, 7]]), 9)
    assert torch.allclose(attend_to(q, k, v, everything), attend(q, k, v), atol=1e-6)


def test_the_heaviest_channels_are_those_of_the_largest_products() -> None:
    """Over all pairs of a token and one before it or itself, query heads of a KV head summed."""
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(6, 4, 8, generator=random), *torch.randn(2, 6, 2, 8, generator=random)
    found = ChannelWeights(1)
    found.begin(prompt_meta(6))
    found.forward(0, q, k, v)
    by_hand = torch.zeros(2, 8)
    for t in range(6):
        for s in range(t + 1):
            for head in range(4):
                by_hand[head // 2] += (q[t, head] * k[s, head // 2]).abs()
    assert found.sums[0] is not None
    assert torch.allclose(found.sums[0], by_hand, rtol=1e-5)
    assert found.heaviest(3)[0].tolist() == by_hand.topk(3).indices.sort().values.tolist()


def test_the_pool_counts_its_labels(folder: Path) -> None:
    """3 layers x 2 KV heads x (2 x 16 numbers and 4 of the label) x 4 bytes."""
    model = load_model_config(str(folder), device="cpu")
    assert model.kv_cell_bytes(tp=1, kv_dtype="float32") == 3 * 2 * 32 * 4
    limited = CacheConfig(device_memory_bytes=32 << 20, mem_fraction_static=1.0)
    plain = load_engine(EngineSettings(model=str(folder), cache=limited, attention="torch_native", num_threads=1))
    labelled = replace(limited, label_channels=str(folder / "channels.json"))
    sparse = load_engine(EngineSettings(model=str(folder), cache=labelled, attention="double_sparse", num_threads=1))
    assert sparse.kv.store.stats().total_tokens == pytest.approx(plain.kv.store.stats().total_tokens * 32 / 36, abs=16)


HARDWARE = Hardware(device="cpu", num_cpus=1, available_memory_bytes=1 << 30)


@pytest.mark.parametrize(
    ("cache", "attention", "why"),
    [
        (CacheConfig(), "double_sparse", "without cache.label_channels: make the file with"),
        (CacheConfig(label_channels="x"), "auto", "cache.label_channels without attention: double_sparse"),
        (CacheConfig(label_channels="x", host_memory_bytes=1 << 20), "double_sparse", "pages come back without labels"),
        (CacheConfig(label_channels="x", kv_dtype="int8"), "double_sparse", "kv_dtype = 'int8'; allowed: float32"),
        (CacheConfig(label_channels="x", sparse_tokens=0), "double_sparse", "cache.sparse_tokens = 0; allowed: 1"),
    ],
)
def test_what_labels_cannot_go_with_is_refused_by_name(
    folder: Path, cache: CacheConfig, attention: str, why: str
) -> None:
    model = load_model_config(str(folder), device="cpu")
    with pytest.raises(InvalidConfig, match=why):
        resolve(model, HARDWARE, cache=cache, attention=attention)  # type: ignore[arg-type]


def test_a_kv_transfer_is_refused(folder: Path) -> None:
    model = load_model_config(str(folder), device="cpu")
    config = resolve(model, HARDWARE, cache=CacheConfig(label_channels="x"), attention="double_sparse")
    with pytest.raises(InvalidConfig, match="double_sparse' with KV transfers: pages arrive without labels"):
        port_spec(config, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("{}", "cannot be read"),
        (json.dumps({"channels": [[[1]]]}), r"has channels \(1, 1, 1\); this model has 3 layers and 2 KV heads of 16"),
        (json.dumps({"channels": [[[16]] * 2] * 3}), "make it anew"),
    ],
)
def test_a_file_of_another_model_is_refused(folder: Path, tmp_path: Path, text: str, why: str) -> None:
    model: ModelConfig = load_model_config(str(folder), device="cpu")
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(InvalidConfig, match=why):
        read_channels(tmp_path / "bad.json", model)
