"""Hidden states and the logprobs of labels are Transformers' own, in one chunk or many, cached or not, on one rank or
two."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from replicas.engine.engine import Engine
from replicas.types import GenerateRequest, PoolingParams, SamplingParams, TokenDelta, TokenIds
from tests.embedded import MODEL, short_model
from tests.harness import finish_all, small_engine
from tests.numerics import tiny

IDS = np.arange(1000, 1090, dtype=np.int32)  # 90 tokens: three chunks of 32
LABELS = (504, 28, 7)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = small_engine(short_model(), chunk=32, context=512)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(short_model(), dtype=torch.float32).eval()


def request_of(rid: str, ids: TokenIds, **pooling: object) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, pooling=PoolingParams(**pooling))  # type: ignore[arg-type]
    return GenerateRequest(rid=rid, token_ids=ids, sampling=sampling, return_logprobs=True)


def read(engine: Engine, *requests: GenerateRequest) -> dict[str, TokenDelta]:
    for request in requests:
        engine.submit(request)
    return {delta.rid: delta for delta in finish_all(engine)}


def hidden(delta: TokenDelta) -> np.ndarray:
    return np.array(delta.logprobs[0].hidden)


@pytest.mark.model
def test_what_is_read_out_is_transformers_own(engine: Engine, oracle: PreTrainedModel) -> None:
    """Also where others run in the same steps, and where a prompt was cached before: all but its mean."""
    with torch.no_grad():
        out = oracle(torch.from_numpy(IDS)[None].long(), output_hidden_states=True)
    states = out.hidden_states[-1][0].numpy()  # behind the last norm
    logprobs = out.logits[0, -1].log_softmax(-1)[list(LABELS)].numpy()
    for turn in range(2):
        found = read(
            engine,
            request_of("last", IDS, method="last"),
            request_of("mean", IDS, method="mean"),
            request_of("short", IDS[:5], method="mean"),
            request_of("labels", IDS, labels=LABELS),
        )
        assert found["mean"].usage.cached_tokens == 0
        assert (found["last"].usage.cached_tokens >= 64) == bool(turn)  # whole pages of 16
        assert np.abs(hidden(found["mean"]) - states.mean(axis=0)).max() < 1e-4
        assert np.abs(hidden(found["short"]) - states[:5].mean(axis=0)).max() < 1e-4
        assert np.abs(hidden(found["last"]) - states[-1]).max() < 1e-4
        ids, values = zip(*found["labels"].logprobs[0].top, strict=True)
        assert ids == LABELS
        assert np.abs(np.array(values) - logprobs).max() < 1e-4
    engine.kv.check([])


@pytest.mark.model
def test_two_ranks_and_any_chunks_read_the_same_out(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # which one does not matter
        shutil.copy(Path(MODEL) / name, tmp_path / "llama")
    ids = np.arange(1, 60, dtype=np.int32)
    found = []
    for chunk, tp in ((64, 1), (16, 1), (16, 2)):
        engine = small_engine(tmp_path / "llama", chunk=chunk, tp=tp, context=128)
        try:
            deltas = read(engine, request_of("a", ids, method="mean"), request_of("b", ids, method="last"))
        finally:
            engine.close()
        found.append(np.stack([hidden(deltas["a"]), hidden(deltas["b"])]))
    for other in found[1:]:
        assert np.abs(other - found[0]).max() < 1e-4
