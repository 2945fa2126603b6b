"""Packed weights in a file: written once, mapped by all others, never half, never of other weights."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch

from replicas.kernels.panels import Panels, pack
from replicas.loading import panel_file as files
from replicas.loading.panel_file import panel_file

WEIGHTS = {"a": torch.arange(40 * 64.0).reshape(40, 64), "b": torch.randn(64, 33)}


def load(folder: Path, **meaning: object) -> tuple[dict[str, Panels], list[str]]:
    """The panels that an engine gets, and the names of those that it packed itself."""
    packed: list[str] = []
    panels = {}

    def work(name: str) -> Panels:
        packed.append(name)
        return pack(WEIGHTS[name], "q8_0" if name == "b" else "float32")

    with panel_file(folder, "test", meaning) as keep:
        for name in WEIGHTS:
            panels[name] = keep(name)(lambda name=name: work(name))  # type: ignore[misc]
    return panels, packed


def assert_equal(one: dict[str, Panels], other: dict[str, Panels]) -> None:
    for name, panels in one.items():
        assert (panels.format, panels.n, panels.k, panels.group) == (
            other[name].format, other[name].n, other[name].k, other[name].group,
        )  # fmt: skip
        assert torch.equal(panels.data, other[name].data)


def test_the_second_engine_maps_what_the_first_one_packed(tmp_path: Path) -> None:
    first, packed = load(tmp_path)
    second, again = load(tmp_path)
    assert (packed, again) == (["a", "b"], [])
    assert_equal(first, second)
    (file,) = tmp_path.glob("panels-test-*.bin")
    assert all(panels.data.data_ptr() % files.ALIGNMENT == 0 for panels in second.values())
    memory = Path("/proc/self/maps").read_text()
    assert memory.count(file.name) >= 2  # the writer has it mapped too, under its last name


@pytest.mark.parametrize("damage", ["cut", "no table", "empty"])
def test_a_file_that_is_not_whole_is_made_anew(tmp_path: Path, damage: str) -> None:
    first, _ = load(tmp_path)
    (file,) = tmp_path.glob("panels-*.bin")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes({"cut": content[:-9], "no table": content[:-20] + bytes(4) + content[-16:], "empty": b""}[damage])
    second, packed = load(tmp_path)
    assert packed == ["a", "b"]
    assert_equal(first, second)
    assert load(tmp_path)[1] == []


def test_other_weights_have_another_file_and_the_old_one_goes(tmp_path: Path) -> None:
    load(tmp_path, identity="one")
    (old,) = tmp_path.glob("panels-*.bin")
    assert load(tmp_path, identity="two")[1] == ["a", "b"]
    (new,) = tmp_path.glob("panels-*.bin")
    assert new != old


def test_a_load_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def fails() -> None:
        with panel_file(tmp_path, "test", {}) as keep:
            keep("a")(lambda: pack(WEIGHTS["a"], "float32"))
            raise FileNotFoundError("a shard")

    with pytest.raises(FileNotFoundError, match="a shard"):
        fails()
    assert not [file for file in tmp_path.iterdir() if file.name.startswith("panels")]


def test_a_full_disk_costs_the_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = load(tmp_path / ".")
    for file in tmp_path.glob("panels-*"):
        file.unlink()
    append, written = files._append, []

    def full(file: object, packed: Panels) -> files.Entry:
        if written:
            raise OSError(28, "No space left on device")
        written.append(packed)
        return append(file, packed)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "_append", full)
    panels, packed = load(tmp_path)
    assert packed == ["a", "b"]
    assert_equal(wanted, panels)
    assert not list(tmp_path.glob("panels-*"))


def test_a_folder_that_cannot_be_written_gives_private_panels(tmp_path: Path) -> None:
    """Root may write anywhere: a folder that is not there stands for one that is read-only."""
    panels, packed = load(tmp_path / "missing")
    assert packed == ["a", "b"]
    for name, weight in WEIGHTS.items():
        assert torch.allclose(panels[name].rows(torch.arange(len(weight))), weight, atol=0.02)
    assert not (tmp_path / "missing").exists()


def _load_in_process(folder: Path, results: "multiprocessing.Queue[list[str]]") -> None:
    results.put(load(folder)[1])


def test_of_engines_that_start_together_one_packs(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # not of this process, whose OpenMP threads a fork would lack
    context.set_forkserver_preload(["replicas.loading.panel_file", __name__])
    results: multiprocessing.Queue[list[str]] = context.Queue()
    processes = [context.Process(target=_load_in_process, args=(tmp_path, results)) for _ in range(4)]
    for process in processes:
        process.start()
    packed = sorted(results.get(timeout=180) for _ in processes)
    for process in processes:
        process.join(60)
    assert packed == [[], [], [], ["a", "b"]]


def test_who_waits_too_long_packs_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WAIT_S", 0.1)
    with panel_file(tmp_path, "test", {}) as keep:
        first = keep("a")(lambda: pack(WEIGHTS["a"], "float32"))
        second, packed = load(tmp_path)
    assert packed == ["a", "b"]
    assert torch.equal(first.data, second["a"].data)
    assert np.array_equal(first.rows(torch.tensor([39])).numpy()[0], WEIGHTS["a"][39].numpy())
