"""``manta doctor``: looks at this machine and the settings file, and says what to do before a start fails.

A check takes what was measured and returns what it finds; `examine` measures and calls each.

Owns:      what is a fault (Manta cannot start) and what is a warning (it starts, and is slower or less safe).
Never:     imports Ray, torch or another large package: a broken one must be reported, not raise. Changes nothing.
"""

import contextlib
import ctypes
import dataclasses
import enum
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from deployments.command import haproxy
from deployments.places import (
    IS_CHECKOUT,
    MODEL_ADVICE,
    ROOT,
    check_model_path,
    local_model,
    proxies_of,
    weights_bytes,
)
from deployments.settings import settings_file
from deployments.settings.settings_file import ALL_ADDRESSES, PORT, Given, check_port
from deployments.watch.terminal import ask
from replicas.errors import InvalidConfig
from replicas.memory.ram import available_ram

SHOWN = ("ray", "torch", "transformers", "nixl")  # versions that have a line even if they are right
PROCESS_BYTES = 1 << 30  # of a replica beside its weights: Python, torch, Ray, a small KV pool
SMALL_SHM_BYTES = 1 << 30  # with less, Ray's object store is in /tmp
ASKED_S = 10.0  # for nvidia-smi
TOLD_S = 60.0  # for products: the seconds that an import of torch takes
TELL = "import json; from replicas.loading import product_choice as p; print(json.dumps(p.instructions_told()))"
TIME_ERROR = 5  # of adjtimex: the clock is not synchronised
DAY_S = 86400.0
GIB = float(1 << 30)


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, how bad that is, and what to do about it ("" if nothing)."""

    check: str
    text: str
    level: Level = Level.OK
    advice: str = ""


def port(address: str, problem: str, *, has_manta: bool) -> Finding:
    text, _, advice = problem.partition("; ")
    if has_manta:
        advice = "stop it before you start another one, or give http_options.port another number"
        return Finding("port", f"Manta serves at {address} already", Level.WARNING, advice)
    return Finding("port", text, Level.FAULT, advice) if problem else Finding("port", f"{address} is free")


def model(path: str, problem: str, weights: int | None) -> Finding:
    """``weights``: bytes; None for a hub id."""
    if not problem and weights == 0:
        problem = f"{path} has no weights"
    if problem:
        return Finding("model", problem, Level.FAULT, MODEL_ADVICE)
    where = "of the Hugging Face hub" if weights is None else f"weights of {weights / GIB:.2f} GiB"
    return Finding("model", f"{path}, {where}")


def cores(number: int, limit: float | None) -> Finding:
    """``limit``: of the container."""
    if limit is not None and limit < number:
        text = f"{number}, and the container may use {limit:g}: threads are held up"
        advice = f"set replicas.cpus so that all replicas and routers take {max(1, int(limit))} at most"
        return Finding("cores", text, Level.WARNING, advice)
    if number == 1:
        return Finding("cores", "1", Level.WARNING, "router and replica take turns: give the machine two")
    return Finding("cores", str(number))


def memory(available: int, weights: int, *, gpus_wanted: bool) -> Finding:
    need, text = weights + PROCESS_BYTES, f"{available / GIB:.1f} GiB available"
    if available >= need or gpus_wanted:
        return Finding("memory", text)
    advice = "stop other programs, serve a smaller model, or quantise it (model.quantization)"
    return Finding("memory", f"{text}, one replica needs {need / GIB:.1f}", Level.FAULT, advice)


def shared_memory(free: int | None) -> Finding:
    text = "absent" if free is None else f"{free / GIB:.2f} GiB free"
    if free is not None and free >= SMALL_SHM_BYTES:
        return Finding("/dev/shm", text)
    advice = "give it 1 GiB (docker run --shm-size=1g): Ray's object store is on disk otherwise"
    return Finding("/dev/shm", text, Level.WARNING, advice)


def proxy(problem: str) -> Finding:
    if not problem:
        return Finding("HAProxy", "runs")
    return Finding("HAProxy", problem, Level.WARNING, "Serve's own proxy serves then, with more CPU a token")


def ray_session(folder: Path) -> Iterator[Finding]:
    """Look at a session of Ray that lives, if ``folder`` is one: who can write there can stop it, or read its logs."""
    with socket.socket(socket.AF_UNIX) as asking, contextlib.suppress(OSError):  # no such folder, or none of ours
        asking.connect(str(folder / "sockets" / "plasma_store"))
        real = folder.resolve()
        reached = all(each.stat().st_mode & stat.S_IXOTH for each in real.parents)
        if reached and real.stat().st_mode & stat.S_IWOTH:
            advice = "start that Ray anew with RAY_TMPDIR set to a folder of mode 700, as `manta serve` does by itself"
            yield Finding("Ray's folder", f"every user of this machine can write to {real}", Level.WARNING, advice)


def ray_token(environ: Mapping[str, str], current: Path) -> Iterator[Finding]:
    """Look at whether Ray's commands show a cluster its token. ``current``: a file that is there while a Ray runs that
    `ray start` has started here."""
    file = Path(environ.get("RAY_AUTH_TOKEN_PATH") or Path(environ.get("HOME", "/"), ".ray", "auth_token"))
    has_token = bool(environ.get("RAY_AUTH_TOKEN")) or file.is_file()
    if ("RAY_ADDRESS" in environ or current.exists()) and has_token and environ.get("RAY_AUTH_MODE") != "token":
        advice = "export RAY_AUTH_MODE=token: without it `serve deploy` and `ray status` fail with AuthenticationError"
        yield Finding("Ray's token", "there is one, and no command shows it", Level.WARNING, advice)


def http_proxies(names: list[str]) -> Finding:
    """``names``: of the variables of the environment that name an HTTP proxy."""
    if not names:
        return Finding("HTTP proxy", "none in the environment")
    advice = "Manta asks no proxy for its own nodes; for clients such as curl: export no_proxy=127.0.0.1,localhost"
    return Finding("HTTP proxy", f"{', '.join(names)}: the hub is asked through it", Level.WARNING, advice)


def clock(time_s: float, newest_file_s: float, *, is_synchronised: bool) -> Finding:
    """``newest_file_s``: of Manta's own files."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))
    if time_s < newest_file_s - DAY_S:
        advice = "set the clock: certificates of the hub and of stores are refused"
        return Finding("clock", f"{text}, before Manta's own files were written", Level.FAULT, advice)
    if not is_synchronised:
        advice = "run an NTP client if Manta runs on several machines, whose times are compared"
        return Finding("clock", f"{text}, not synchronised", Level.WARNING, advice)
    return Finding("clock", text)


