"""`list` and `pull`: which models are found, what is said of each, and that no weights are fetched in vain."""

import fnmatch
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from deployments import places
from deployments.command import models
from deployments.http import service
from replicas.errors import InvalidConfig
from replicas.loading.model_files import model_folder
from tests.embedded import short_model

COMMITS = {"old": "1" * 40, "new": "2" * 40}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without models, and a hub's cache without any, in the place of those of this machine."""
    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(places, "IS_CHECKOUT", False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SHORT = Path(short_model()).resolve()


def copied(folder: Path, *, weights: bool = True, **config: object) -> Path:
    """The short model, with other keys in its config.json."""
    folder.mkdir(parents=True)
    for file in SHORT.iterdir():
        if file.suffix in (".json", ".jinja") or (weights and file.suffix == ".safetensors"):
            (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    text = json.dumps(json.loads((SHORT / "config.json").read_text()) | config)
    (folder / "config.json").write_text(text)
    return folder


def fetched(here: Path, name: str, commit: str, *, main: bool = True, weights: bool = True) -> Path:
    """The short model in the hub's cache."""
    repo = here / "hub" / f"models--{name.replace('/', '--')}"
    (repo / "blobs").mkdir(parents=True, exist_ok=True)
    (repo / "refs").mkdir(exist_ok=True)
    if main:
        (repo / "refs" / "main").write_text(commit)
    return copied(repo / "snapshots" / commit, weights=weights)


@pytest.mark.model
def test_the_list_has_folders_and_the_hubs_cache_with_the_judgement_of_check(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied(here / "models" / "tiny", dtype="bfloat16", max_position_embeddings=4096)
    copied(here / "models" / "odd", architectures=["NobodysForCausalLM"], model_type="nobodys")
    (here / "models" / "notes").mkdir()
    (here / "models" / "broken.gguf").write_text("garbage")
    fetched(here, "owner/whole", COMMITS["new"])
    fetched(here, "owner/half", COMMITS["new"], weights=False)
    with pytest.raises(InvalidConfig, match=r"broken\.gguf is no GGUF file"):
        places.check_model_path("models/broken.gguf")
    assert models.show() == 0
    table, _, reasons = capsys.readouterr().out.partition("\n\n")
    assert [line.split() for line in table.splitlines()] == [
        ["model", "size", "weights", "context", "can", "be", "served"],
        ["models/broken.gguf", "-", "-", "-", "no"],
        ["models/odd", "170MB", "-", "-", "no"],
        ["models/tiny", "170MB", "bfloat16", "4,096", "yes"],
        ["owner/half", "0B", "float32", "8,192", "no"],
        ["owner/whole", "170MB", "float32", "8,192", "yes"],
    ]
    broken, odd, half = reasons.splitlines()
    assert broken.endswith("broken.gguf is no GGUF file: it begins otherwise")
    assert odd.startswith("models/odd: ")
    assert "NobodysForCausalLM" in odd
    assert half.startswith("owner/half: ")
    assert "safetensors" in half


def test_without_any_model_the_list_says_how_to_get_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.show() == 0
    assert capsys.readouterr().out.startswith("there is no model here: `manta pull MODEL` fetches one; ")
    (here / "hub").rmdir()
    assert models.at_hand() == {}


@pytest.mark.model
def test_of_a_model_of_the_hub_the_main_branch_is_listed(here: Path) -> None:
    fetched(here, "owner/tiny", COMMITS["new"], main=True)
    fetched(here, "owner/tiny", COMMITS["old"], main=False)
    assert [path.name for path in models.at_hand().values()] == [COMMITS["new"]]


class Hub:
    """Has one model, and keeps what was asked for: the patterns of files, with the revision, or the commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self._folder = folder
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # there is no other hub to look for
        for module in (service, huggingface_hub):
            monkeypatch.setattr(module, "snapshot_download", self._snapshot)
        monkeypatch.setattr(service, "hf_hub_download", self._file)

    def _snapshot(self, name: str, *, revision: str | None = None, allow_patterns: list[str], **_: Any) -> str:
        self.asked += [(pattern, revision) for pattern in allow_patterns]
        return str(self._folder)

    def _file(self, name: str, filename: str, *, revision: str | None = None) -> str:
        return f"{self._snapshot(name, revision=revision, allow_patterns=[filename])}/{filename}"


@pytest.mark.model
def test_pull_fetches_what_a_start_would_and_says_where_it_is(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(monkeypatch, copied(here / "fetched"))
    assert models.pull("owner/tiny", "abc") == 0
    assert hub.asked[0] == ("config.json", "abc")
    assert [asked for asked in hub.asked if "safetensors" in asked[0]] == [("model.safetensors", "fetched")]
    told = capsys.readouterr()
    assert told.err == "asking the Hugging Face hub for owner/tiny\n"
    assert told.out == f"owner/tiny: 170MB of weights in {here / 'fetched'}\n"


@pytest.mark.model
def test_the_index_decides_which_weights_are_fetched(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mistralai's models have a second copy in consolidated.safetensors, Meta's one in original/."""
    folder = copied(here / "sharded")
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    hub = Hub(monkeypatch, folder)
    assert model_folder("owner/sharded") == folder
    assert hub.asked[-2:] == [("model-1.safetensors", "sharded"), ("model-2.safetensors", "sharded")]
    assert not any(fnmatch.fnmatch("consolidated.safetensors", pattern) for pattern, _ in hub.asked)


@pytest.mark.model
def test_of_a_model_that_cannot_be_served_no_weights_are_fetched(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = Hub(monkeypatch, copied(here / "odd", architectures=["NobodysForCausalLM"], model_type="nobodys"))
    assert models.pull("owner/odd", None) == 1
    assert not any("safetensors" in pattern for pattern, _ in hub.asked)
    assert "NobodysForCausalLM" in capsys.readouterr().err
    hub = Hub(monkeypatch, copied(here / "without", weights=False))  # its weights have another format
    assert models.pull("owner/without", None) == 1
    assert ("model.safetensors", "without") in hub.asked
    assert "safetensors" in capsys.readouterr().err
