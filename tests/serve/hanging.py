"""``tests.serve.hanging:build``: the application, whose engine threads can be hung while their event loops live."""

import os
import threading
from pathlib import Path
from typing import Any

from ray.serve import Application

from deployments.app import build_of
from deployments.replica.model_replica import ModelReplica
from deployments.settings.schema import AppConfig
from replicas.engine.engine import Engine
from replicas.scheduler.plan import PendingStep, StepPlan
from routing.types import Role

FOLDER = "MANTA_TEST_HANG"  # a file there with the id of a process: its next step waits until the file is gone


def build(args: dict[str, Any]) -> Application:
    return build_of(HangingReplica, args)


class HangingReplica(ModelReplica):
    @staticmethod
    def load(config: AppConfig, role: Role) -> Engine:
        engine = ModelReplica.load(config, role)
        launch, gate = engine.steps.launch, Path(os.environ[FOLDER]) / str(os.getpid())

        def hang(plan: StepPlan) -> PendingStep:
            while gate.exists():
                threading.Event().wait(0.05)
            return launch(plan)

        engine.steps.launch = hang
        return engine
