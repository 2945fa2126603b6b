"""``manta doctor``: looks at this machine and the settings file, and says what to do before a start fails.

    measure (facts of this machine) ──> judge (pure) ──> report: lines, or JSON

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
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from deployments.command import haproxy
from deployments.settings import settings_file
from deployments.settings.places import check_model_path, local_model, weights_bytes
from deployments.settings.settings_file import ALL_ADDRESSES, PORT, check_port
from deployments.watch.terminal import ask
from replicas.errors import InvalidConfig

SHOWN = ("ray", "torch", "transformers", "nixl")  # versions that have a line even if they are right
PROCESS_BYTES = 1 << 30  # of a replica beside its weights: Python, torch, Ray, a small KV pool
SMALL_SHM_BYTES = 1 << 30  # with less, Ray's object store is in /tmp
ASKED_S = 10.0  # for nvidia-smi
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
    """One line: what was looked at, what was found, and what to do about it ("" if nothing)."""

    check: str
    level: Level
    text: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was measured. A problem is a sentence, "" if there is none."""

    settings: str  # path of the file
    settings_problem: str
    address: str  # host:port
    port_problem: str
    port_has_manta: bool
    cores: int  # that this process may use
    cores_limit: float | None  # of the container
    ram_bytes: int  # available
    shm_bytes: int | None  # free in /dev/shm; None if there is none
    haproxy_problem: str
    torch_cuda: str | None  # CUDA version of the torch build; None for a CPU build
    gpus: tuple[str, ...]
    gpu_problem: str  # nvidia-smi is there and fails
    gpus_wanted: bool  # by the settings
    nvcc: str | None
    model: str  # as the settings have it
    model_problem: str
    model_is_here: bool  # else it is a hub id
    weights_bytes: int
    time_s: float
    newest_file_s: float  # of Manta's own files
    clock_is_synchronised: bool
    versions: tuple[tuple[str, str, str | None], ...]  # (package, wanted, installed)


def judge(facts: Facts) -> list[Finding]:
    """Return a finding for each thing that was looked at, in the order in which a start needs them."""
    found: list[Finding] = []

    def say(check: str, text: str, *, fault: str = "", warning: str = "") -> None:
        level = Level.FAULT if fault else Level.WARNING if warning else Level.OK
        found.append(Finding(check, level, text, fault or warning))

    _judge_settings(facts, say)
    _judge_machine(facts, say)
    _judge_gpu(facts, say)
    for name, wanted, installed in facts.versions:
        if installed is None or not Requirement(f"{name}{wanted}").specifier.contains(installed, prereleases=True):
            do = f"{sys.executable} -m pip install '{name}{wanted}', or `make clean install`"
            say(name, f"{installed or 'not installed'}, {wanted or 'any version'} is needed", fault=do)
        elif name in SHOWN:
            say(name, installed)
    return found


def _judge_settings(facts: Facts, say: Any) -> None:
    if facts.settings_problem:
        say("settings", facts.settings_problem, fault="give the file's name: manta doctor FILE")
    else:
        say("settings", f"{facts.settings} (`manta check {facts.settings}` checks every setting)")
    text, _, do = facts.port_problem.partition("; ")
    if facts.port_has_manta:
        do = "stop it before you start another one, or give http_options.port another number"
        say("port", f"Manta serves at {facts.address} already", warning=do)
    else:
        say("port", text or f"{facts.address} is free", fault=do)
    if facts.model_problem:
        say("model", facts.model_problem, fault="`make model` makes the embedded one; a hub id has the form owner/name")
    elif facts.model:
        where = f"weights of {facts.weights_bytes / GIB:.2f} GiB" if facts.model_is_here else "of the Hugging Face hub"
        say("model", f"{facts.model}, {where}")


def _judge_machine(facts: Facts, say: Any) -> None:
    limit = facts.cores_limit
    if limit is not None and limit < facts.cores:
        do = f"set replicas.cpus so that all replicas and routers take {max(1, int(limit))} at most"
        say("cores", f"{facts.cores}, and the container may use {limit:g}: threads are held up", warning=do)
    else:
        say("cores", str(facts.cores), warning="" if facts.cores > 1 else "router and replica take turns: give it two")
    need, have = facts.weights_bytes + PROCESS_BYTES, f"{facts.ram_bytes / GIB:.1f} GiB available"
    if facts.ram_bytes < need and not facts.gpus_wanted:
        do = "stop other programs, serve a smaller model, or quantise it (model.quantization)"
        say("memory", f"{have}, one replica needs {need / GIB:.1f}", fault=do)
    else:
        say("memory", have)
    shm = "absent" if facts.shm_bytes is None else f"{facts.shm_bytes / GIB:.2f} GiB free"
    do = "give it 1 GiB (docker run --shm-size=1g): Ray's object store is on disk otherwise"
    say("/dev/shm", shm, warning=do if (facts.shm_bytes or 0) < SMALL_SHM_BYTES else "")
    do = "Serve's own proxy serves then, with more CPU a token" if facts.haproxy_problem else ""
    say("HAProxy", facts.haproxy_problem or "runs", warning=do)
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts.time_s))
    if facts.time_s < facts.newest_file_s - DAY_S:
        do = "set the clock: certificates of the hub and of stores are refused"
        say("clock", f"{now}, before Manta's own files were written", fault=do)
    elif not facts.clock_is_synchronised:
        do = "run an NTP client if Manta runs on several machines, whose times are compared"
        say("clock", f"{now}, not synchronised", warning=do)
    else:
        say("clock", now)


