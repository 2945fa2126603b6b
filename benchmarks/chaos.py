"""Faults under streams whose text is known: what becomes of each stream, how soon all is well again, what is left.

    python -m benchmarks chaos                                  all faults, each 20 times: some hours
    python -m benchmarks chaos machine --only replica --times 3     of one machine, those whose name has this

`machine`: two replicas and an observatory on a Ray of their own. `ranks`: the same with three ranks a replica.
`clients`: the same with two routers, and eight answers of many kinds whose clients come back (deployments/client.py).
`machines`: three replicas, each on a node of its own, router and proxy on the head; `routers`: the same with two
routers, each on a machine of its own, and clients that come back. Machines are namespaces (root; tests/cluster).

A trial: four chats are written, greedily (`clients`, `routers`: eight answers of many kinds), so that an undisturbed
run has told each text; once all have begun, at a random token, the fault comes. A stream is then the `same`, or was
`cut` (what it said until then is right), or `hung` (two minutes of silence), or `wrong`. `answers again`: from the
fault until a request that came after it has its answer. `whole again`: until all replicas take part, nothing runs, and
every page is free or evictable. `files`: what the processes that were there before and after have more of them.

A further fault is one entry of MACHINE, RANKS, CLIENTS, MACHINES or ROUTERS. A fault that does what it must not is a
row that says FAILED, and the exit status is 1.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import psutil

from benchmarks import harness
from benchmarks.harness import Part, Row, say
from deployments.client import events
from tests.cluster.cluster import NODES, Answer, Cluster, read_chat
from tests.cluster.machines import Machine, why_none
from tests.serve.running import HTTP, Running
from tests.unit.deployments.test_failover import CHAT, COMPLETIONS, DOCUMENT, TOOLS
from tests.unit.deployments.test_resumed_streams import answer_of, numbers

PROMPTS = [f"Tell me of the city number {number}." for number in range(4)]
TOKENS = 160
TIMES = 20
BEGUN_S = 120.0  # until every stream has its first token, on a busy machine
LOOK_S = 5.0  # the observatory's answer
ASK_S = 0.2
AGAIN_S = 120.0
WHOLE_S = 300.0  # nodes that were declared dead start Ray and their replicas anew
ENDS_S = 60.0
STOPPED_S = 10.0
DEAD_S = 20.0  # Ray declares a node dead after 12
DRAIN_S = 30.0
AWAY_S = 60.0  # long enough to see how soon the clients of a lost router are told

Undo = Callable[[], object]
T = TypeVar("T")


class Place(Protocol):
    """A running Manta, and what happens to it."""

    num_replicas: int
    prompts: Sequence[str]

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def begin(self, prompt: str, num_tokens: int) -> tuple[Answer, "Future[None]"]: ...
    def is_whole(self) -> bool: ...
    def processes(self) -> dict[int, str]: ...
    def has_ended(self) -> bool: ...


class OneMachine:
    """Two replicas and an observatory, as `manta serve` runs them; with two routers, clients that come back."""

    num_replicas = 2

    def __init__(
        self, folder: Path, *, max_wait_s: float = 120.0, max_running: int = 64, num_ranks: int = 1,
        num_routers: int = 1,
    ) -> None:  # fmt: skip
        self._folder, self._max_wait_s, self._max_running = folder, max_wait_s, max_running
        self._num_ranks, self._num_routers = num_ranks, num_routers
        self.prompts = prompts_for(num_routers)
        self._threads = ThreadPoolExecutor(32)

    def start(self) -> None:
        self.running = Running(
            self._folder,
            replicas={"count": self.num_replicas, "cpus": 0.9 / self._num_ranks, "health_period_s": 1},
            parallel={"tp": self._num_ranks},
            cache={"max_total_tokens": 16_000},
            observatory=True,
            router={"max_wait_s": self._max_wait_s, "count": self._num_routers},
            scheduler={"max_running_requests": self._max_running},
        )
        self.running.start()

    def stop(self) -> None:
        left = [] if self.has_ended() else self.running.stop()
        assert left == [], f"Ctrl-C left {left}"

    def begin(self, prompt: str, num_tokens: int) -> tuple[Answer, "Future[None]"]:
        answer = Answer()
        if prompt in ANSWERS:
            return answer, self._threads.submit(come_back, self.running.url, prompt, answer)
        return answer, self._threads.submit(read_chat, self.running.url, prompt, num_tokens, answer)

    def is_whole(self) -> bool:
        titles = list(self.processes().values())
        if not all(any(mark in title for title in titles) for mark in (PROXY, MANAGER, CONTROLLER)):
            return False  # Serve has yet to start it anew
        if sum(ROUTER in title for title in titles) < self._num_routers:
            return False
        watched = HTTP.get(f"{self.running.url}/manta/api/state", timeout=LOOK_S).status_code == 200
        return watched and self.running.serves_with(self.num_replicas) and self.running.idle()

    def processes(self) -> dict[int, str]:
        return self.running.processes()

    def has_ended(self) -> bool:
        return self.running.process_ended

    def pids(self, mark: str) -> list[int]:
        """Those of processes whose title has ``mark``; of replicas only the busiest, of ranks and routers any one."""
        if mark == REPLICA:
            return [int(max(self.running.states(), key=lambda state: int(state["num_open"]))["replica"]["pid"])]
        found = [pid for pid, title in self.processes().items() if mark in title]
        assert found, f"no process is called {mark}"
        return [random.choice(found)] if mark in (RANK, ROUTER) else found


LONG = [{"role": "user", "content": "Order three bolts and two nuts, and say why in a long story."}]
SEEDED: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 7}
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETIONS, {"prompt": PROMPTS[0], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}),
    "greedy chat": (CHAT, {"messages": LONG, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}),
    "seeded": (COMPLETIONS, {"prompt": PROMPTS[1], "ignore_eos": True, **SEEDED}),
    "seeded chat": (CHAT, {"messages": LONG, "ignore_eos": True, "top_p": 0.9, **SEEDED}),
    "two choices": (COMPLETIONS, {"prompt": PROMPTS[2], "n": 2, "ignore_eos": True, **SEEDED}),
    "two choices of a chat": (CHAT, {"messages": LONG, "n": 2, "ignore_eos": True, **SEEDED}),
    "json_schema": (CHAT, {"messages": LONG, "response_format": DOCUMENT, **SEEDED}),
    "tools": (CHAT, {"messages": LONG, "tools": TOOLS, "tool_choice": "required", **SEEDED}),
}


def prompts_for(num_routers: int) -> Sequence[str]:
    """Return what is asked: of two routers, answers of ``ANSWERS``, whose clients come back."""
    return PROMPTS if num_routers == 1 else tuple(ANSWERS)


def come_back(url: str, name: str, answer: Answer) -> None:
    """Fill in ``answer`` by a client that comes back by itself."""
    asyncio.run(read_to_the_end(url, *ANSWERS[name], answer))


async def read_to_the_end(url: str, path: str, body: dict[str, Any], answer: Answer) -> None:
    """Fill in ``answer``; its text is what all events add up to."""
    got = []
    try:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            async for event in events(http, path, {**body, "stream_options": {"include_usage": True}}):
                answer.at_s.append(time.monotonic())
                got.append(event)
        assert numbers(got) == list(range(1, len(got) + 1)), f"events are {numbers(got)}"
        answer.text, answer.end = repr(answer_of(path, got)), "DONE"
    except (httpx.HTTPError, AssertionError) as error:
        answer.end = repr(error)
    answer.ended_s = time.monotonic()


class ManyMachines:
    """Three replicas on three nodes; one router beside the proxy on the head, or two on machines of their own, to both
    of which the proxy sends, and clients that come back."""

    num_replicas = len(NODES)

    def __init__(self, folder: Path, *, num_routers: int = 1) -> None:
        self._folder, self._num_routers = folder, num_routers
        self.prompts = prompts_for(num_routers)

    def start(self) -> None:
        self.cluster = Cluster(self._folder)
        for machine in self.cluster.network.machines.values():
            in_machine(machine, "mkdir -p /tmp/ray && mount -t tmpfs -o size=512m none /tmp/ray")
        self.cluster.start()
        self.cluster.deploy(num_routers=self._num_routers, replicas={"count": self.num_replicas})

    def stop(self) -> None:
        self.cluster.stop()

    def begin(self, prompt: str, num_tokens: int) -> tuple[Answer, "Future[None]"]:
        if prompt not in ANSWERS:
            return self.cluster.begin(prompt, num_tokens)
        answer = Answer()
        return answer, self.cluster.client.begin(come_back, self.cluster.url, prompt, answer)

    def is_whole(self) -> bool:
        return len(self.cluster.routers()) == self._num_routers and self.cluster.is_whole(self.num_replicas)

    def processes(self) -> dict[int, str]:
        return self.cluster.processes()

    def has_ended(self) -> bool:
        return False

    def busiest(self) -> str:
        """The node whose replica has most open requests."""
        return max(self.cluster.replicas(), key=lambda replica: replica.num_open).node


# Faults: each takes the place, and returns what ends it.


def signalled(mark: str, sign: signal.Signals) -> Callable[[OneMachine], Undo]:
    def begin(place: OneMachine) -> Undo:
        pids = place.pids(mark)
        for pid in pids:
            os.kill(pid, sign)

        def go_on() -> None:
            for pid in pids if sign is signal.SIGSTOP else ():
                with suppress(ProcessLookupError):  # killed for its silence
                    os.kill(pid, signal.SIGCONT)

        return go_on

    return begin


kill, stop = partial(signalled, sign=signal.SIGKILL), partial(signalled, sign=signal.SIGSTOP)


def cut(place: ManyMachines) -> Undo:
    return cut_off(place, place.busiest())


def cut_router(place: ManyMachines) -> Undo:
    return cut_off(place, random.choice([name for name in place.cluster.routers() if name in NODES]))


def cut_off(place: ManyMachines, name: str) -> Undo:
    place.cluster.network.cut(name)
    return partial(place.cluster.network.mend, name)


def drain(place: ManyMachines) -> Undo:
    """Tell Ray that the busiest node will be gone, as a cloud does with one that it takes back; then it is."""
    node, cluster = place.busiest(), place.cluster
    cluster.drain_node(node, DRAIN_S)
    return partial(cluster.run_on, node, "ray", "stop", "--force")


def at_all_nodes(change: Callable[[ManyMachines, str], Undo]) -> Callable[[ManyMachines], Undo]:
    def begin(place: ManyMachines) -> Undo:
        ends = [change(place, name) for name in NODES]

        def end() -> None:
            for each in ends:
                each()

        return end

    return begin


def fill(folder: str) -> Callable[[ManyMachines, str], Undo]:
    def begin(place: ManyMachines, node: str) -> Undo:
        machine = place.cluster.network.machines[node]
        in_machine(machine, f"dd if=/dev/zero of={folder}/full bs=1M 2>/dev/null; test -e {folder}/full")
        return partial(in_machine, machine, f"rm {folder}/full")

    return begin


def in_machine(machine: Machine, script: str) -> None:
    """Run it there, and wait for its end."""
    process = machine.start(["bash", "-c", script], environment=os.environ)
    assert process.wait() == 0, f"{script!r} failed in {machine.name}"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens, for how long, and what may come of it."""

    name: str
    begin: Callable[[Any], Undo]
    for_s: float = 0.0
    cuts: bool = False  # streams through the process are cut; otherwise each has the same bytes
    ends: bool = False  # all of Manta ends for it, by itself


