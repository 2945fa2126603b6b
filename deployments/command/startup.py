"""The progress of a start: one block that is redrawn in place on a terminal, one line per phase elsewhere.

Owns:      the phase of each replica, read from its log file on this machine. A replica on another machine, or without a
           readable file, is "starting", which is all that Serve knows.
Never:     asks Ray or Serve (serve.py does); decides when the start is over.
Thread:    the main thread of `manta serve`; on a terminal rich draws the block on its own thread.
"""

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deployments.logs import WAITS_FOR_REPLICA
from deployments.watch.observatory.serve_details import our_errors
from deployments.watch.terminal.keyboard import on_terminal

READY = "ready"
_LOADING = re.compile(rb"loading weights: (\d+ % \([^)]*\))")
_ATTENTION = re.compile(rb"attention: (?:(compiling .*)|(\w+, .*))")
_PHASES = (  # text in a replica's log file -> its phase; the last match counts
    (b"Started initializing replica", "setting up"),
    (WAITS_FOR_REPLICA.encode(), WAITS_FOR_REPLICA),
    (b" weights: ", "warming up"),
    (b"warm-up: ", "making its KV pool"),
    (b"Finished initializing replica", READY),
)
_SAID_CHARS = 300
_FIGURES = re.compile(r", \d+ % .*")
_NO_PLACE = re.compile(
    r"has (\d+) replicas that have taken .* to be scheduled.*required for each replica: (.*), total resources "
    r"available: (.*?)\. Use"
)


class Deployment(Protocol):
    """The parts of Serve's status of a deployment that are shown."""

    @property
    def replica_states(self) -> Mapping[str, int]: ...
    @property
    def message(self) -> str: ...


class ReplicaLogs:
    """The phases of the replicas whose log files appeared in ``folder`` after construction."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._raylet = folder.with_name("raylet.err")  # Ray starts the replicas' processes; what fails there is here
        self._told_bytes = self._raylet.stat().st_size if self._raylet.is_file() else 0
        self._old = {file.name for file in self._files()}
        self._read: dict[str, int] = {}  # bytes, by file
        self._phases: dict[str, str] = {}  # by file, in order of the latest change

    def look(self) -> None:
        """Read the new lines of all log files."""
        for file in self._files():
            if file.name not in self._old:
                with contextlib.suppress(OSError):
                    self._look_at(file)

    def phases(self, application: str, deployment: str) -> dict[str, str]:
        """Map replica ids of a deployment to their phases, the latest change first."""
        start = f"replica_{application}_{deployment}_"
        found = {
            name.removeprefix(start).removesuffix(".log"): phase
            for name, phase in reversed(self._phases.items())
            if name.startswith(start)
        }
        return {replica_id: phase for replica_id, phase in found.items() if "_" not in replica_id}

    def no_worker(self) -> str:
        """Return the last line that Ray has written since construction on what it cannot start; "" if none."""
        with contextlib.suppress(OSError), self._raylet.open("rb") as opened:
            opened.seek(self._told_bytes)
            return opened.read().decode(errors="replace").strip().rpartition("\n")[2][:_SAID_CHARS]
        return ""

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("replica_*.log"))

    def _look_at(self, file: Path) -> None:
        with file.open("rb") as opened:
            opened.seek(self._read.get(file.name, 0))
            new = opened.read()
        whole = new[: new.rfind(b"\n") + 1]  # the rest of a line comes later
        self._read[file.name] = self._read.get(file.name, 0) + len(whole)
        for line in whole.splitlines():
            phase = _phase(line)
            if phase is not None:
                self._phases.pop(file.name, None)
                self._phases[file.name] = phase


def hopeless(text: str) -> bool:
    """Whether a message of Serve has an error of ours that another try cannot fix."""
    return any(error.startswith(("InvalidConfig:", "UnsupportedModel:")) for error in our_errors(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentProgress:
    """The progress of one deployment."""

    name: str
    text: str  # the current state, with figures
    phases: tuple[str, ...]  # of its replicas, without figures: a new one is printed


def lines(application: str, deployments: Mapping[str, Deployment], logs: ReplicaLogs) -> dict[str, DeploymentProgress]:
    """List the progress of one application, by deployment."""
    if not deployments:
        return {application: DeploymentProgress(name=application, text="being built", phases=("being built",))}
    return {
        f"{application}/{name}": _far(f"{application}: {name}", each, logs.phases(application, name), logs.no_worker())
        for name, each in deployments.items()
    }


class StartProgress:
    """The progress of a start, one block on a terminal until `close`, and lines elsewhere and afterwards."""

    def __init__(self, out: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._out = sys.stdout if out is None else out
        self._clock = clock
        self._started_s = clock()
        self._said: list[str] = []
        self._shown: dict[str, list[str]] = {}  # deployment -> the phases that were printed
        self._now: list[str] = []
        self._live: Live | None = None
        if on_terminal(self._out):
            console = Console(file=self._out)
            self._live = Live(console=console, get_renderable=self._block, transient=True, refresh_per_second=4)
            self._live.start()

    def say(self, text: str) -> None:
        """Print a line with the time."""
        line = f"[{self._clock() - self._started_s:5.1f} s] {text}"
        if self._live is not None:
            self._said.append(line)
        else:
            print(line, file=self._out, flush=True)

    def show(self, now: Mapping[str, DeploymentProgress]) -> None:
        """Show the current progress, by deployment."""
        self._now = [f"{line.name}: {line.text}" for line in now.values()]
        if self._live is not None:
            return
        for key, line in now.items():
            known = self._shown.setdefault(key, [])
            for phase in line.phases:
                if phase not in known:
                    known.append(phase)
                    self.say(f"{line.name}: {phase}")

    def close(self) -> None:
        """Remove the block; a second call does nothing."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _block(self) -> Text:
        return Text("\n".join([*self._said, *(f"  {line}" for line in self._now), f"[{self._elapsed_s:5.1f} s] ..."]))

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._started_s


