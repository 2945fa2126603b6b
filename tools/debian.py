"""Programs of Debian's packages, fetched without root into the git-ignored ``.tools``: Prometheus, Chromium.

Owns:      ``.tools/apt`` (package lists of its own: the machine's are neither read nor changed) and
           ``.tools/<package>``, what was unpacked.
Never:     installs anything into the system or runs a package's scripts; so no services start.
Invariant: a ``.tools/<package>`` that exists is whole: it is unpacked under another name and renamed at the end.

    on PATH? ──no──> .tools/<package>? ──no──> apt-get update, download ──> dpkg -x ──> rename
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1] / ".tools"
REQUIRED = "MANTA_REQUIRE_TOOLS"  # set: a program that cannot be had fails the tests that need it
TIMEOUT_S = 300


class DebianError(Exception):
    """A program could not be had; the message says why and what to do."""


def ensure(
    packages: Sequence[str], binary: str, *, dependencies: bool = False, root: Path = ROOT, path: str | None = None
) -> Path | None:
    """The program ``binary`` (its name): the one on PATH, else out of ``packages``, fetched once. None: not to be had.

    Args: packages: Debian's, the one with the program first; dependencies: fetch also what they depend on and this
          machine lacks (then run the program with ``environment(program)``); path: search path instead of PATH's.
    With MANTA_REQUIRE_TOOLS set it raises DebianError instead of returning None; why it failed goes to stderr.
    """
    installed = shutil.which(binary, path=path)
    if installed:
        return Path(installed)
    folder = root / packages[0]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(root / ".lock"):
            if not folder.exists():
                _fetch(packages, folder, dependencies=dependencies)
        return _program(folder, binary)
    except DebianError as error:
        if os.environ.get(REQUIRED):
            raise
        print(f"{binary}: {error}", file=sys.stderr)
        return None


def environment(program: Path, base: dict[str, str] | None = None) -> dict[str, str]:
    """Environment to run ``program`` in: libraries that were unpacked beside it are found."""
    values = dict(os.environ if base is None else base)
    top = next((each for each in program.parents if each.parent.name == ROOT.name), None)
    if top is not None:
        found = {str(each.parent) for each in (top / "usr" / "lib").rglob("*.so*")}
        values["LD_LIBRARY_PATH"] = ":".join([*sorted(found), *filter(None, [values.get("LD_LIBRARY_PATH", "")])])
    return values


def _fetch(packages: Sequence[str], folder: Path, *, dependencies: bool) -> None:
    for command in ("apt-get", "dpkg"):
        if shutil.which(command) is None:
            raise DebianError(
                f"there is no {command}, so {packages[0]} cannot be fetched: install it yourself and put it on PATH"
            )
    print(f"fetching {' '.join(packages)} from the Debian archive into {folder}", file=sys.stderr)
    apt = _apt_command(folder.parent / "apt")
    _run([*apt, "update"])
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        _run([*apt, "download", *(_with_dependencies(apt, packages) if dependencies else packages)], cwd=work)
        for archive in sorted(work.glob("*.deb")):
            _run(["dpkg", "-x", str(archive), str(work / "unpacked")])
            archive.unlink()
        (work / "unpacked").rename(folder)


def _apt_command(state: Path) -> list[str]:
    """apt-get with lists and cache of our own; no root, no locks but ours."""
    for each in ("lists/partial", "cache/archives/partial"):
        (state / each).mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state / "cache",
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "root",  # root would give the files to a user who may not write here
    }
    return ["apt-get", "-qq", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]


def _with_dependencies(apt: list[str], packages: Sequence[str]) -> list[str]:
    """``packages`` and what they need and this machine lacks: lines are 'URI' NAME_VERSION_ARCH.deb SIZE HASH."""
    lines = _run([*apt, "install", "--print-uris", "--yes", "--no-install-recommends", *packages]).splitlines()
    names = {line.split()[1].split("_")[0] for line in lines if line.startswith("'")}
    return sorted(names | set(packages))


def _run(command: list[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())[-400:]
        raise DebianError(f"`{command[0]} {command[-1]}` failed: {said}; is the archive reachable?") from error
    except subprocess.TimeoutExpired as error:
        raise DebianError(f"`{command[0]} {command[-1]}` took more than {TIMEOUT_S} s; is it reachable?") from error
    return done.stdout


def _program(folder: Path, binary: str) -> Path:
    for place in (f"usr/lib/{folder.name}", "usr/bin", "usr/sbin"):  # Chromium's usr/bin is a script with fixed paths
        if (folder / place / binary).is_file():
            return folder / place / binary
    raise DebianError(f"{folder} holds no program {binary}: delete the folder to fetch it again")


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.debian", description="Fetch a program of a Debian package.")
    parser.add_argument("binary", help="the program's name, such as promtool")
    parser.add_argument("packages", nargs="+", help="Debian packages, the one with the program first")
    parser.add_argument("--dependencies", action="store_true", help="also what they depend on and this machine lacks")
    args = parser.parse_args()
    try:
        program = ensure(args.packages, args.binary, dependencies=args.dependencies)
    except DebianError as error:
        raise SystemExit(f"{args.binary}: {error} ({REQUIRED} is set)") from error
    if program is None:
        print(f"{args.binary}: not to be had here; tests that need it are skipped", file=sys.stderr)
    else:
        print(program)


if __name__ == "__main__":
    main()