REPLICA, ROUTER, PROXY, MANAGER = "ModelReplica", "manta:Router", "/haproxy -dS -db ", "ray::HAProxyManager"
RANK = "RankActor"
CONTROLLER, OBSERVATORY, GCS, RAYLET = "ServeController", ":Observatory", "gcs_server", "raylet/raylet "
MACHINE = (
    Fault(name="replica killed", begin=kill(REPLICA)),
    Fault(name="router killed", begin=kill(ROUTER), cuts=True),
    Fault(name="HAProxy killed", begin=kill(PROXY), cuts=True),
    Fault(name="HAProxy's manager killed", begin=kill(MANAGER), cuts=True),
    Fault(name="Serve's controller killed", begin=kill(CONTROLLER)),
    Fault(name="observatory killed", begin=kill(OBSERVATORY)),
    Fault(name="replica stopped", begin=stop(REPLICA), for_s=STOPPED_S),
    Fault(name="router stopped", begin=stop(ROUTER), for_s=STOPPED_S),
    Fault(name="HAProxy stopped", begin=stop(PROXY), for_s=STOPPED_S),
    Fault(name="Serve's controller stopped", begin=stop(CONTROLLER), for_s=STOPPED_S),
    Fault(name="observatory stopped", begin=stop(OBSERVATORY), for_s=STOPPED_S),
    Fault(name="GCS stopped", begin=stop(GCS), for_s=STOPPED_S),
    Fault(name="GCS killed", begin=kill(GCS), cuts=True, ends=True),
    Fault(name="raylet killed", begin=kill(RAYLET), cuts=True, ends=True),
)
RANKS = (
    Fault(name="rank killed", begin=kill(RANK)),
    Fault(name="rank stopped", begin=stop(RANK), for_s=STOPPED_S),
)
CLIENTS = (Fault(name="one of two routers killed", begin=kill(ROUTER)),)
MACHINES = (
    Fault(name="partition of 10 s", begin=cut, for_s=10.0),
    Fault(name="node away until declared dead", begin=cut, for_s=DEAD_S),
    Fault(name="partition of 90 s", begin=cut, for_s=90.0),
    Fault(name="ray drain-node", begin=drain, for_s=DRAIN_S),
    Fault(
        name="100 ms later, 1 % lost",
        begin=at_all_nodes(lambda place, node: place.cluster.network.worsen(node, 0.1, 0.01)),
        for_s=30.0,
    ),
    Fault(
        name="10 Mbit/s",
        begin=at_all_nodes(lambda place, node: place.cluster.network.limit(node, "10mbit")),
        for_s=30.0,
    ),
    Fault(name="/dev/shm of the nodes full", begin=at_all_nodes(fill("/dev/shm")), for_s=30.0),
    Fault(name="disk of the nodes full", begin=at_all_nodes(fill("/tmp/ray")), for_s=30.0),
)
ROUTERS = (Fault(name="a router's node cut off", begin=cut_router, for_s=AWAY_S),)


