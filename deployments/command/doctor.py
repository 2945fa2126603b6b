"""``manta doctor``: looks at this machine and the settings file, and says what to do before a start fails.

    measure (facts of this machine) ──> judge (pure) ──> lines, or JSON

Owns:      what counts as a fault (Manta cannot start) and what as a warning (it starts, and is slower or less safe).
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
from packaging.requirements import InvalidRequirement, Requirement
from rich.console import Console
from rich.text import Text

from deployments.command import haproxy
from deployments.settings import settings_file
from deployments.settings.places import local_model, nearest_folder
from deployments.settings.settings_file import ALL_ADDRESSES, PORT, check_port
from deployments.watch.terminal import ask
from replicas.errors import InvalidConfig

SHOWN = ("ray", "torch", "transformers", "nixl")  # versions that have a line even if they are right
MODEL_PROCESS_BYTES = 1 << 30  # of a replica beside its weights: Python, torch, Ray, a small KV pool
SMALL_SHM_BYTES = 1 << 30  # Ray's object store moves to /tmp below
PYTHON = (3, 11)
ASKED_S = 10.0  # for nvidia-smi
TIME_ERROR = 5  # adjtimex: the clock is not synchronised
GIB = float(1 << 30)


class Level(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it ("" if nothing)."""

    check: str
    level: Level
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was measured; "" or None where a thing is absent."""

    python: tuple[int, ...]
    settings: str  # path of the file
    settings_problems: tuple[str, ...]
    address: str  # host:port
    port_problem: str
    port_has_manta: bool
    cores: int  # that this process may use
    cores_limit: float | None  # of the container
    ram_bytes: int  # available
    shm_bytes: int | None  # free in /dev/shm
    haproxy_problem: str
    torch_cuda: str | None  # CUDA version of the torch build; None for a CPU build
    gpus: tuple[str, ...]
    gpu_problem: str  # nvidia-smi is there and fails
    gpus_wanted: bool  # by the settings
    nvcc: str | None
    model: str  # as the settings have it
    model_folder: str | None  # None: a hub id, or nothing
    model_files: frozenset[str]  # endings of its files, and config.json
    weights_bytes: int
    model_meant: str  # a similar name
    time_s: float
    newest_file_s: float  # of Manta's own files
    clock_is_synchronised: bool
    versions: tuple[tuple[str, str, str | None], ...]  # (package, wanted, installed)


def judge(facts: Facts) -> list[Finding]:
    """Return a finding for each thing that was looked at, in the order in which a start needs them."""
    return [*_settings(facts), *_machine(facts), *_gpu(facts), *_model(facts), _clock(facts), *_versions(facts)]


def _settings(facts: Facts) -> Iterator[Finding]:
    if facts.settings_problems:
        advice = "give the file's name: manta doctor FILE"
        yield Finding(check="settings", level=Level.FAULT, text="; ".join(facts.settings_problems), advice=advice)
    else:
        yield _ok("settings", f"{facts.settings} (manta check {facts.settings} checks every setting)")
    if facts.port_problem and facts.port_has_manta:
        advice = "stop it before you start another one, or give http_options.port another number"
        yield Finding(check="port", level=Level.WARNING, text=f"Manta serves at {facts.address} already", advice=advice)
    elif facts.port_problem:
        text, _, advice = facts.port_problem.partition("; ")
        yield Finding(check="port", level=Level.FAULT, text=text, advice=advice)
    else:
        yield _ok("port", f"{facts.address} is free")


def _machine(facts: Facts) -> Iterator[Finding]:
    python = ".".join(map(str, facts.python))
    if facts.python[:2] < PYTHON:
        advice = "install a newer Python, then `make clean install PYTHON=python3.11`"
        yield Finding(check="python", level=Level.FAULT, text=f"{python}, 3.11 is needed", advice=advice)
    limit = facts.cores_limit
    if limit is not None and limit < facts.cores:
        text = f"{facts.cores}, of which the container may use {limit:g}: threads will be held up"
        advice = f"set replicas.cpus so that all replicas and routers take at most {max(1, int(limit))}"
        yield Finding(check="cores", level=Level.WARNING, text=text, advice=advice)
    elif facts.cores < 2:
        advice = "give the machine two: router and replica take turns on one"
        yield Finding(check="cores", level=Level.WARNING, text="1", advice=advice)
    else:
        yield _ok("cores", str(facts.cores))
    need, have = facts.weights_bytes + MODEL_PROCESS_BYTES, f"{facts.ram_bytes / GIB:.1f} GiB available"
    if facts.ram_bytes < need and not facts.gpus_wanted:
        text = f"{have}, one replica of {facts.model} needs {need / GIB:.1f}"
        advice = "stop other programs, or serve a smaller model, or quantise it (model.quantization)"
        yield Finding(check="memory", level=Level.FAULT, text=text, advice=advice)
    else:
        yield _ok("memory", have)
    if facts.shm_bytes is None or facts.shm_bytes < SMALL_SHM_BYTES:
        text = "absent" if facts.shm_bytes is None else f"{facts.shm_bytes / GIB:.2f} GiB free"
        advice = "give it 1 GiB (docker run --shm-size=1g): Ray's object store is on disk otherwise, which is slow"
        yield Finding(check="/dev/shm", level=Level.WARNING, text=text, advice=advice)
    else:
        yield _ok("/dev/shm", f"{facts.shm_bytes / GIB:.1f} GiB free")
    if facts.haproxy_problem:
        advice = "without it Serve's own proxy serves, with more CPU a token"
        yield Finding(check="HAProxy", level=Level.WARNING, text=facts.haproxy_problem, advice=advice)
    else:
        yield _ok("HAProxy", "runs")


def _gpu(facts: Facts) -> Iterator[Finding]:
    build = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "built for the CPU"
    if facts.torch_cuda is None and (facts.gpus or facts.gpus_wanted):
        level = Level.FAULT if facts.gpus_wanted else Level.WARNING
        advice = "install a CUDA build of PyTorch to use the GPU (docs/gpu.md)"
        yield Finding(check="torch build", level=level, text=build, advice=advice)
    else:
        yield _ok("torch build", build)
    if facts.gpu_problem:
        level = Level.FAULT if facts.gpus_wanted else Level.WARNING
        advice = "install or reload the driver that fits the kernel; in a container, pass the GPU in"
        yield Finding(check="GPU", level=level, text=facts.gpu_problem, advice=advice)
    elif facts.gpus_wanted and not facts.gpus:
        advice = "take `gpus` out of the settings, or serve where a GPU is"
        yield Finding(check="GPU", level=Level.FAULT, text="none, and the settings ask for one", advice=advice)
    else:
        yield _ok("GPU", ", ".join(facts.gpus) or "none: replicas compute on the CPU")
    if facts.gpus and facts.nvcc is None:
        advice = "put CUDA's nvcc on the PATH: FlashInfer's kernels cannot be compiled, Triton's attention is used"
        yield Finding(check="nvcc", level=Level.WARNING, text="not found", advice=advice)
    elif facts.gpus:
        yield _ok("nvcc", str(facts.nvcc))


def _model(facts: Facts) -> Iterator[Finding]:
    kinds = facts.model_files
    text, advice = "", ""
    if facts.settings_problems:
        return
    if not facts.model:
        text, advice = "the settings name none", "set model.path"
    elif facts.model_folder is None and (facts.model.startswith((".", "/", "~", "models/")) or "/" not in facts.model):
        text = f"there is no folder {facts.model}{facts.model_meant}"
        advice = "`make model` makes the embedded one; a hub id has the form owner/name"
    elif facts.model_folder is not None and ".gguf" not in kinds and "config.json" not in kinds:
        text, advice = f"{facts.model_folder} has no config.json", "give the folder of a checkpoint of Transformers"
    elif facts.model_folder is not None and not kinds & {".gguf", ".safetensors"}:
        text, advice = f"{facts.model_folder} has no weights", "fetch its .safetensors files, too"
    if text:
        yield Finding(check="model", level=Level.FAULT, text=text, advice=advice)
    elif facts.model_folder is None:
        yield _ok("model", f"{facts.model}, fetched from the Hugging Face hub at the first start")
    else:
        yield _ok("model", f"{facts.model_folder}, weights of {facts.weights_bytes / GIB:.2f} GiB")


def _clock(facts: Facts) -> Finding:
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(facts.time_s))
    if facts.time_s < facts.newest_file_s - 86400:
        advice = "set the clock: certificates of the hub and of stores are refused"
        return Finding(check="clock", level=Level.FAULT, text=f"{text}, older than Manta's own files", advice=advice)
    if not facts.clock_is_synchronised:
        advice = "run an NTP client if Manta runs on several machines: their times are compared in views and traces"
        return Finding(check="clock", level=Level.WARNING, text=f"{text}, not synchronised", advice=advice)
    return _ok("clock", text)


def _versions(facts: Facts) -> Iterator[Finding]:
    for name, wanted, installed in facts.versions:
        right = installed is not None and Requirement(f"{name}{wanted}").specifier.contains(installed, prereleases=True)
        if not right:
            text = f"{installed or 'not installed'}, {wanted or 'any version'} is needed"
            advice = f"{Path(sys.executable)} -m pip install '{name}{wanted}', or `make clean install`"
            yield Finding(check=name, level=Level.FAULT, text=text, advice=advice)
        elif name in SHOWN:
            yield _ok(name, str(installed))


def _ok(check: str, text: str) -> Finding:
    return Finding(check=check, level=Level.OK, text=text)


def measure(config: str) -> Facts:
    """Look at this machine. ``config``: the settings file."""
    content, problems, host, port = _read(config)
    args = _args(content)
    path = (args.get("model") or {}).get("path", "") if isinstance(args.get("model"), dict) else ""
    model = str(path or "")
    found = local_model(model) if model else None
    files = [] if found is None else [found] if found.is_file() else [*filter(Path.is_file, found.iterdir())]
    weights = [each for each in files if each.suffix in (".safetensors", ".gguf")]
    port_problem = ""
    try:
        check_port(host, port)
    except InvalidConfig as error:
        port_problem = str(error)
    gpus, gpu_problem = _gpus()
    sources = Path(__file__).parent.glob("*.py")
    return Facts(
        python=tuple(sys.version_info[:3]),
        settings=config,
        settings_problems=tuple(problems),
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
        gpus_wanted=any(isinstance(group, dict) and group.get("gpus") for group in args.values()),
        nvcc=shutil.which("nvcc") or next(iter(map(str, Path("/usr/local/cuda/bin").glob("nvcc"))), None),
        model=model,
        model_folder=None if found is None else str(found),
        model_files=frozenset("config.json" if each.name == "config.json" else each.suffix for each in files),
        weights_bytes=sum(each.stat().st_size for each in weights),
        model_meant=nearest_folder(model) if model and found is None else "",
        time_s=time.time(),
        newest_file_s=max(each.stat().st_mtime for each in sources),
        clock_is_synchronised=_clock_is_synchronised(),
        versions=tuple(_installed()),
    )


def _read(config: str) -> tuple[Any, list[str], str, int]:
    """Read the settings file: its content, what is wrong with it, host and port."""
    try:
        file = settings_file.read(config)
        return file.content, [], *file.address
    except InvalidConfig as error:
        return None, list(error.problems), ALL_ADDRESSES, PORT


def _args(content: Any) -> dict[str, Any]:
    """Find the settings of the application that has a model."""
    applications = content.get("applications") if isinstance(content, dict) else None
    listed = applications if isinstance(applications, list) else []
    found = [each.get("args") for each in listed if isinstance(each, dict)]
    return next((args for args in found if isinstance(args, dict) and "model" in args), {})


def _is_manta(host: str, port: int) -> bool:
    asked = "127.0.0.1" if host == ALL_ADDRESSES else host
    try:
        ask.first_model(f"http://{asked}:{port}", os.environ.get("MANTA_API_KEY"))
    except ask.Unanswered as error:
        return error.status == ask.REFUSED
    return True


def _cgroup(name: str) -> list[str]:
    try:
        return Path("/sys/fs/cgroup", name).read_text().split()
    except OSError:
        return []


def _cores_limit() -> float | None:
    told = _cgroup("cpu.max")  # quota and period
    return int(told[0]) / int(told[1]) if len(told) == 2 and told[0] != "max" else None


def _available_ram() -> int:
    """As replicas/runner/device.py counts it, without torch."""
    available, limit, used = psutil.virtual_memory().available, _cgroup("memory.max"), _cgroup("memory.current")
    within = int(limit[0]) - int(used[0]) if limit and used and limit[0] != "max" else available
    return max(0, min(available, within))


def _torch_cuda() -> str | None:
    """Read the CUDA version of the build from torch's files."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    with contextlib.suppress(OSError):
        told = re.search(r"^cuda\b.*= '([\d.]+)'", Path(found.origin).with_name("version.py").read_text(), re.MULTILINE)
        return told[1] if told else None
    return None