def products(told: dict[str, str], problem: str) -> Iterator[Finding]:
    """``told``: how this CPU multiplies, by the format of weights; ``problem``: why that could not be told."""
    if problem:
        advice = "a replica on the CPU would fail likewise: see the lines on versions below"
        yield Finding("products", f"cannot be told: {problem}", Level.WARNING, advice)
    for format_, text in told.items():
        yield Finding(format_, text)


def gpu(cuda: str | None, gpus: tuple[str, ...], problem: str, nvcc: str | None, *, wanted: bool) -> Iterator[Finding]:
    """``cuda``: version for which torch was built; ``problem``: why nvidia-smi fails; ``wanted``: by the settings."""
    level = Level.FAULT if wanted else Level.WARNING
    if cuda is None and (gpus or wanted):
        advice = "install a CUDA build of PyTorch to use the GPU (docs/gpu.md)"
        yield Finding("torch build", "for the CPU", level, advice)
    else:
        yield Finding("torch build", f"for CUDA {cuda}" if cuda else "for the CPU")
    if problem:
        advice = "install the driver that fits the kernel; in a container, pass the GPU in"
        yield Finding("GPU", problem, level, advice)
    elif wanted and not gpus:
        advice = "take `gpus` out of the settings, or serve where a GPU is"
        yield Finding("GPU", "none, and the settings ask for one", level, advice)
    else:
        yield Finding("GPU", ", ".join(gpus) or "none: replicas compute on the CPU")
    if gpus and nvcc is None:
        advice = "put CUDA's nvcc on the PATH: FlashInfer's kernels cannot be compiled, and Triton's are used"
        yield Finding("nvcc", "not found", Level.WARNING, advice)
    elif gpus:
        yield Finding("nvcc", str(nvcc))


def version(requirement: Requirement, installed: str | None) -> Finding:
    if installed is not None and requirement.specifier.contains(installed, prereleases=True):
        return Finding(requirement.name, installed)
    wanted = f"{requirement.name}{requirement.specifier}"
    advice = f"{sys.executable} -m pip install '{wanted}'" + (", or `make clean install`" if IS_CHECKOUT else "")
    return Finding(requirement.name, f"{installed or 'not installed'}, {wanted} is needed", Level.FAULT, advice)