@dataclass(kw_only=True)
class Trial:
    """What one fault did. Times from it."""

    streams: Counter[str] = field(default_factory=Counter)
    longest_gap_s: float = 0.0
    answers_s: float | None = None
    whole_s: float | None = None
    files: int = 0
    wrong: list[str] = field(default_factory=list)  # what must not have happened


FAILED = "FAILED: "  # begins what a row says of what must not have happened
VERDICTS = ("same", "cut", "hung", "wrong")


def verdict(answer: Answer, expected: str) -> str:
    if answer.end == "DONE" and answer.text == expected:
        return "same"
    if not expected.startswith(answer.text) or answer.end == "DONE":
        return "wrong"
    return "hung" if "ReadTimeout" in answer.end else "cut"


def num_files(pids: Iterable[int]) -> dict[int, int]:
    """Count the open files of each process that lives."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            found[pid] = len(os.listdir(f"/proc/{pid}/fd"))
    return found


def try_once(place: Place, fault: Fault, expected: Sequence[str]) -> Trial:
    """Run one trial over ``place``, which is whole. Afterwards it is whole again, or the trial says that it is not."""
    trial, files = Trial(), num_files(place.processes())
    streams = [place.begin(prompt, TOKENS) for prompt in place.prompts]
    at = random.randrange(len(streams), len(streams) * TOKENS // 2)

    def have_begun() -> bool:
        nums = [len(answer.at_s) for answer, _ in streams]
        return all(nums) and sum(nums) >= at

    Running.until(have_begun, BEGUN_S)
    undo = fault.begin(place)
    began_s = time.monotonic()
    timer = threading.Timer(fault.for_s, undo)
    timer.start()

    def soon(what: str, condition: Callable[[], bool | None], within_s: float) -> float | None:
        try:
            Running.until(lambda: bool(condition()), within_s, look_s=ASK_S)
        except AssertionError:
            trial.wrong.append(f"{what} not within {within_s:g} s")
            return None
        return time.monotonic() - began_s

    if not fault.ends:
        trial.answers_s = soon("answers", partial(answers, place, []), AGAIN_S)
    wait(done for _, done in streams)
    timer.join()
    for (answer, _), text in zip(streams, expected, strict=True):
        came = verdict(answer, text)
        trial.streams[came] += 1
        if came not in ("same", "cut" if fault.cuts else "same"):
            trial.wrong.append(f"a stream was {came} at {len(answer.at_s)} texts: {answer.end[:200]!r}")
            say(f"it said {answer.text}\nand not {text}")
    trial.longest_gap_s = max(answer.longest_gap_s for answer, _ in streams)
    if fault.ends:
        trial.whole_s = soon("its end", place.has_ended, ENDS_S)
        return trial
    trial.whole_s = soon("whole", lambda: quietly(place.is_whole), WHOLE_S)
    trial.files = sum(number - files[pid] for pid, number in num_files(files).items())
    return trial


def answers(place: Place, asked: list[Answer]) -> bool:
    """Whether a new request is answered; ask once more if not."""
    if any(each.end == "DONE" for each in asked):
        return True
    asked.append(place.begin("Yes?", 1)[0])
    return False


def quietly(look: Callable[[], T]) -> T | None:
    """Return what ``look`` sees; None while Manta does not answer."""
    try:
        return look()
    except (httpx.HTTPError, psutil.NoSuchProcess, OSError, ValueError, KeyError):
        return None


def trials(make: Callable[[Path], Place], faults: Sequence[Fault], times: int) -> Iterator[tuple[Fault, Trial]]:
    """Try every fault ``times`` times over one place, which is started anew where a fault has ended it."""
    with tempfile.TemporaryDirectory(prefix="manta-chaos-") as folder:
        place, expected = make(Path(folder)), list[str]()
        runs = False
        try:
            for fault in faults:
                for number in range(times):
                    if not runs:
                        place.start()
                        runs = True
                        Running.until(lambda: bool(quietly(place.is_whole)), WHOLE_S)
                        expected = expected or undisturbed(place)
                    trial = try_once(place, fault, expected)
                    say(f"{fault.name} {number + 1}: {trial}")
                    yield fault, trial
                    if trial.whole_s is None or fault.ends:
                        place.stop()
                        runs = False
        finally:
            if runs:
                place.stop()


def undisturbed(place: Place) -> list[str]:
    """The texts, each written while nothing else is."""
    found = []
    for prompt in place.prompts:
        answer, done = place.begin(prompt, TOKENS)
        done.result()
        assert answer.end == "DONE", answer
        found.append(answer.text)
    return found


def rows_of(section: str, found: Sequence[tuple[Fault, Trial]]) -> list[Row]:
    rows = []
    for fault in dict.fromkeys(fault for fault, _ in found):
        mine = [trial for each, trial in found if each is fault]
        wrong = [f"{FAILED}{each}" for trial in mine for each in trial.wrong]
        note = "; ".join([f"{len(mine)} times", *wrong[:2]])
        figures: list[tuple[str, str, Sequence[float | None]]] = [
            *((f"{came} streams", "", [float(sum(trial.streams[came] for trial in mine))]) for came in VERDICTS),
            ("longest gap", "s", [trial.longest_gap_s for trial in mine]),
            ("answers again", "s", [trial.answers_s for trial in mine]),
            ("ended" if fault.ends else "whole again", "s", [trial.whole_s for trial in mine]),
            ("files", "", [float(trial.files) for trial in mine]),
        ]
        for figure, unit, values in figures:
            if known := [value for value in values if value is not None]:
                rows.append(Row.of(section, fault.name, known, unit, figure=figure, note=note))
    return rows


PARTS: tuple[tuple[str, str, str, Callable[[Path], Place], Sequence[Fault]], ...] = (
    ("machine", "processes of one machine are killed or stopped", "one machine", OneMachine, MACHINE),
    (
        "ranks", "the same with three ranks a replica, of which one is killed or stopped", "three ranks a replica",
        partial(OneMachine, num_ranks=3), RANKS,
    ),
    (
        "clients", "one of two routers is killed under clients that come back", "clients that come back",
        partial(OneMachine, num_routers=2), CLIENTS,
    ),
    (
        "machines", "nodes vanish, their links and disks are bad (root)", "three nodes and a head", ManyMachines,
        MACHINES,
    ),
    (
        "routers", "of two routers one loses its node, under clients that come back (root)", "two routers",
        partial(ManyMachines, num_routers=2), ROUTERS,
    ),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    def measure(
        chosen: argparse.Namespace, section: str, make: Callable[[Path], Place], faults: Sequence[Fault]
    ) -> list[Row]:
        if faults in (MACHINES, ROUTERS) and (reason := why_none()):
            return [Row(section=section, name="not tried", value=None, note=reason)]
        wanted = [each for each in faults if chosen.only in each.name]
        return rows_of(section, list(trials(make, wanted, 1 if chosen.quick else chosen.times)))

    def add_options(parse: argparse.ArgumentParser) -> None:
        parse.add_argument("--times", type=int, default=TIMES, help="trials of each fault")
        parse.add_argument("--only", default="", help="faults whose name has this")

    parts = {
        name: Part(about=about, measure=partial(measure, section=section, make=make, faults=faults))
        for name, about, section, make, faults in PARTS
    }
    rows = harness.run("chaos", __doc__, parts, argv, options=add_options)
    return int(any(FAILED in row.note for row in rows))
