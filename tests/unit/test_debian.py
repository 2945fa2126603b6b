"""Programs of Debian packages are fetched once, whole, and their absence is either a skip or an error."""

import os
import pathlib
import stat

import pytest

from tools.debian import REQUIRED, DebianError, ensure, environment

APT = """#!/bin/sh
echo "$@" >> "$APT_LOG"
for word; do case $word in
  update) exit 0 ;;
  install) echo "'http://archive/libnew_1_amd64.deb' libnew_1_amd64.deb 10 MD5Sum:0"; exit 0 ;;
  missing) echo "E: Unable to locate package missing" >&2; exit 100 ;;
  tool|libnew) : > "$word"_1_amd64.deb ;;
esac; done
"""
DPKG = """#!/bin/sh
case $2 in
  *tool_*) mkdir -p "$3/usr/bin"; printf '#!/bin/sh\\n' > "$3/usr/bin/tool"; chmod +x "$3/usr/bin/tool" ;;
  *libnew_*) mkdir -p "$3/usr/lib/x86"; : > "$3/usr/lib/x86/libnew.so.1" ;;
esac
"""


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A machine whose apt-get has the packages tool and libnew; returns the log of its calls."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("apt-get", APT), ("dpkg", DPKG)):
        (programs / name).write_text(text)
        (programs / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("APT_LOG", str(tmp_path / "log"))
    monkeypatch.delenv(REQUIRED, raising=False)
    return tmp_path / "log"


def test_a_program_on_path_is_taken_as_it_is(machine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert ensure(["dash"], "sh", root=tmp_path / ".tools") in (pathlib.Path("/usr/bin/sh"), pathlib.Path("/bin/sh"))
    assert not machine.exists()


def test_a_program_is_fetched_once(machine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    root = tmp_path / ".tools"
    for _ in range(2):
        assert ensure(["tool"], "tool", root=root) == root / "tool" / "usr" / "bin" / "tool"
    assert [line.split()[-1] for line in machine.read_text().splitlines()] == ["update", "tool"]
    assert sorted(path.name for path in root.iterdir()) == [".lock", "apt", "tool"]


def test_dependencies_that_the_machine_lacks_come_along_and_are_found(
    machine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    program = ensure(["tool"], "tool", root=tmp_path / ".tools", dependencies=True)
    assert program is not None
    libraries = environment(program, {"LD_LIBRARY_PATH": "/mine"})["LD_LIBRARY_PATH"]
    assert libraries == f"{tmp_path}/.tools/tool/usr/lib/x86:/mine"


def test_what_cannot_be_had_is_none_and_leaves_no_half_folder(
    machine: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ensure(["missing"], "nothing", root=tmp_path / ".tools") is None
    assert "E: Unable to locate package missing" in capsys.readouterr().err
    assert not (tmp_path / ".tools" / "missing").exists()


def test_what_is_required_and_cannot_be_had_is_an_error(
    machine: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(DebianError, match="Unable to locate package"):
        ensure(["missing"], "nothing", root=tmp_path / ".tools")


def test_without_apt_it_says_what_to_do(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.delenv(REQUIRED, raising=False)
    assert ensure(["tool"], "tool", root=tmp_path / ".tools") is None
    assert "there is no apt-get, so tool cannot be fetched: install it yourself" in capsys.readouterr().err
