"""Serves in the place of a HAProxy that was killed, until Serve has started the next one.

Owns:      one watch for each HAProxy that the wrapper script starts; the stand-in, a HAProxy with the same settings
           less the admin socket. Serve asks that socket whether HAProxy lives, and it can only reload a HAProxy of its
           own: with the socket, Serve would keep a stand-in, and no change of routers would reach it.
Never:     outlives the raylet; imports anything but the standard library (it runs with whatever Python is there).
Invariant: what Serve itself ends (the manager kills HAProxy, and is killed next) is not stood in for, or not for long.
Thread:    a process of its own, in a session of its own: Ray ends a dead worker's process group.

    HAProxy ends ─┬─ its manager ends within MANAGER_S after it: Serve's stop ─────> the end
                  ├─ another one answers at the admin socket: it was reloaded ─────> the end
                  └─ else, or both ended at once: stand in ─> the next one that knows a router takes the port over
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

AT_ONCE_S = 0.05  # a killed manager's socket closes, and the raylet kills HAProxy, before the manager has quite ended
MANAGER_S = 1.0  # Serve's stop ends the manager after HAProxy, by a call of its own
LOOK_S = 0.2
ROUTERLESS_S = 10.0  # no router accepts connections for so long: Serve was shut down, or there is nothing to serve
MOST_S = 60.0  # and in no case longer
PR_SET_PDEATHSIG = 1
ROUTER = re.compile(r"^ *server SERVE_REPLICA\S* (\S+):(\d+)", re.MULTILINE)
UP = re.compile(r"^[^,]*,SERVE_REPLICA[^,]*,(?:[^,]*,){15}UP", re.MULTILINE)  # a router's row of `show stat`


def watch(haproxy: int, manager: int, command: list[str], config: Path) -> None:
    """Wait for the end of process ``haproxy``, and stand in where it was not meant to end.

    Args: manager: the process that started it; command: how HAProxy is run, up to its settings; config: its settings.
    """
    raylet = _parent(manager)
    its_end, managers_end, raylets_end = (_end(pid) for pid in (haproxy, manager, raylet))
    first = select.select([its_end, managers_end], [], [])[0]
    at_once = managers_end in first or _ended(managers_end, within_s=AT_ONCE_S)
    if not at_once and _ended(managers_end, within_s=MANAGER_S):
        return
    select.select([its_end], [], [])
    text = config.read_text() if config.is_file() else ""  # its folder goes with the application that made it
    admin = re.search(r"stats socket (\S+)", text)
    if admin is None or _ended(raylets_end) or _asked(admin[1], "show info"):
        return
    settings = config.with_name("stand-in.cfg")
    settings.write_text(stand_in_settings(text))
    with config.with_name("stand-in.lock").open("w") as lock, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two may end together, in a reload: one stands in
        process = subprocess.Popen([*command, str(settings)], preexec_fn=_die_with_parent)
        try:
            _hold_the_port(process, pid_file(config), admin[1], ROUTER.findall(text), raylets_end)
            fcntl.flock(lock, fcntl.LOCK_UN)  # the next one may be stood in for while this one drains
            while process.poll() is None and not _ended(raylets_end, within_s=LOOK_S):
                process.send_signal(signal.SIGUSR1)  # drain; HAProxy has a bound of its own for that
        finally:
            process.kill()
            process.wait()


def stand_in_settings(text: str) -> str:
    """``text`` without the admin socket, and without any port except the clients': the next one needs the others."""
    section, kept = "", []
    for line in text.splitlines():
        words = line.split()
        if line[:1].strip():
            section = line.strip()
        if words[:2] != ["stats", "socket"] and (words[:1] != ["bind"] or section == "frontend http_frontend"):
            kept.append(line)
    return "\n".join([*kept, ""])


def pid_file(config: Path) -> Path:
    """Where the id of a stand-in stands for as long as it has the port."""
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
    """The answer of the HAProxy that has the admin socket; "" where there is none."""
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
    """A descriptor that can be read once process ``pid`` has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return os.open(os.devnull, os.O_RDONLY)


def _ended(end: int, *, within_s: float = 0.0) -> bool:
    return bool(select.select([end], [], [], within_s)[0])


def _parent(pid: int) -> int:
    """Raises: OSError when process ``pid`` has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    os.setsid()
    watch(int(sys.argv[1]), int(sys.argv[2]), [sys.argv[3], "-dS", "-db", "-f"], Path(sys.argv[4]))
