"""Adapters' folders: what is read, what identifies them, and what is refused by name."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from replicas.checkpoints.adapters import CONFIG, WEIGHTS, identify, load
from replicas.config import AdapterLimits
from replicas.errors import AdapterNotReadable, InvalidAdapter
from tests.adapters import make_adapter

NUM_MUTATIONS = 500
CHANGING = ("pissa_niter_4", "olora", "corda", "loftq", "lora_ga")  # the model's weights, when training begins
MODEL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def test_an_adapter_is_described_and_its_numbers_are_those_of_the_file(tmp_path: Path, model: Path) -> None:
    ref = make_adapter(tmp_path / "a", model, rank=4, targets=("q_proj", "down_proj"), use_rslora=True)
    info = identify(tmp_path / "a")
    assert (info.rank, info.alpha, info.scale, info.base) == (4, 8.0, 4.0, "model")  # 8 / sqrt(4)
    assert info.targets == ("down_proj", "q_proj")
    assert info.num_bytes == 4 * 2 * 4 * (32 + 32 + 48 + 32)  # fp32, two layers, rank, q's and down's in and out
    pairs = load(tmp_path / "a", ref.identity).pairs
    assert {layer: (tuple(a.shape), tuple(b.shape)) for layer, (a, b) in pairs.items() if ".0." in layer} == {
        "model.layers.0.self_attn.q_proj": ((4, 32), (32, 4)),
        "model.layers.0.mlp.down_proj": ((4, 48), (32, 4)),
    }


def test_the_identity_is_that_of_the_bytes_wherever_they_lie(tmp_path: Path, model: Path) -> None:
    first = make_adapter(tmp_path / "a", model, seed=1)
    assert identify(shutil.copytree(tmp_path / "a", tmp_path / "b")).identity == first.identity
    assert make_adapter(tmp_path / "c", model, seed=2).identity != first.identity
    assert make_adapter(tmp_path / "d", model, seed=1, lora_alpha=3).identity != first.identity


def test_a_folder_that_changed_is_another_adapter_and_is_not_read_as_the_old_one(tmp_path: Path, model: Path) -> None:
    ref = make_adapter(tmp_path / "a", model, seed=1)
    make_adapter(tmp_path / "a", model, seed=2)
    with pytest.raises(AdapterNotReadable, match=f"has changed: {ref.identity[:12]} is wanted, it holds .* Load it"):
        load(tmp_path / "a", ref.identity)


def test_what_is_gone_or_cannot_be_read_here_may_be_read_elsewhere(tmp_path: Path, model: Path) -> None:
    ref, weights = make_adapter(tmp_path / "a", model), tmp_path / "a" / WEIGHTS
    raw = weights.read_bytes()
    weights.unlink()
    with pytest.raises(AdapterNotReadable, match=f"has no {WEIGHTS}"):
        load(tmp_path / "a", ref.identity)
    weights.write_bytes(raw + bytes(100))
    with pytest.raises(AdapterNotReadable, match=f"at most {len(raw):,} are read"):
        load(tmp_path / "a", ref.identity, AdapterLimits(max_bytes=len(raw)))
    weights.unlink()
    weights.symlink_to("/proc/self/mem")  # whose first bytes are not mapped, as of a disk with a fault
    for read in (lambda: identify(tmp_path / "a"), lambda: load(tmp_path / "a", ref.identity)):
        with pytest.raises(AdapterNotReadable, match=r"cannot be read: .*Input/output error"):
            read()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"use_dora": True}, "use_dora is True, which is not supported: train with use_dora=False"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which .*: train with init_lora_weights=True"),
        *(({"init_lora_weights": kind}, f"init_lora_weights is {kind!r}") for kind in CHANGING),
        ({"arrow_config": {"top_k": 2}}, r"arrow_config is \{'top_k': 2\}, which .*: train with arrow_config=None"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is"),
        ({"monteclora_config": {}}, "monteclora_config is"),
        ({"kasa_config": {}}, "kasa_config is"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"r": 16}, r"lora_A and lora_B of model.layers.0.mlp.down_proj are \(4, 48\) and \(32, 4\): \(16, in\)"),
        ({"r": 65}, "r is 65: 1 to 64 may be"),
        ({"r": True}, "r is True: a positive number is wanted"),
        ({"lora_alpha": "much"}, "lora_alpha is 'much'"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ],
)
def test_what_is_computed_otherwise_is_refused_by_name(
    tmp_path: Path, model: Path, config: dict[str, object], said: str
) -> None:
    make_adapter(tmp_path / "a", model, rank=4)
    path = tmp_path / "a" / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(InvalidAdapter, match=said):
        identify(tmp_path / "a")


@pytest.mark.parametrize("kind", [None, True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_where_training_began_is_of_no_matter_if_the_models_weights_stayed(
    tmp_path: Path, model: Path, kind: bool | str | None
) -> None:
    ref = make_adapter(tmp_path / "a", model, init_lora_weights=kind, arrow_config=None, kasa_config=None)
    assert load(tmp_path / "a", ref.identity).info.identity == ref.identity


def test_what_is_no_adapter_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "a"
    with pytest.raises(InvalidAdapter, match=f"has no {CONFIG}"):
        identify(folder)
    ref = make_adapter(folder, model, rank=4)
    with pytest.raises(InvalidAdapter, match="at most 1,000 are read"):
        identify(folder, AdapterLimits(max_bytes=1000))
    num_bytes = identify(folder).num_bytes
    assert identify(folder, AdapterLimits(host_bytes=num_bytes)).num_bytes == num_bytes
    with pytest.raises(InvalidAdapter, match=r"it takes [\d,]+ bytes in fp32, adapters.host_bytes is [\d,]+"):
        identify(folder, AdapterLimits(host_bytes=num_bytes - 1))
    names = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = np.ones((4, 32), np.float32), np.ones((32, 4), np.float32)
    for tensors, said in (
        ({f"{names}.lora_A.weight": a}, r"are \(4, 32\) and \(\)"),
        ({f"{names}.lora_A.weight": a.astype(np.int8)}, "is in I8"),
        ({f"{names}.lora_magnitude_vector": a}, "is no weight of LoRA's"),
        ({}, "it holds no weights"),
    ):
        save_file(tensors, folder / WEIGHTS)
        with pytest.raises(InvalidAdapter, match=said):
            identify(folder)
    for value in (np.nan, -np.inf, 3e38):  # of which twice is too much for fp32
        b[3, 1] = value
        save_file({f"{names}.lora_A.weight": a, f"{names}.lora_B.weight": b}, folder / WEIGHTS)
        with pytest.raises(InvalidAdapter, match="hold NaN or inf, B when it is scaled by 2: "):
            identify(folder)
    b[3, 1] = 0
    save_file({f"{names}.lora_A.weight": a, f"{names}.lora_B.weight": b}, folder / WEIGHTS)
    assert ref.identity != identify(folder).identity
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(InvalidAdapter, match=f"has no {WEIGHTS}: save it with PEFT's save_pretrained, in safetensors"):
        identify(folder)


def test_mutated_files_are_refused_by_name_or_are_another_adapter(tmp_path: Path, model: Path) -> None:
    """Bytes are changed, left out or doubled, most of them in headers. No mutant passes for the adapter, and none
    raises anything but errors of adapters."""
    draw, folder = random.Random(34), tmp_path / "a"
    ref = make_adapter(folder, model, rank=2)
    whole = {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    refused = 0
    for _ in range(NUM_MUTATIONS):
        name = draw.choice(list(whole))
        raw = bytearray(whole[name])
        at = draw.randrange(min(len(raw), draw.choice((8, 600, len(raw)))))
        kind = draw.randrange(4)
        if kind == 0:
            raw[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            raw[at] = draw.choice(b'0-9"{}[],:.e\0\xff')
        elif kind == 2:
            del raw[at : at + draw.choice((1, 9, len(raw)))]
        else:
            raw[at:at] = raw[at : at + 40]
        if bytes(raw) == whole[name]:
            continue
        (folder / name).write_bytes(raw)
        with pytest.raises(AdapterNotReadable, match="adapter: "):
            load(folder, ref.identity)
        try:
            assert identify(folder).identity != ref.identity
        except InvalidAdapter:
            refused += 1
        (folder / name).write_bytes(whole[name])
    assert refused > NUM_MUTATIONS / 3
    assert load(folder, ref.identity).info.rank == 2
