"""Every family agrees with Transformers in fp32, over a paged pool, whole and in chunks."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from deployments.http.service import adaptable_weights
from deployments.settings.schema import ModelSettings
from replicas.layers.layer import full_name
from replicas.loading.model_files import load_model_config
from replicas.models.llama import Llama
from tests.numerics import tiny
from tests.numerics.paged import assert_as_transformers, open_model

Saved = tuple[Path, PreTrainedModel]


@pytest.fixture(scope="module", params=sorted(tiny.CONFIGS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, tiny.save(request.param, folder)


@pytest.mark.parametrize("attention", ["torch_native", "cpu"])
def test_logits_and_64_greedy_tokens_are_those_of_transformers(saved: Saved, attention: str) -> None:
    """Three prompts packed into each step, prefilled whole or 5 tokens at a time, decoded together (SPEC F15)."""
    folder, model = saved
    for chunk, num_new in ((100, 8), (5, 64)):
        first, second = (open_model(folder, attention=attention) for _ in range(2))
        logits, answers = first.prefill(tiny.PROMPTS, chunk=chunk), second.greedy(tiny.PROMPTS, num_new, chunk=chunk)
        assert_as_transformers(model, tiny.PROMPTS, logits, answers)


@pytest.mark.parametrize("kind", sorted(tiny.CONFIGS | tiny.LATENT_CONFIGS))
def test_what_adapters_can_add_to_is_known_from_the_config_alone(tmp_path: Path, kind: str) -> None:
    """Routers, which have no model, know the very weights, and their shapes, that a replica's model has."""
    tiny.save(kind, tmp_path)
    model = open_model(tmp_path).model
    assert isinstance(model, Llama)
    found = {
        full_name(name, weight): product.share_of(weight, (torch.empty(1, shape[1]), torch.empty(shape[0], 1)))
        for name, product in model.adaptable().items()
        for weight in product.weights_here
        for shape in [product._shapes[full_name(weight, "weight")]]
    }
    shapes = {name: (b.shape[0], a.shape[1]) for name, (a, b) in found.items()}
    assert load_model_config(str(tmp_path), device="cpu").adaptable() == shapes
    assert adaptable_weights(ModelSettings(path=str(tmp_path))) == shapes
    assert adaptable_weights(ModelSettings(path=str(tmp_path), implementation="transformers")) == {}
    if kind in tiny.CONFIGS:
        transformers = load_model_config(str(tmp_path), device="cpu", implementation="transformers")
        assert transformers.adaptable() == {}


def test_only_the_wanted_rows_get_logits(tmp_path: Path) -> None:
    tiny.save("llama", tmp_path)
    new = {0: [5, 6, 7], 1: [8, 9]}  # packed tokens 0 1 2 | 3 4
    whole = torch.cat(list(open_model(tmp_path).run(new).values()))
    paged = open_model(tmp_path)
    last = paged.model.forward(*paged.pack(new), torch.tensor([2, 4]))
    torch.testing.assert_close(last, whole[[2, 4]])
    paged = open_model(tmp_path)
    none = paged.model.forward(*paged.pack(new), torch.tensor([], dtype=torch.int64))
    assert none.shape == (0, tiny.VOCAB)
    stored = paged.pool.get_key_buffer(2)[:, 0, :, 0] != 1e4  # [pages, page_size]
    assert stored.sum() == 5  # the K and V of its tokens are there all the same
