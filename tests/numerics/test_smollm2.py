"""The embedded model: what Transformers makes of its folder, and that we make the same of it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from replicas.config import Quantization
from replicas.loading.weights import weight_bytes
from tests.numerics import tiny
from tests.numerics.paged import SMOLLM2, PagedModel, assert_as_transformers, open_model

pytestmark = pytest.mark.model
GOLDEN = (
    " with a quick brown bear.\n\nThe original sentence is a classic example of a homophone fallacy, where two words"
)
TEXTS = [
    "The quick brown fox",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "<|im_start|>user\nName the largest planet.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    if not (SMOLLM2 / "manifest.json").is_file():
        pytest.fail(f"{SMOLLM2} is not there: run `make model`", pytrace=False)
    return SMOLLM2


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def transformers_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [tokenizer(text).input_ids for text in TEXTS]


def test_transformers_says_the_golden_text(
    tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], transformers_model: PreTrainedModel
) -> None:
    """Q and K in the wrong rotary order, or a wrong scale, would not say this sentence."""
    ids = tokenizer(TEXTS[0] + GOLDEN).input_ids
    assert ids[: len(prompts[0])] == prompts[0]
    tiny.assert_greedy(transformers_model, prompts[0], ids[len(prompts[0]) :])


@pytest.mark.parametrize("attention", ["torch_native", "cpu"])
def test_logits_and_64_greedy_tokens_are_those_of_transformers(
    folder: Path, prompts: list[list[int]], transformers_model: PreTrainedModel, attention: str
) -> None:
    """Three prompts packed, 7 tokens at a time, then decoded together through pages of 16."""
    first, second = (open_model(folder, page_size=16, num_pages=32, attention=attention) for _ in range(2))
    logits, answers = first.prefill(prompts, chunk=7), second.greedy(prompts, 64, chunk=7)
    assert_as_transformers(transformers_model, prompts, logits, answers)


def test_int4_says_the_same_to_the_last_bit(folder: Path, prompts: list[list[int]]) -> None:
    """The file was made of 4-bit numbers, and of 8-bit ones in the embedding: nothing is rounded anew."""

    def opened(quantization: Quantization) -> PagedModel:
        return open_model(folder, page_size=16, num_pages=32, attention="cpu", quantization=quantization)

    floats, int4 = opened("none"), opened("int4")
    exact = floats.prefill(prompts, chunk=9)
    assert all(map(torch.equal, int4.prefill(prompts, chunk=9), exact))
    for _ in range(8):
        new = {row: [int(logits[-1].argmax())] for row, logits in enumerate(exact)}
        exact = list(floats.run(new).values())
        assert all(map(torch.equal, int4.run(new).values(), exact))
    assert weight_bytes(int4.model) < 0.22 * weight_bytes(floats.model)


def test_the_embedding_stays_a_view_of_the_file(folder: Path) -> None:
    """Replicas on one host share its pages: 113 of 538 MB."""
    embedding = open_model(folder, num_pages=1).model.embed
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    assert embedding.weight is not None
    assert any(low <= embedding.weight.data_ptr() < high for low, high in spans)
