"""The embedded model: what Transformers makes of its folder, and that we make the same of it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from replicas.config import Quantization
from replicas.loading.weights import weight_bytes
from tests.numerics import tiny
from tests.numerics.paged import SMOLLM2, PagedModel, assert_close_in_range, open_model

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
def wanted(tokenizer: PreTrainedTokenizerBase, transformers_model: PreTrainedModel) -> list[tuple[Tensor, list[int]]]:
    """What Transformers makes of each text: logits of the prompt [L, V] and 64 greedy ids."""
    return [tiny.reference(transformers_model, tokenizer(text).input_ids, 64) for text in TEXTS]


def test_transformers_says_the_golden_text(
    tokenizer: PreTrainedTokenizerBase, wanted: list[tuple[Tensor, list[int]]]
) -> None:
    """Q and K in the wrong rotary order, or a wrong scale, would not say this sentence."""
    assert tokenizer.decode(wanted[0][1][:24]) == GOLDEN


@pytest.mark.parametrize("attention", ["torch_native", "cpu"])
def test_logits_and_64_greedy_tokens_are_those_of_transformers(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    wanted: list[tuple[Tensor, list[int]]],
    attention: str,
) -> None:
    """Three prompts packed, 7 tokens at a time, then decoded together through pages of 16."""
    prompts = [tokenizer(text).input_ids for text in TEXTS]
    first, second = (open_model(folder, page_size=16, num_pages=32, attention=attention) for _ in range(2))
    for ours, (logits, _) in zip(first.prefill(prompts, chunk=7), wanted, strict=True):
        assert_close_in_range(ours, logits, 1e-4)
    assert second.greedy(prompts, 64, chunk=7) == [ids for _, ids in wanted]


def test_int4_says_the_same_to_the_last_bit(
    folder: Path, tokenizer: PreTrainedTokenizerBase, wanted: list[tuple[Tensor, list[int]]]
) -> None:
    """The file was made of 4-bit numbers, and of 8-bit ones in the embedding: nothing is rounded anew."""
    prompts = [tokenizer(text).input_ids for text in TEXTS]

    def opened(quantization: Quantization) -> PagedModel:
        return open_model(folder, page_size=16, num_pages=32, attention="cpu", quantization=quantization)

    floats, int4, again = opened("none"), opened("int4"), opened("int4")
    for ours, exact in zip(int4.prefill(prompts, chunk=9), floats.prefill(prompts, chunk=9), strict=True):
        assert torch.equal(ours, exact)
    for step in range(8):
        new = {row: [ids[step]] for row, (_, ids) in enumerate(wanted)}
        ours, exact = int4.run(new), floats.run(new)
        assert all(torch.equal(ours[row], exact[row]) for row in new)
    assert again.greedy(prompts, 64) == [ids for _, ids in wanted]
    assert weight_bytes(int4.model) < 0.22 * weight_bytes(floats.model)


def test_the_embedding_stays_a_view_of_the_file(folder: Path) -> None:
    """Replicas on one host share its pages: 113 of 538 MB."""
    embedding = open_model(folder, num_pages=1).model.embed
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    assert embedding.weight is not None
    assert any(low <= embedding.weight.data_ptr() < high for low, high in spans)