def _judge_gpu(facts: Facts, say: Any) -> None:
    def amiss(check: str, text: str, do: str) -> None:
        say(check, text, **{"fault" if facts.gpus_wanted else "warning": do})

    if facts.torch_cuda is None and (facts.gpus or facts.gpus_wanted):
        amiss("torch build", "for the CPU", "install a CUDA build of PyTorch to use the GPU (docs/gpu.md)")
    else:
        say("torch build", f"for CUDA {facts.torch_cuda}" if facts.torch_cuda else "for the CPU")
    if facts.gpu_problem:
        amiss("GPU", facts.gpu_problem, "install the driver that fits the kernel; in a container, pass the GPU in")
    elif facts.gpus_wanted and not facts.gpus:
        amiss("GPU", "none, and the settings ask for one", "take `gpus` out of the settings, or serve where a GPU is")
    else:
        say("GPU", ", ".join(facts.gpus) or "none: replicas compute on the CPU")
    if facts.gpus:
        do = "put CUDA's nvcc on the PATH: without it FlashInfer's kernels cannot be compiled, and Triton's are used"
        say("nvcc", facts.nvcc or "not found", warning="" if facts.nvcc else do)


def measure(config: str) -> Facts:
    """Look at this machine. ``config``: the settings file."""
    content, settings_problem, host, port = _read(config)
    args = _args(content)
    group = args.get("model")
    model = str(group.get("path") or "") if isinstance(group, dict) else ""
    port_problem = _problem_of(check_port, host, port)
    model_problem = _problem_of(check_model_path, model) if content is not None else ""
    here = bool(model) and not model_problem and local_model(model) is not None
    weights = weights_bytes(model) if here else 0
    gpus, gpu_problem = _gpus()
    return Facts(
        settings=config,
        settings_problem=settings_problem,
        address=f"{host}:{port}",
        port_problem=port_problem,
        port_has_manta=bool(port_problem) and _is_manta(host, port),
        cores=len(os.sched_getaffinity(0)),
        cores_limit=_cores_limit(),
        ram_bytes=_available_ram(),
        shm_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None,
        haproxy_problem=haproxy.unusable(haproxy.found(os.environ), host=host),
        torch_cuda=_torch_cuda(),
        gpus=gpus,
        gpu_problem=gpu_problem,
        gpus_wanted=any(isinstance(each, dict) and each.get("gpus") for each in args.values()),
        nvcc=shutil.which("nvcc"),
        model=model,
        model_problem=model_problem or (f"model.path = {model!r} has no weights" if here and not weights else ""),
        model_is_here=here,
        weights_bytes=weights,
        time_s=time.time(),
        newest_file_s=max(each.stat().st_mtime for each in Path(__file__).parent.glob("*.py")),
        clock_is_synchronised=_clock_is_synchronised(),
        versions=tuple(_installed()),
    )


def _problem_of(check: Any, *args: Any) -> str:
    try:
        check(*args)
    except InvalidConfig as error:
        return str(error)
    return ""


def _read(config: str) -> tuple[Any, str, str, int]:
    """Read the settings file: its content, what is wrong with it, host and port."""
    try:
        file = settings_file.read(config)
        return file.content, "", *file.address
    except InvalidConfig as error:
        return None, str(error), ALL_ADDRESSES, PORT


def _args(content: Any) -> dict[str, Any]:
    """Find the settings of the application that has a model."""
    applications = content.get("applications") if isinstance(content, dict) else None
    found = [each.get("args") for each in applications or () if isinstance(each, dict)]
    return next((args for args in found if isinstance(args, dict) and "model" in args), {})


def _is_manta(host: str, port: int) -> bool:
    try:
        ask.first_model(f"http://{'127.0.0.1' if host == ALL_ADDRESSES else host}:{port}", None)
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


def _available_ram() -> int:
    """Count as replicas/runner/device.py does, without torch."""
    available, limit, used = psutil.virtual_memory().available, _cgroup("memory.max"), _cgroup("memory.current")
    return max(0, min(available, int(limit[0]) - int(used[0]))) if limit and used else int(available)


def _torch_cuda() -> str | None:
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


def _clock_is_synchronised() -> bool:
    """Ask the kernel; true where it does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) != TIME_ERROR)  # modes = 0: reads
    return True


def _installed() -> Iterator[tuple[str, str, str | None]]:
    """List what pyproject.toml asked for when Manta was installed, and what there is."""
    for line in importlib.metadata.requires("manta") or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            installed = None
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                installed = importlib.metadata.version(wanted.name)
            yield wanted.name, str(wanted.specifier), installed


_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "bold red"}


def report(findings: list[Finding], *, as_json: bool) -> int:
    """Print the findings. Return the exit status: 1 if there is a fault."""
    faults, warnings = (sum(each.level is level for each in findings) for level in (Level.FAULT, Level.WARNING))
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
        return bool(faults)
    console = Console(highlight=False, soft_wrap=True)
    for each in findings:
        console.print(Text(f"{each.level:<9}", _COLOURS[each.level]).append(f"{each.check:<13}{each.text}", "default"))
        if each.advice:
            console.print(Text(f"{'':<22}-> {each.advice}"))
    end = f"{faults} fault{'s' * (faults != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    console.print(Text(end, _COLOURS[Level.FAULT if faults else Level.OK]))
    return bool(faults)
