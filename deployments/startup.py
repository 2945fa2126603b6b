"""What a start is waiting for: a line a deployment, drawn in place on a terminal, said on change elsewhere.

Owns:      how far each replica is, as its log file on this machine tells; a replica on another machine, or one whose
           file cannot be read, is "starting", which is what Serve knows.
Never:     asks Ray or Serve (serve.py does); decides when the start is over.
Thread:    the main thread of `python -m deployments serve`.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deployments.logs import WAITS_FOR_REPLICA
from deployments.terminal.top import on_terminal

READY = "ready"
_LOADING = re.compile(rb"loading weights: (\d+ % \([^)]*\))")
_ATTENTION = re.compile(rb"attention: (?:(compiling .*)|(\w+, .*))")
_PHASES = (  # what a replica's log file says -> how far it is; the last that it says counts
    (b"Started initializing replica", "setting up"),
    (WAITS_FOR_REPLICA.encode(), WAITS_FOR_REPLICA),
    (b" weights: ", "warming up"),
    (b"warm-up: ", "making its KV pool"),
    (b"Finished initializing replica", READY),
)
_SAID_CHARS = 300
_OUR_ERROR = re.compile(r"^replicas\.errors\.(\w+: .*(?:\n[a-z][\w.]*(?: = .*|: .*))*)", re.MULTILINE)


class Deployment(Protocol):
    """Of Serve's status."""

    @property
    def replica_states(self) -> Mapping[str, int]: ...
    @property
    def message(self) -> str: ...


class ReplicaLogs:
    """How far the replicas are whose log files are in ``folder`` and were not when this was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._old = {file.name for file in self._files()}
        self._read: dict[str, int] = {}  # bytes, by file
        self._phases: dict[str, str] = {}  # by file; the file that spoke last is last

    def look(self) -> None:
        """Read what is new."""
        for file in self._files():
            if file.name not in self._old:
                with contextlib.suppress(OSError):
                    self._look_at(file)

    def phases(self, application: str, deployment: str) -> dict[str, str]:
        """Replica id -> how far it is, whoever spoke last first."""
        start = f"replica_{application}_{deployment}_"
        found = {
            name.removeprefix(start).removesuffix(".log"): phase
            for name, phase in reversed(self._phases.items())
            if name.startswith(start)
        }
        return {replica_id: phase for replica_id, phase in found.items() if "_" not in replica_id}

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


def our_errors(text: str) -> list[str]:
    """What our own errors say in Serve's account of them, each once; some have several lines."""
    return list(dict.fromkeys(_OUR_ERROR.findall(text)))


def hopeless(text: str) -> bool:
    """Whether Serve's account has an error of ours that another try cannot mend."""
    return any(error.startswith(("InvalidConfig:", "UnsupportedModel:")) for error in our_errors(text))


def lines(application: str, deployments: Mapping[str, Deployment], logs: ReplicaLogs) -> dict[str, str]:
    """What is to be said of one application, by what it is about."""
    if not deployments:
        return {application: f"{application}: being built"}
    return {
        f"{application}/{name}": f"{application}: {name}: {_far(each, logs.phases(application, name))}"
        for name, each in deployments.items()
    }


@contextlib.contextmanager
def board(say: Callable[[str], None]) -> Iterator[Callable[[Mapping[str, str]], None]]:
    """A function that shows lines: in place on a terminal, and gone afterwards; elsewhere each line when it changes."""
    if not on_terminal(sys.stdout):
        said: dict[str, str] = {}

        def tell(now: Mapping[str, str]) -> None:
            for key, line in now.items():
                if said.get(key) != line:
                    said[key] = line
                    say(line)

        yield tell
        return
    with Live(console=Console(), transient=True, auto_refresh=False) as live:
        yield lambda now: live.update(Text("\n".join(f"  {line}" for line in now.values())), refresh=True)


def _far(deployment: Deployment, phases: Mapping[str, str]) -> str:
    states = deployment.replica_states
    num, starting = sum(states.values()), states.get("STARTING", 0)
    if not num:
        return _with_message("waiting for Serve to start it", deployment)
    running = states.get("RUNNING", 0)
    started = [replica_id for replica_id, phase in phases.items() if phase == READY]
    on_their_way = [(replica_id, "has started") for replica_id in started[: max(len(started) - running, 0)]]
    # files of replicas that failed to start are among these, and have been silent for longer
    on_their_way += [(replica_id, phase) for replica_id, phase in phases.items() if phase != READY]
    told = [f"{replica_id} {phase}" for replica_id, phase in sorted(on_their_way[:starting])]
    parts = [f"{running} of {num} ready", *told]
    if starting > len(told):
        parts.append(f"{starting - len(told)} starting")
    parts += [
        f"{count} {state.lower()}" for state, count in sorted(states.items()) if state not in ("RUNNING", "STARTING")
    ]
    return _with_message("; ".join(parts), deployment)


def _with_message(text: str, deployment: Deployment) -> str:
    """What Serve has to say: that it finds no place for a replica, or that one failed, and why."""
    first = deployment.message.strip().partition("\n")[0].removesuffix(" Error:")
    said = ". ".join([first.removesuffix("."), *our_errors(deployment.message)])[:_SAID_CHARS]
    return f"{text} ({said})" if said else text


def _phase(line: bytes) -> str | None:
    loading = _LOADING.search(line)
    if loading is not None:
        return f"loading weights, {loading[1].decode(errors='replace')}"
    attention = _ATTENTION.search(line)
    if attention is not None:
        compiling, chosen = (part and part.decode(errors="replace")[:_SAID_CHARS] for part in attention.groups())
        return compiling or f"warming up, attention: {chosen}"
    return next((phase for needle, phase in reversed(_PHASES) if needle in line), None)
