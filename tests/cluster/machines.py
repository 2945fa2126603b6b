"""Machines on one host: processes that share its kernel and its files, and nothing else.

Owns:      a switch and the machines at it; each has a network, host name, process ids, /tmp and /dev/shm of its own.
Never:     touches the host's own network: no address, route or interface is made there.
Invariant: the processes of a machine end with its first one, which ends with the process of the tests.

    machine ── eth0 10.77.0.N ──── port of the switch, which `cut` sets down: no FIN, no RST, like a pulled cable
"""

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from deployments.settings.places import ROOT
from tests.programs import unavailable

NETWORK = "10.77.0"
PARTS = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
START = """set -e
mount --make-rprivate /
hostname "$NAME"
mkdir -p "$FOLDER/tmp"
case "$ROOT" in /tmp/*) mkdir -p "$FOLDER$ROOT"; mount --rbind "$ROOT" "$FOLDER$ROOT";; esac
mount --rbind "$FOLDER/tmp" /tmp
mount -t tmpfs -o size=1g none /dev/shm
mount -t proc none /proc
ip link set lo up
echo up
while :; do sleep 60; done"""  # a shell, which takes note of the ends of processes whose parents have ended
P = ParamSpec("P")
T = TypeVar("T")


def require_machines() -> None:
    """Skip the test, or fail it where the tools are required, unless this process may make machines."""
    for name, package in (("unshare", "util-linux"), ("nsenter", "util-linux"), ("ip", "iproute2")):
        if shutil.which(name) is None:
            unavailable(f"{name} is not on PATH: `apt-get install {package}`")
    tried = subprocess.run(["unshare", *PARTS, "mount", "-t", "proc", "none", "/proc"], capture_output=True, text=True)
    if tried.returncode:
        unavailable(f"machines cannot be made of namespaces here, which root may: {tried.stderr.strip()}")


class Machine:
    """One machine, or the switch."""

    def __init__(self, name: str, folder: Path) -> None:
        """``folder``: where its own files lie."""
        self.name, self.tmp = name, folder / name / "tmp"
        names = {"NAME": name, "FOLDER": str(self.tmp.parent), "ROOT": str(ROOT)}
        self._holder = subprocess.Popen(
            ["unshare", *PARTS, "bash", "-c", START], env={**os.environ, **names}, stdout=subprocess.PIPE,
            start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", f"machine {name} did not start"
        holder = self._holder.pid
        self.pid = int(Path(f"/proc/{holder}/task/{holder}/children").read_text())  # of its first process
        self.address = ""

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start ``command`` there, in the project's folder. The signals of the returned process do not reach it."""
        inside = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--ipc", "--pid"]
        with (log or Path(os.devnull)).open("ab") as said:
            return subprocess.Popen(
                [*inside, f"--wd={ROOT}", *command], env=dict(environment), stdin=subprocess.DEVNULL, stdout=said,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def off(self) -> None:
        """End all of its processes."""
        self._holder.kill()
        self._holder.wait()


class Network:
    """A switch, and the machines that are plugged into it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._switch = Machine("switch", folder)
        self.machines: dict[str, Machine] = {}
        _ip(self._switch, "link add bridge type bridge")
        _ip(self._switch, "link set bridge up")

    def add(self, name: str) -> Machine:
        machine = self.machines[name] = Machine(name, self._folder)
        machine.address = f"{NETWORK}.{len(self.machines)}"
        _ip(self._switch, f"link add name to-{name} type veth peer name eth0 netns {machine.pid}")
        _ip(self._switch, f"link set to-{name} master bridge up")
        _ip(machine, f"addr add {machine.address}/24 dev eth0")
        _ip(machine, "link set eth0 up")
        _ip(machine, f"route add default via {NETWORK}.254")
        return machine

    def cut(self, name: str) -> None:
        _ip(self._switch, f"link set to-{name} down")

    def mend(self, name: str) -> None:
        _ip(self._switch, f"link set to-{name} up")

    def mend_all(self) -> None:
        for name in self.machines:
            self.mend(name)

    def off(self) -> None:
        for machine in (*self.machines.values(), self._switch):
            machine.off()


class Client:
    """Threads of this process whose sockets are a machine's."""

    def __init__(self, machine: Machine) -> None:
        self._threads = ThreadPoolExecutor(initializer=_join, initargs=(machine.pid,))

    def begin(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        return self._threads.submit(function, *args, **kwargs)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self.begin(function, *args, **kwargs).result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000


def _end_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _join(pid: int) -> None:
    """Move the calling thread into the network of process ``pid``. Raises: OSError."""
    with open(f"/proc/{pid}/ns/net") as network:
        if LIBC.setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _ip(machine: Machine, words: str) -> None:
    subprocess.run(["nsenter", "--target", str(machine.pid), "--net", "ip", *words.split()], check=True)
