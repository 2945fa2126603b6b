"""A replica with a real engine over a fake device; a test can hold its steps up, and see what it has begun."""

import threading
import time

from deployments.channel.channel_client import ChannelClient
from deployments.replica.served_engine import ServedEngine
from replicas.engine.loop import EngineLoop
from replicas.scheduler.plan import StepPlan, StepResult
from replicas.types import TokenDelta
from tests.harness import fake_engine


class SlowReplica(ServedEngine):
    """Its tokens are a function of the prompt (tests/fakes.py)."""

    def __init__(
        self, replica_id: str, *, max_running: int, step_s: float = 0.0, report_period_s: float = 10.0
    ) -> None:
        self.begun: set[str] = set()  # requests of which a step has computed something
        self.given_back: set[str] = set()
        self.num_asked = 0
        self.go_on = threading.Event()  # no step ends while it is cleared
        self.go_on.set()

        def execute(plan: StepPlan) -> StepResult:
            self.begun |= {req.rid for req in engine.scheduler.queues.under_way.newest}
            self.go_on.wait(30)
            time.sleep(step_s)
            return device.execute(plan)

        engine, device = fake_engine(execute=execute, max_running=max_running, max_queued_requests=1_000)
        take_back = engine.take_back

        def taken(rid: str) -> list[TokenDelta]:
            deltas = take_back(rid)
            self.given_back |= {delta.rid for delta in deltas}
            return deltas

        engine.take_back = taken  # type: ignore[method-assign]
        loop = EngineLoop(engine)
        loop.start()
        super().__init__(loop, replica_id=replica_id, node_id="here", report_period_s=report_period_s)

    def die(self) -> None:
        """Lose the connection to the router, and with it all that came over it."""
        for client in list(self._clients.values()):
            client.close()

    def _take_back(self, client: ChannelClient, rid: str) -> None:
        self.num_asked += 1
        super()._take_back(client, rid)