def examine(config: Given) -> Iterator[Finding]:
    """Look at this machine, in the order in which a start needs things. ``config``: the settings file."""
    content, (host, number) = None, (ALL_ADDRESSES, PORT)
    try:
        file = settings_file.read(config)
        content, (host, number) = file.content, file.address
        yield Finding("settings", f"{config} (`manta check {config}` checks every setting)")
    except InvalidConfig as error:
        yield Finding("settings", str(error), Level.FAULT, "give the file's name: manta doctor FILE")
    taken = _problem_of(check_port, host, number)
    yield port(f"{host}:{number}", taken, has_manta=bool(taken) and _is_manta(host, number))
    args = _args(content)
    group = args.get("model")
    path = str(group.get("path") or "") if isinstance(group, dict) else ""
    problem = _problem_of(check_model_path, path) if path else "the settings name none"
    weights = weights_bytes(path) if not problem and local_model(path) is not None else None
    if content is not None:
        yield model(path, problem, weights)
    wanted = any(isinstance(each, dict) and each.get("gpus") for each in args.values())
    yield cores(len(os.sched_getaffinity(0)), _cores_limit())
    if not wanted:
        yield from products(*_products())
    yield memory(available_ram(), weights or 0, gpus_wanted=wanted)
    yield shared_memory(shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None)
    yield proxy(haproxy.unusable(haproxy.found(os.environ), host=host))
    temporary = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # in Ray's order
    yield from ray_session(Path(temporary, "ray", "session_latest"))
    yield from ray_token(os.environ, Path(temporary, "ray", "ray_current_cluster"))
    yield http_proxies(proxies_of())
    newest_file_s = max(each.stat().st_mtime for each in Path(__file__).parent.glob("*.py"))
    yield clock(time.time(), newest_file_s, is_synchronised=_clock_is_synchronised())
    yield from gpu(torch_cuda(), *_gpus(), shutil.which("nvcc"), wanted=wanted)
    found = [version(*each) for each in _installed()]
    yield from (each for each in found if each.level is not Level.OK or each.check in SHOWN)


def _problem_of(check: Callable[..., None], *args: Any) -> str:
    try:
        check(*args)
    except InvalidConfig as error:
        return str(error)
    return ""


def _args(content: Any) -> dict[str, Any]:
    """Find the settings of the application that has a model."""
    applications = content.get("applications") if isinstance(content, dict) else None
    found = [each.get("args") for each in applications or () if isinstance(each, dict)]
    return next((args for args in found if isinstance(args, dict) and "model" in args), {})


def _is_manta(host: str, number: int) -> bool:
    try:
        ask.first_model(f"http://{'127.0.0.1' if host == ALL_ADDRESSES else host}:{number}", None)
    except ask.Unanswered as error:
        return error.status == ask.REFUSED
    return True


def _cgroup(name: str) -> list[str]:
    """Read a limit of the container; [] if there is none."""
    with contextlib.suppress(OSError):
        told = Path("/sys/fs/cgroup", name).read_text().split()
        return told if told[:1] != ["max"] else []
    return []


def _cores_limit() -> float | None:
    told = _cgroup("cpu.max")
    return int(told[0]) / int(told[1]) if told else None


def torch_cuda() -> str | None:
    """Read the CUDA version of the build from torch's own file."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = Path(found.origin).with_name("version.py").read_text()
    told = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.MULTILINE)
    return told[1] if told else None


def _gpus() -> tuple[tuple[str, ...], str]:
    """Ask nvidia-smi: a line for each GPU, and why it failed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    asked = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=ASKED_S, check=True)
    except subprocess.CalledProcessError as error:
        return (), f"nvidia-smi fails: {(error.stdout or error.stderr).strip()}"
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"nvidia-smi does not run: {error}"
    return tuple(told.stdout.strip().splitlines()), ""


def _products() -> tuple[dict[str, str], str]:
    """Ask a process of its own how this CPU multiplies. Returns: that, and why it failed."""
    command = [sys.executable, "-c", TELL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOLD_S, check=True, cwd=ROOT)
        return dict(json.loads(done.stdout.splitlines()[-1])), ""
    except subprocess.CalledProcessError as error:
        return {}, (error.stderr.strip() or str(error)).splitlines()[-1]
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        return {}, str(error)


def _clock_is_synchronised() -> bool:
    """Ask the kernel; true where it does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) != TIME_ERROR)  # modes = 0: reads
    return True


def _installed() -> Iterator[tuple[Requirement, str | None]]:
    """List what Manta needs, by its checkout or as it was installed, and what there is."""
    if IS_CHECKOUT:
        needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    else:
        needs = importlib.metadata.requires("manta-serve")
    for wanted in map(Requirement, needs or ()):
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            installed = None
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                installed = importlib.metadata.version(wanted.name)
            yield wanted, installed


_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "bold red"}


def report(findings: list[Finding], *, as_json: bool) -> int:
    """Print the findings. Return the exit status: 1 if there is a fault."""
    faults, warnings = (sum(each.level is level for each in findings) for level in (Level.FAULT, Level.WARNING))
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
        return bool(faults)
    console = Console(highlight=False, soft_wrap=True)
    for each in findings:
        console.print(Text(f"{each.level:<9}", _COLOURS[each.level]).append(f"{each.check:<16} {each.text}", "default"))
        if each.advice:
            console.print(Text(f"{'':<26}-> {each.advice}"))
    end = f"{faults} fault{'s' * (faults != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    console.print(Text(end, _COLOURS[Level.FAULT if faults else Level.OK]))
    return bool(faults)