def _gpus() -> tuple[tuple[str, ...], str]:
    """Ask nvidia-smi: a line for each GPU, and why it failed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return (), ""
    asked = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=ASKED_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return (), f"nvidia-smi does not run ({error})"
    said = [line.strip() for line in told.stdout.splitlines() if line.strip()]
    return ((), f"nvidia-smi fails: {' '.join(said) or told.stderr.strip()}") if told.returncode else (tuple(said), "")


def _clock_is_synchronised() -> bool:
    """Ask the kernel; true where it does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # modes = 0: reads only
        return bool(state != TIME_ERROR)
    return True


def _installed() -> Iterator[tuple[str, str, str | None]]:
    """List what pyproject.toml asks for, as it was installed, and what there is."""
    try:
        asked = importlib.metadata.requires("manta") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in asked:
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                yield wanted.name, str(wanted.specifier), _version(wanted.name)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAULT: "bold red"}


def report(findings: list[Finding], *, as_json: bool) -> int:
    """Print the findings. Return the exit status: 1 if there is a fault."""
    faults, warnings = (sum(each.level is level for each in findings) for level in (Level.FAULT, Level.WARNING))
    if as_json:
        print(json.dumps([dataclasses.asdict(each) for each in findings], indent=2))
        return 1 if faults else 0
    console = Console(highlight=False, soft_wrap=True)
    for each in findings:
        console.print(Text(f"{each.level:<9}", _COLOURS[each.level]).append(f"{each.check:<13}{each.text}", ""))
        if each.advice:
            console.print(Text(f"{'':<22}-> {each.advice}"))
    end = f"{faults} fault{'s' * (faults != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    console.print(Text(end, _COLOURS[Level.FAULT if faults else Level.OK]))
    return 1 if faults else 0
