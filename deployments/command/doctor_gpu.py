"""``manta doctor --gpu``: what a GPU's first start would stop at, in the order in which it would (docs/gpu.md).

Owns:      what is a fault for the fast path: driver, FlashInfer and what compiles it, NIXL's transports, free memory.
Never:     imports torch or flashinfer here: a broken one must be reported. `trial` does, in a process of its own.
"""

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.command.doctor import ASKED_S, Finding, Level, torch_cuda

COMPILED_S = 900.0  # for one attention module
FREE_SHARE = 0.9  # of a GPU's memory; with less, another process holds some
HEADERS = ("cuda_runtime.h", "cub/cub.cuh", "cuda/std/cstdint", "curand_kernel.h", "cooperative_groups.h")
PACKAGES = ("flashinfer-python", "flashinfer-jit-cache", "triton")
TRIAL = """
import torch
from replicas.attention.base import AttentionSpec
from replicas.attention.choice import make_attention
from replicas.memory.pool import MHATokenToKVPool
pool = MHATokenToKVPool(4, 16, 1, 2, 64, torch.bfloat16, torch.device("cuda", 0))
spec = AttentionSpec(pool=pool, dtype=torch.bfloat16, num_heads=8, num_kv_heads=2, head_dim=64)
_, choice = make_attention("auto", spec)
print(choice.name, choice.why)
"""
Run = Callable[[list[str], float], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was measured. Versions are as they are printed; "" where there is none."""

    torch_cuda: str  # for which torch was built
    driver_cuda: str  # the newest that the driver runs
    gpus: tuple[tuple[str, int, int], ...]  # name, MiB in all, MiB free
    nvcc: str
    toolkit: str  # its folder
    lacks: tuple[str, ...]  # of the toolkit's libraries and headers
    versions: Mapping[str, str]  # of PACKAGES
    nixl_cuda: tuple[str, ...]  # CUDA majors for which NIXL's transports are there
    has_compiler: bool  # of C, and Python's headers


def findings(facts: Facts, trial: Callable[[], str | None]) -> Iterator[Finding]:
    """Judge ``facts``. ``trial``: compiles and runs one attention step, "backend why" or None; called on a GPU only."""
    wanted, driver = facts.torch_cuda, facts.driver_cuda
    if not wanted:
        yield _fault("torch build", "for the CPU", "install a CUDA build of PyTorch: `make clean install`")
    else:
        yield Finding("torch build", f"for CUDA {wanted}")
    if not driver:
        yield _fault("driver", "nvidia-smi shows none", "serve where a GPU is; in a container, pass it in")
    elif wanted and _major(driver) < _major(wanted):
        text = f"runs CUDA {driver} at most, torch is for {wanted}"
        yield _fault("driver", text, "update it, or install a torch built for the driver's CUDA")
    else:
        yield Finding("driver", f"runs CUDA {driver}")
    for index, (name, total, free) in enumerate(facts.gpus):
        text = f"{name}, {free:,} of {total:,} MiB free"
        if free >= FREE_SHARE * total:
            yield Finding(f"GPU {index}", text)
        else:
            advice = "end what holds the rest, or lower cache.mem_fraction_static"
            yield Finding(f"GPU {index}", text, Level.WARNING, advice)
    yield from _compilers(facts)
    flashinfer, majors = facts.versions.get("flashinfer-python", ""), ", ".join(facts.nixl_cuda)
    if flashinfer:
        yield Finding("FlashInfer", flashinfer)
    else:
        yield _fault("FlashInfer", "not installed: Triton's kernels are used", "make install-gpu")
    if wanted and str(_major(wanted)) not in facts.nixl_cuda:
        text = f"has cuda transports for CUDA {majors or 'none'}, torch is for {wanted}"
        yield _fault("NIXL", text, f"{sys.executable} -m pip install nixl-cu{_major(wanted)}")
    else:
        yield Finding("NIXL", f"cuda transports for CUDA {majors or 'none'}")
    if facts.gpus and wanted and flashinfer:
        told = trial()
        if told is not None and told.startswith("flashinfer"):
            yield Finding("attention", told)
        else:
            advice = "see `Which attention runs` in docs/gpu.md, or set attention: triton"
            yield _fault("attention", told or "a trial step failed", advice)


def _compilers(facts: Facts) -> Iterator[Finding]:
    if facts.has_compiler:
        yield Finding("C compiler", "and Python's headers are there")
    else:
        yield _fault("C compiler", "it or Python's headers are missing", "apt install gcc python3-dev, for Triton")
    wanted, built = facts.torch_cuda, facts.versions.get("flashinfer-jit-cache", "")
    if built:
        flashinfer = facts.versions.get("flashinfer-python", "")
        if built.split("+")[0] == flashinfer:
            yield Finding("nvcc", f"not needed: flashinfer-jit-cache {built}")
        else:
            text = f"is {built}, flashinfer-python is {flashinfer or 'not installed'}"
            yield _fault("jit-cache", text, "install the same version of both")
        return
    if not facts.nvcc:
        yield _fault("nvcc", "not found", "install the whole CUDA toolkit, or flashinfer-jit-cache (docs/gpu.md)")
        return
    if wanted and _major(facts.nvcc) != _major(wanted):
        text = f"{facts.nvcc}, torch is for {wanted}"
        yield _fault("nvcc", text, "install the toolkit of torch's CUDA and set CUDA_HOME")
    else:
        yield Finding("nvcc", facts.nvcc)
    if facts.lacks:
        text = f"{facts.toolkit} lacks {', '.join(facts.lacks)}"
        yield _fault("toolkit", text, "install the whole toolkit: cudart, CCCL and curand with their headers")
    else:
        yield Finding("toolkit", facts.toolkit)


def _fault(check: str, text: str, advice: str) -> Finding:
    return Finding(check, text, Level.FAULT, advice)


def _major(version: str) -> int:
    return int(version.split(".")[0])


def examine(run: Run | None = None, environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Look at this machine's GPUs. ``run``: runs a command, its output or None; ``environment``: PATH, CUDA_HOME."""
    run = run or _output
    return findings(measure(run, os.environ if environment is None else environment), lambda: _trial(run))


def measure(run: Run, environment: Mapping[str, str]) -> Facts:
    """Ask the driver, the toolkit and the installed packages."""
    newest = re.search(r"CUDA[\w ]* Version\s*:\s*([\d.]+)", run(["nvidia-smi"], ASKED_S) or "")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    lines = [line.rsplit(",", 2) for line in (run(query, ASKED_S) or "").splitlines()]
    gpus = tuple((line[0], int(line[1]), int(line[2])) for line in lines if len(line) == 3)
    toolkit = _toolkit(environment)
    told = run([str(toolkit / "bin" / "nvcc"), "--version"], ASKED_S) if toolkit is not None else None
    release = re.search(r"release ([\d.]+)", told or "")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    compilers = [shutil.which(name, path=environment.get("PATH")) for name in ("cc", "gcc")]
    return Facts(
        torch_cuda=torch_cuda() or "",
        driver_cuda=newest[1] if newest else "",
        gpus=gpus,
        nvcc=release[1] if release else "",
        toolkit=str(toolkit or ""),
        lacks=() if toolkit is None else tuple(_lacks(toolkit)),
        versions={name: _version(name) for name in PACKAGES},
        nixl_cuda=tuple(major for major in ("12", "13") if _has_cuda_transports(f"nixl-cu{major}")),
        has_compiler=headers.exists() and any(compilers),
    )


def _toolkit(environment: Mapping[str, str]) -> Path | None:
    """Find the folder of the CUDA toolkit as FlashInfer does: CUDA_HOME, nvcc on PATH, /usr/local/cuda."""
    on_path = shutil.which("nvcc", path=environment.get("PATH"))
    tried = [environment.get("CUDA_HOME"), on_path and Path(on_path).resolve().parent.parent, "/usr/local/cuda"]
    return next((Path(each) for each in tried if each and Path(each, "bin", "nvcc").exists()), None)


def _lacks(toolkit: Path) -> Iterator[str]:
    libraries, includes = ("lib64", "lib", "targets/x86_64-linux/lib"), ("include", "include/cccl")
    if not any((toolkit / folder / "libcudart.so").exists() for folder in libraries):
        yield "libcudart.so"
    yield from (each for each in HEADERS if not any((toolkit / folder / each).exists() for folder in includes))


def _version(package: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def _has_cuda_transports(package: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return any("libuct_cuda" in file.name for file in importlib.metadata.files(package) or ())
    return False


def _output(command: list[str], timeout_s: float) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    return None


def _trial(run: Run) -> str | None:
    told = run([sys.executable, "-c", TRIAL], COMPILED_S)
    return told.strip().splitlines()[-1] if told and told.strip() else None
