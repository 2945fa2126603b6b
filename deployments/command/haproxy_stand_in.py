"""Runs a stand-in for a HAProxy that was killed, until Serve has started the next one.

Owns:      one watch for each HAProxy that the wrapper script starts; the stand-in, a HAProxy with the same settings but
           no admin socket. Serve checks HAProxy's health at that socket, and can reload only a HAProxy that it started:
           with the socket, Serve would keep the stand-in, and no change of routers would reach it.
Never:     outlives the raylet; imports anything but the standard library (any Python may run it).
Invariant: when Serve itself ends HAProxy (the manager kills it, and is killed next), there is no stand-in, or not for
           long. No HAProxy holds its port after the raylet has ended.
Thread:    a process in a session of its own, since Ray ends a dead worker's process group.

    HAProxy ends ─┬─ its manager ends within MANAGER_S after it: Serve's stop ─────> the end
                  ├─ another one answers at the admin socket: a reload ────────────> the end
                  └─ else, or both ended at once: stand in ─> the next one with a router that is up takes over the port
                     (-sf, haproxy_no_splice.sh), or no router is left, as when Serve stops ─> drain ─> the end
"""

import contextlib
import ctypes
import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

AT_ONCE_S = 0.05  # the raylet kills HAProxy shortly before a killed manager has ended completely
MANAGER_S = 1.0  # Serve's stop ends HAProxy first, and the manager by a later call
LOOK_S = 0.2
ROUTERLESS_S = 10.0  # without a router that accepts connections: Serve was shut down, or serves nothing
MOST_S = 60.0  # the longest life of a stand-in
PR_SET_PDEATHSIG = 1
ROUTER = re.compile(r"^ *server SERVE_REPLICA\S* (\S+):(\d+)", re.MULTILINE)
UP = re.compile(r"^[^,]*,SERVE_REPLICA[^,]*,(?:[^,]*,){15}UP", re.MULTILINE)  # a router's row of `show stat`


def watch(haproxy: int, manager: int, command: list[str], config: Path) -> None:
    """Wait for the end of process ``haproxy``, and run a stand-in unless Serve ended it.

    Args: manager: the process that started HAProxy.
          command: HAProxy's command line without the settings file.
          config:  HAProxy's settings file.
    """
    raylet = _parent(manager)
    its_end, managers_end, raylets_end = (_end(pid) for pid in (haproxy, manager, raylet))
    first = select.select([its_end, managers_end], [], [])[0]
    at_once = managers_end in first or _ended(managers_end, within_s=AT_ONCE_S)
    if not at_once and _ended(managers_end, within_s=MANAGER_S):
        return
    if its_end not in select.select([its_end, raylets_end], [], [])[0]:
        signal.pidfd_send_signal(its_end, signal.SIGUSR1)  # it lets go of the port, and drains
        return
    text = config.read_text() if config.is_file() else ""  # its folder is removed with the application
    admin = re.search(r"stats socket (\S+)", text)
    if admin is None or _ended(raylets_end) or _asked(admin[1], "show info"):
        return
    settings = config.with_name("stand-in.cfg")
    settings.write_text(stand_in_settings(text))
    with config.with_name("stand-in.lock").open("w") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two may end together in a reload: one stand-in is enough
        process = subprocess.Popen([*command, str(settings)], preexec_fn=_die_with_parent)
        try:
            _hold_the_port(process, pid_file(config), admin[1], ROUTER.findall(text), raylets_end)
            fcntl.flock(lock, fcntl.LOCK_UN)  # a stand-in for the next HAProxy may run while this one drains
            while process.poll() is None and not _ended(raylets_end, within_s=LOOK_S):
                process.send_signal(signal.SIGUSR1)  # drain; HAProxy bounds the time itself
        finally:
            process.kill()
            process.wait()


def stand_in_settings(text: str) -> str:
    """Copy settings without the admin socket and all ports but the clients': the next HAProxy needs those."""
    section, kept = "", []
    for line in text.splitlines():
        words = line.split()
        if line[:1].strip():
            section = line.strip()
        if words[:2] != ["stats", "socket"] and (words[:1] != ["bind"] or section == "frontend http_frontend"):
            kept.append(line)
    return "\n".join([*kept, ""])


def pid_file(config: Path) -> Path:
    """The file that holds the process id of a stand-in while it has the port."""
    return config.with_name("stand-in.pid")


def _hold_the_port(
    process: subprocess.Popen[bytes], file: Path, admin: str, routers: list[tuple[str, str]], raylets_end: int
) -> None:
    """Hold the port until the next HAProxy has taken it over from the process that ``file`` names."""
    now_s = served_s = time.monotonic()
    until_s = now_s + MOST_S
    file.write_text(str(process.pid))
    try:
        while process.poll() is None and not _ended(raylets_end, within_s=LOOK_S):
            now_s = time.monotonic()
            if any(_accepts(host, int(port)) for host, port in routers):
                served_s = now_s
            if UP.search(_asked(admin, "show stat")) or now_s > until_s or now_s - served_s > ROUTERLESS_S:
                break
    finally:
        file.unlink(missing_ok=True)


def _asked(admin: str, question: str) -> str:
    """Ask the HAProxy at the admin socket. Returns: its answer; "" if there is none."""
    answer = b""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(1.0)
        asking.connect(admin)
        asking.sendall(f"{question}\n".encode())
        while part := asking.recv(65536):
            answer += part
    return answer.decode(errors="replace")


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _end(pid: int) -> int:
    """Open a descriptor that is readable once process ``pid`` has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.open(os.devnull, os.O_RDONLY)


def _ended(end: int, *, within_s: float = 0.0) -> bool:
    return bool(select.select([end], [], [], within_s)[0])


def _parent(pid: int) -> int:
    """Find the parent of process ``pid``. Raises: OSError if the process has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    os.setsid()
    watch(int(sys.argv[1]), int(sys.argv[2]), [sys.argv[3], "-dS", "-db", "-f"], Path(sys.argv[4]))
