"""Models whose tokens attend to those alone that an index chose: Transformers' ids on every path of a request.

Tiny random models, with an index that chooses 8 tokens of texts several times as long. It has 32 heads, so that no
scores are equal, among which Transformers' choice depends on the length of the text. The oracle is Transformers in fp32
with eager attention, the whole text at once and without a cache.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replicas.config import CacheConfig, Hardware
from replicas.engine.engine import Engine
from replicas.errors import InvalidConfig
from replicas.loading.model_files import load_model_config
from replicas.resolve import resolve
from tests.harness import small_engine
from tests.numerics.paged import assert_close_in_range, open_model
from tests.numerics.test_states import (
    Saved,
    asked,
    check_many_at_once,
    finished,
    ids_of,
    moved,
    saved_model,
    saved_models,
)
from tests.numerics.tiny import assert_greedy, uncached

PLAIN, SHARED = "deepseek_v32", "glm_moe_dsa"  # run natively, the others through Transformers
OUTLINED = "axk2"
TEXT = [3 + (i * i + 7 * i) % 190 for i in range(60)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    return saved_models(tmp_path_factory, **{SHARED: {"indexer_types": ["full", "shared", "shared", "full"]}})


def engine_of(folder: Path, *, tokens: int = 2048, page: int = 4, chunk: int = 7, host_bytes: int = 0) -> Engine:
    return small_engine(
        folder, page=page, tokens=tokens, chunk=chunk, running=12, scheduler={"new_token_ratio": 0.1},
        cache={"host_memory_bytes": host_bytes, "write_policy": "write_back"},
    )  # fmt: skip


@pytest.mark.parametrize("model_type", [PLAIN, SHARED, OUTLINED, "hy_v4", "dots3_note_text"])
def test_a_text_far_longer_than_the_index_chooses_reads_the_same_however_it_is_cut(
    models: Callable[[str], Saved], model_type: str
) -> None:
    folder, model = models(model_type)
    texts = [TEXT, [7], TEXT[20:29]]
    for chunk, page_size in ((1, 4), (5, 1), (100, 16)):
        served = open_model(folder, page_size=page_size)
        for text, ours in zip(texts, served.prefill(texts, chunk=chunk), strict=True):
            assert_close_in_range(ours, uncached(model, text), 1e-4)
    served.lens = [0] * len(served.lens)
    answers = served.greedy(texts, 24, chunk=9)
    for text, answer in zip(texts, answers, strict=True):
        assert_greedy(model, text, answer)


def test_the_index_does_leave_tokens_out(models: Callable[[str], Saved]) -> None:
    folder, model = models(PLAIN)
    (ours,) = open_model(folder).prefill([TEXT], chunk=16)
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = len(TEXT)
    whole = uncached(model, TEXT)
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 8
    assert_close_in_range(ours[:8], whole[:8], 1e-4)
    assert (ours[20:] - whole[20:]).abs().max() > 0.01 * (whole.max() - whole.min())


@pytest.mark.parametrize("model_type", [PLAIN, OUTLINED])
def test_of_tokens_whose_scores_are_zero_the_last_are_chosen_however_a_text_is_cut(
    tmp_path: Path, model_type: str
) -> None:
    model = saved_model(model_type, tmp_path)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.indexer.weights_proj.weight.zero_()
    model.save_pretrained(tmp_path)
    whole, *others = (open_model(tmp_path).prefill([TEXT], chunk=chunk)[0] for chunk in (100, 1, 7))
    for ours in others:
        assert_close_in_range(ours, whole, 1e-4)
    (shorter,) = open_model(tmp_path).prefill([[9, *TEXT[1:]]], chunk=100)
    # four layers of a window of 8: what is further back than all of them can carry is not seen
    assert_close_in_range(shorter[4 * 7 + 1 :] , whole[4 * 7 + 1 :], 1e-1)


@pytest.mark.parametrize("model_type", [PLAIN, OUTLINED])
def test_many_requests_at_once_get_the_ids_of_transformers(models: Callable[[str], Saved], model_type: str) -> None:
    folder, model = models(model_type)
    check_many_at_once(engine_of(folder, tokens=160), model)


@pytest.mark.parametrize(
    ("model_type", "page", "host_bytes"),
    [(PLAIN, 1, 0), (OUTLINED, 16, 0), (PLAIN, 4, 8 << 20), (OUTLINED, 4, 8 << 20)],
)
def test_conversations_go_on_behind_pages_that_stayed_or_came_back_from_the_host(
    models: Callable[[str], Saved], model_type: str, page: int, host_bytes: int
) -> None:
    """Five at once; with a host tier the pool holds a part of them."""
    folder, model = models(model_type)
    engine = engine_of(folder, tokens=160 if host_bytes else 512, page=page, host_bytes=host_bytes)
    texts, cached, prompted = {f"r{i}": TEXT[5 * i : 40 + 5 * i] for i in range(5)}, 0, 0
    try:
        for turn in range(3):
            for rid, text in texts.items():
                engine.submit(asked(rid, text, 9))
            deltas = finished(engine)
            for rid, text in texts.items():
                answer = ids_of(deltas, rid)
                assert_greedy(model, text, answer)
                (usage,) = [each.usage for each in deltas if each.rid == rid and each.finish is not None]
                cached, prompted = cached + usage.cached_tokens, prompted + len(text) * (turn > 0)
                texts[rid] = [*text, *answer, 5, 6 + turn]
        engine.scheduler.check()
        if host_bytes:
            assert engine.stats().tiers.host_hit_tokens > 0
    finally:
        engine.close()
    assert cached > 0.5 * prompted


@pytest.mark.parametrize("model_type", [SHARED, OUTLINED])
def test_a_request_that_moves_takes_its_keys_with_it(models: Callable[[str], Saved], model_type: str) -> None:
    """To an engine with other pages, in the middle of its answer."""
    folder, model = models(model_type)
    num_tokens, answer = moved(engine_of(folder), engine_of(folder, page=8), TEXT)
    assert num_tokens >= 64
    assert len(answer) == 20
    assert_greedy(model, TEXT, answer)


def test_what_the_keys_take_is_counted_and_what_does_not_carry_them_is_refused(models: Callable[[str], Saved]) -> None:
    """Natively a key of 16 numbers follows the latent vector of 16 + 8; else it takes one of the 8 vectors of 24 that a
    layer of 4 heads has."""
    config, native = (load_model_config(str(models(each)[0])) for each in (OUTLINED, PLAIN))
    assert native.kv_cell_bytes(tp=2, kv_dtype="float32") == 4 * (16 + 8 + 16) * 4
    assert (config.num_layers, len(config.indexes), config.index_dim, config.kept_layers) == (4, 4, 16, 5)
    assert config.kv_cell_bytes(tp=1, kv_dtype="float32") == 5 * 2 * 4 * 24 * 4
    machine = Hardware(device="cpu", num_cpus=1, available_memory_bytes=8 << 30)
    for settings, said in (
        ({"cache": CacheConfig(kv_dtype="int8")}, "whose index keeps keys beside K and V: these have no scales"),
        ({"attention": "cpu"}, "serves no attention with indexed"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            resolve(config, machine, **settings)  # type: ignore[arg-type]
