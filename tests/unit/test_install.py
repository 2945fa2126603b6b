"""An installation shows pip's newest line, keeps all of its output in a log, and shows the log's end when it fails. The
wheel holds all that a Manta outside a checkout needs."""

import contextlib
import functools
import json
import os
import pty
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatch
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deployments.places import VERSION

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def test_the_lock_lists_all_that_the_project_asks_for_by_hash_and_names_no_place() -> None:
    """Else: `make lock`."""
    text = (ROOT / "constraints.txt").read_text()
    entries = [entry.split(" \\\n    --hash=sha256:") for entry in re.split(r"\n(?=[a-z])", text.strip())]
    assert [entry[0] for entry in entries if len(entry) < 2] == []
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for _, *digests in entries for digest in digests)
    locked: dict[str, list[str]] = defaultdict(list)
    for requirement in (Requirement(first) for first, *_ in entries):
        [pin] = requirement.specifier
        assert (pin.operator, requirement.url) == ("==", None)
        locked[canonicalize_name(requirement.name)].append(pin.version)
    unlocked = re.compile(re.search(r"^UNLOCKED := (\S+)$", (ROOT / "Makefile").read_text(), re.M)[1])  # type: ignore[index]
    assert [name for name in locked if unlocked.match(name)] == []
    for wanted in map(Requirement, [*PROJECT["dependencies"], *PYPROJECT["build-system"]["requires"]]):
        if not unlocked.match(wanted.name):
            assert locked[canonicalize_name(wanted.name)], f"{wanted.name} is not locked"
            assert all(wanted.specifier.contains(version) for version in locked[canonicalize_name(wanted.name)]), wanted


def installing(tmp_path: Path, pip: str, *settings: str) -> subprocess.CompletedProcess[str]:
    """What `make install` gives, without a terminal; ``pip`` is the shell script that stands in for it,
    ``settings`` are variables of make's."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\n[ "$2" = pip ] || exit 99\n{pip}\n')
    python.chmod(0o755)
    of_another_make = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # under which make says which folder it enters
    env = {name: value for name, value in os.environ.items() if name not in of_another_make}
    return subprocess.run(
        ["make", "install", f"VENV={tmp_path / 'venv'}", *settings],
        capture_output=True, text=True, timeout=60, check=False, env=env,
    )  # fmt: skip


def test_make_install_says_what_it_installs_and_no_word_of_pip(tmp_path: Path) -> None:
    """With a pip as talkative as on an index that lacks a package."""
    done = installing(tmp_path, "echo WARNING: Location is ignored; echo and more >&2")
    assert done.returncode == 0, done.stderr
    logs = [tmp_path / "venv" / name for name in ("install-locked.log", "install.log")]
    assert done.stdout.splitlines() == [
        f"Installing what constraints.txt lists (once; log: {logs[0]})", "Installing what constraints.txt lists: done",
        f"Installing Manta into {tmp_path / 'venv'} (once; log: {logs[1]})",
        f"Installing Manta into {tmp_path / 'venv'}: done",
    ]  # fmt: skip
    assert [log.read_text() for log in logs] == ["WARNING: Location is ignored\nand more\n"] * 2


def test_an_installation_that_fails_shows_the_end_of_its_log_and_stops(tmp_path: Path) -> None:
    done = installing(tmp_path, "seq -f 'line %g' 100; echo ERROR: no such >&2; exit 3")
    lines, log = done.stdout.splitlines(), tmp_path / "venv" / "install-locked.log"
    assert lines[1] == f"Installing what constraints.txt lists: failed with status 3; the end of {log}:"
    assert (lines[2], lines[-1], len(lines)) == ("line 62", "ERROR: no such", 42)
    assert done.returncode == 2
    assert "To take the newest that pyproject.toml allows, unchecked: make install LOCK=" in done.stderr
    assert not (tmp_path / "venv" / ".installed").exists()


NO_TORCH = 'case "$*" in *show*torch) exit 1;; esac; echo "$@"'


@contextlib.contextmanager
def serving_files(folder: Path) -> Iterator[str]:
    """Serve ``folder``. Yields: its address."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def with_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Have an nvidia-smi that ends with ``status``: 0 where it sees a GPU."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="a GPU is here")
def test_without_a_gpu_pytorchs_cpu_build_is_installed_before_manta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nvidia_smi(tmp_path, monkeypatch, 9)  # its driver is missing
    (tmp_path / "torch").mkdir()
    with serving_files(tmp_path) as index:
        done = installing(tmp_path, NO_TORCH, f"TORCH_INDEX={index}")
    assert done.returncode == 0, done.stderr
    assert "Installing PyTorch's CPU build: done" in done.stdout.splitlines()
    asked = (tmp_path / "venv" / "install-torch.log").read_text()
    torch = next(each for each in PROJECT["dependencies"] if each.startswith("torch=="))
    assert asked.strip().endswith(f"--no-deps --index-url {index} {torch}")


