"""Machines on one host: processes that share its kernel and its files, and nothing else.

Owns:      a switch and the machines at it; each has a network, host name, process ids, /tmp and /dev/shm of its own.
Never:     touches the host's own network: no address, route or interface is made there.
Invariant: the processes of a machine end with its first one, which ends with the process of the tests.

    machine ── eth0 10.77.0.N ──── port of the switch, which `cut` sets down: no FIN, no RST, like a pulled cable

    `python -m tests.cluster.machines PORT PORT DELAY_S LOSS` carries frames between two ports, late and not all:
    many kernels have no netem.
"""

import ctypes
import heapq
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from deployments.places import ROOT
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
TRY = """set -e
mount -t proc none /proc
mount -t tmpfs none /dev/shm
hostname tried
ip link add bridge type bridge
ip link add port type veth peer name eth0
ip link set port master bridge"""
MACHINES = "MANTA_REQUIRE_MACHINES"  # set by `make test-cluster`, and not by CI
P = ParamSpec("P")
T = TypeVar("T")


def require_machines() -> None:
    """Skip the test unless this process may make machines; where MACHINES is set, fail it."""
    missing = [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]
    lacks = f"machines of namespaces need {', '.join(missing)} (util-linux, iproute2)" if missing else ""
    if forbidden := lacks or why_none():
        unavailable(forbidden, required=MACHINES)


def why_none() -> str:
    """Return why no machines can be made of namespaces here; "" if they can."""
    tried = subprocess.run(["unshare", *PARTS, "bash", "-c", TRY], capture_output=True, text=True)
    said = tried.stderr.strip()
    return f"machines cannot be made of namespaces here, which root may: {said}" if tried.returncode else ""


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

    def limit(self, name: str, rate: str) -> Callable[[], None]:
        """Let no more than ``rate`` (`10mbit`) through, either way. Returns: what ends that."""
        ends = [(self._switch, f"to-{name}"), (self.machines[name], "eth0")]
        for machine, port in ends:
            _run(machine, f"tc qdisc add dev {port} root tbf rate {rate} burst 64kb latency 400ms")

        def end() -> None:
            for machine, port in ends:
                _run(machine, f"tc qdisc del dev {port} root")

        return end

    def worsen(self, name: str, delay_s: float, loss: float) -> Callable[[], None]:
        """Have each frame take ``delay_s`` longer, either way, and lose a share of them. Returns: what ends that."""
        near = f"by-{name}"
        _ip(self._switch, f"link add {near} type veth peer name far-{name}")
        _ip(self._switch, f"link set far-{name} master bridge up")
        _ip(self._switch, f"link set {near} up")
        relay = [sys.executable, "-m", __name__, f"to-{name}", near, str(delay_s), str(loss)]
        inside = ["nsenter", "--target", str(self._switch.pid), "--net", *relay]
        process = subprocess.Popen(inside, cwd=ROOT, stdout=subprocess.PIPE, preexec_fn=_end_with_parent)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n", "the relay did not start"
        _ip(self._switch, f"link set to-{name} nomaster")

        def end() -> None:
            process.kill()
            process.wait()
            _ip(self._switch, f"link del {near}")
            _ip(self._switch, f"link set to-{name} master bridge")

        return end

    def mend_all(self) -> None:
        for name in self.machines:
            self.mend(name)

    def off(self) -> None:
        for machine in (*self.machines.values(), self._switch):
            machine.off()


class Client:
    """Threads of this process whose sockets are a machine's."""

    def __init__(self, machine: Machine) -> None:
        self._threads = ThreadPoolExecutor(32, initializer=join, initargs=(machine.pid,))

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


def join(pid: int) -> None:
    """Move the calling thread into the network of process ``pid``. Raises: OSError."""
    with open(f"/proc/{pid}/ns/net") as network:
        if LIBC.setns(network.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def _ip(machine: Machine, words: str) -> None:
    _run(machine, f"ip {words}")


def _run(machine: Machine, words: str) -> None:
    subprocess.run(["nsenter", "--target", str(machine.pid), "--net", *words.split()], check=True)


SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
EVERY_PROTOCOL = 3
FRAME = 1 << 17  # bytes: the kernel hands over what a network card would cut into packets, and takes it back so


def carry(ports: Sequence[str], delay_s: float, loss: float) -> None:
    """Take each frame that comes to one of two ports to the other, ``delay_s`` later, or lose it; do not return."""
    sockets = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)) for _ in ports]
    for each, port in zip(sockets, ports, strict=True):
        each.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        each.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        each.bind((port, 0))
    print("up", flush=True)
    under_way: list[tuple[float, int, int, bytes]] = []  # when it arrives, its number, at which socket
    number = 0
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for come in select.select(sockets, [], [], wait_s)[0]:
            frame = come.recv(FRAME)
            if random.random() >= loss:
                number += 1
                heapq.heappush(under_way, (time.monotonic() + delay_s, number, 1 - sockets.index(come), frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, at, frame = heapq.heappop(under_way)
            sockets[at].send(frame)


if __name__ == "__main__":
    carry(sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]))
