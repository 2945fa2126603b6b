"""A follower rank (> 0) of a tensor-parallel replica: receives plans (and orders for K/V bytes), runs
them, says nothing back.

Life cycle: connect to rank 0's plan channel -> join the process group -> load its slice -> run plans until rank 0
hangs up. Rank 0 notices a dead follower by its failing collective, or by `WorkerHandles.dead` when idle.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge

from replicas.config import EngineConfig
from replicas.errors import EngineDead
from replicas.parallel import TpGroup
from replicas.runner.kv_access import KvOrder, ReadKv, WriteKv, run_order
from replicas.runner.model_runner import ModelRunner
from replicas.runner.port import PortSpec
from replicas.runner.remote_port import serve_port
from replicas.scheduler.plan import DecodePlan, ExtendPlan, StepPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """All that a follower needs to know; picklable."""

    config: EngineConfig
    rank: int
    init_method: str  # torch.distributed rendezvous, e.g. tcp://127.0.0.1:29500
    plan_address: tuple[str, int]
    authkey: bytes  # shared secret of the plan channel, and of that of the ports
    port_address: tuple[str, int] | None = None  # where rank 0 waits for the transfer port of this rank
    port: PortSpec | None = None


class PlanChannel:
    """Rank 0's side: one pipe to each follower; a plan is pickled once and written to all."""

    def __init__(self, host: str, authkey: bytes) -> None:
        self._listener = Listener((host, 0))  # who connects must prove in `_admit` that it knows the key
        self._authkey = authkey
        self._followers: list[Connection] = []

    @property
    def connections(self) -> Sequence[Connection]:
        """In the order in which they came."""
        return self._followers

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.address
        return str(host), int(port)

    def accept(self, count: int, *, timeout_s: float, dead: Callable[[], str | None]) -> None:
        """Wait until ``count`` followers have connected.

        Raises: EngineDead when one died first, or not all came within ``timeout_s``.
        """
        threading.Thread(target=self._accept, args=(count,), name="manta-plan-accept", daemon=True).start()
        deadline_s = time.monotonic() + timeout_s
        try:
            while len(self._followers) < count:
                gone = dead()
                if gone is not None:
                    raise EngineDead(f"{gone} before it was ready; its log says why")
                if time.monotonic() > deadline_s:
                    raise EngineDead(f"{len(self._followers)} of {count} ranks connected within {timeout_s:.0f} s")
                time.sleep(0.05)
        finally:
            self._listener.close()

    def _accept(self, count: int) -> None:
        """Take connections until ``count`` have proved themselves; a stranger, loud or silent, holds nobody up."""
        while len(self._followers) < count:
            try:
                connection = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._admit, args=(connection,), daemon=True).start()

    def _admit(self, connection: Connection) -> None:
        try:
            deliver_challenge(connection, self._authkey)
            answer_challenge(connection, self._authkey)
        except (AuthenticationError, EOFError, OSError):
            connection.close()
        else:
            self._followers.append(connection)

    def send(self, message: StepPlan | KvOrder) -> None:
        """Raises: EngineDead when a follower has gone."""
        try:
            if isinstance(message, ExtendPlan | DecodePlan):
                message = replace(message, sampling=())  # rank 0 samples
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            for follower in self._followers:
                follower.send_bytes(data)
        except OSError as error:
            raise EngineDead(f"a tensor-parallel rank is gone: {error}; the replica must be restarted") from error

    def close(self) -> None:
        for follower in self._followers:
            follower.close()
        with contextlib.suppress(OSError):
            self._listener.close()


def run_worker(spec: WorkerSpec) -> None:
    """The main loop of rank ``spec.rank``; returns when rank 0 hangs up."""
    plans = Client(spec.plan_address, authkey=spec.authkey)
    tp = TpGroup.create(
        spec.rank, spec.config.parallel.tp, init_method=spec.init_method, device=spec.config.device
    )
    runner = ModelRunner(spec.config, tp)
    if spec.port is not None:
        arguments = (runner.pool, spec.rank, spec.port, spec.port_address, spec.authkey)
        threading.Thread(target=serve_port, args=arguments, name="manta-transfer", daemon=True).start()
    log.info("rank %d of %d is ready", spec.rank, tp.size)
    while True:
        try:
            message: StepPlan | KvOrder = plans.recv()
        except (EOFError, ConnectionResetError):
            return
        if isinstance(message, ReadKv | WriteKv):
            run_order(message, runner.pool, tp, spec.config.model.num_kv_heads)
        else:
            runner.forward(message)


def die_with_parent() -> None:
    """End this process when the one that started it does, even in the middle of a collective.

    Not by PR_SET_PDEATHSIG: that follows the *thread* that started it, and an engine may be loaded in a passing one.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a multiprocessing child has a parent to watch"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="manta-parent-watch", daemon=True).start()


def worker_specs(
    config: EngineConfig,
    init_method: str,
    plan_address: tuple[str, int],
    authkey: bytes,
    *,
    port_address: tuple[str, int] | None = None,
    port: PortSpec | None = None,
) -> Sequence[WorkerSpec]:
    """One spec for each rank above 0."""
    return [
        WorkerSpec(
            config=config,
            rank=rank,
            init_method=init_method,
            plan_address=plan_address,
            authkey=authkey,
            port_address=port_address,
            port=port,
        )
        for rank in range(1, config.parallel.tp)
    ]