@pytest.mark.parametrize(
    ("torch", "status", "says"),
    [
        ("cpu", 0, "does not answer: pip takes the build of its own index instead"),
        ("", 0, "Installing Manta into"),
        ("cuda", 0, "Installing Manta into"),
        ("keep", 0, "Installing Manta into"),
        ("gpu", 2, "TORCH=gpu: allowed are cpu, cuda and keep"),
    ],
)
def test_another_build_or_an_index_that_is_silent_leaves_torch_to_pip(
    torch: str, status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nvidia_smi(tmp_path, monkeypatch, 0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        index = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = installing(tmp_path, NO_TORCH, f"TORCH={torch}", f"TORCH_INDEX={index}")
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr
    assert ("does not answer" in done.stdout) == (torch == "cpu")
    assert not (tmp_path / "venv" / "install-torch.log").exists()


def test_on_a_terminal_pips_newest_line_is_drawn_in_place(tmp_path: Path) -> None:
    python = tmp_path / "python"
    seen = tmp_path / "seen"
    python.write_text(f"#!/bin/sh\necho Collecting torch; until [ -e {seen} ]; do sleep 0.1; done\n")
    python.chmod(0o755)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        command = ["sh", "tools/install.sh", str(python), "Installing Manta", str(tmp_path / "pip.log"), "torch"]
        running = subprocess.Popen(command, stdout=terminal, cwd=ROOT)
    written = ""
    with contextlib.suppress(OSError):  # EIO is the end
        while piece := os.read(master, 65536):
            written += piece.decode()
            if "Collecting torch" in written:
                seen.touch()
    os.close(master)
    assert running.wait(timeout=60) == 0
    assert "\r\x1b[KCollecting torch" in written
    assert written.endswith("\r\x1b[KInstalling Manta: done\r\n")
    assert written.count("\n") == 2  # the first line and the last stay


PACKAGES = ("deployments", "replicas", "routing", "kvtransfer", "dashboards")
MADE = ("__pycache__", "*.nbi", "*.nbc")  # beside the code, while it runs
SERVE_A_PAGE = (
    "from deployments.watch.observatory.page_files import FOLDER, INDEX, RUNBOOK, read_files; files = read_files(); "
    "assert {INDEX, RUNBOOK, 'main.js', 'vendor/geist/geist-latin-wght-normal.woff2'} <= files.keys(); print(FOLDER)"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, without what it depends on. The wheel is made from a copy: setuptools writes
    beside the code."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns(*MADE))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--no-input", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "-w", str(source / "dist"), str(source)], check=True, timeout=300)
    [wheel] = (source / "dist").glob("manta_serve-*.whl")
    assert wheel.name == f"manta_serve-{VERSION}-py3-none-any.whl"
    subprocess.run([*pip, "install", *offline, "--target", str(target), str(wheel)], check=True, timeout=300)
    return target


def out_of(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What the command ``words`` says when it runs in ``cwd`` with the installed Manta and our dependencies."""
    env = {**os.environ, "PATH": f"{installed / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(installed)}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages(installed: Path, tmp_path: Path) -> None:
    ours = [path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = [each for each in ours if not any(fnmatch(part, no) for part in each.parts for no in (*MADE, "README.md"))]
    assert [each for each in wanted if not (installed / each).is_file()] == []
    assert os.access(installed / "deployments" / "command" / "haproxy_no_splice.sh", os.X_OK)
    page = out_of(installed, tmp_path, sys.executable, "-c", SERVE_A_PAGE)
    assert page.stdout.strip() == str(installed / "dashboards" / "ui"), page.stderr
    boards = out_of(installed, tmp_path, "manta", "dashboards", "export", "watch")
    assert boards.returncode == 0, boards.stderr
    assert len(list((tmp_path / "watch" / "grafana" / "boards").iterdir())) == 3


@pytest.mark.slow
@pytest.mark.model
def test_an_installed_manta_checks_a_model_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    from tests.embedded import MODEL

    said = out_of(installed, tmp_path, "manta", "--version").stdout
    assert said.startswith(f"manta {VERSION} (")
    assert said.endswith(f" in {installed}\n")
    right = out_of(installed, tmp_path, "manta", "check", str(ROOT / MODEL))
    assert (right.returncode, right.stdout.splitlines()[0]) == (0, f"{ROOT / MODEL} is in order"), right.stderr
    looked = json.loads(out_of(installed, tmp_path, "manta", "doctor", "--json", "./nothing").stdout)
    found = {each["check"]: each for each in looked}
    assert found["ray"]["text"] == metadata.version("ray")  # the wheel knows what it needs
    assert found["model"]["text"].endswith(f"no such folder in {tmp_path}; a hub id has the form owner/name")
    none = out_of(installed, tmp_path, "manta", "serve").stderr
    assert f"there is no file serve_config.yaml in {tmp_path}; `manta serve MODEL` needs none" in none