def _far(name: str, deployment: Deployment, phases: Mapping[str, str], no_worker: str) -> DeploymentProgress:
    states = deployment.replica_states
    num, starting = sum(states.values()), states.get("STARTING", 0)
    said = _message(deployment, no_worker)
    if not num:
        waits = "waiting for Serve to start it"
        phases_said = (waits, said) if said else (waits,)
        return DeploymentProgress(name=name, text=f"{waits}{said and f' ({said})'}", phases=phases_said)
    running = states.get("RUNNING", 0)
    started = [replica_id for replica_id, phase in phases.items() if phase == READY]
    on_their_way = [(replica_id, "has started") for replica_id in started[: max(len(started) - running, 0)]]
    # the files of replicas that failed to start are among these, but changed earlier
    on_their_way += [(replica_id, phase) for replica_id, phase in phases.items() if phase != READY]
    told = sorted(on_their_way[:starting])
    parts = [f"{running} of {num} ready", *(f"{replica_id} {phase}" for replica_id, phase in told)]
    if starting > len(told):
        parts.append(f"{starting - len(told)} starting")
    parts += [
        f"{count} {state.lower()}" for state, count in sorted(states.items()) if state not in ("RUNNING", "STARTING")
    ]
    reached = [_FIGURES.sub("", phase) for _, phase in told if phase != "has started"] + parts[:1] * bool(running)
    text = "; ".join(parts) + (f" ({said})" if said else "")
    return DeploymentProgress(name=name, text=text, phases=(*reached, *([said] if said else [])))


def _message(deployment: Deployment, no_worker: str) -> str:
    """Shorten the message of Serve: that it finds no place for a replica, or that one failed, and why. ``no_worker``:
    what Ray has written meanwhile: it takes the place of a process that it cannot start, and tries for ever."""
    no_place = _NO_PLACE.search(deployment.message)
    if no_place is not None:
        count = f"{no_place[1]} replica{'' if no_place[1] == '1' else 's'}"
        return f"no place yet for {count}: each needs {no_place[2]}, and Ray has {no_place[3]} free" + (
            f"; Ray's raylet.err: {no_worker}" if no_worker else ""
        )
    first = deployment.message.strip().partition("\n")[0].removesuffix(" Error:")
    if "to initialize" in first:
        return ""  # "takes longer than 30 s", which the time shows
    said = ". ".join([part for part in (first.removesuffix("."), *our_errors(deployment.message)) if part])
    return said if len(said) <= _SAID_CHARS else f"{said[:_SAID_CHARS]} ..."


def _phase(line: bytes) -> str | None:
    if line.startswith(b"{"):  # observability.log_format: json
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = str(json.loads(line)["message"]).encode()
    loading = _LOADING.search(line)
    if loading is not None:
        return f"loading weights, {loading[1].decode(errors='replace')}"
    attention = _ATTENTION.search(line)
    if attention is not None:
        compiling, chosen = (part and part.decode(errors="replace")[:_SAID_CHARS] for part in attention.groups())
        return compiling or f"warming up, attention: {chosen}"
    return next((phase for needle, phase in reversed(_PHASES) if needle in line), None)
