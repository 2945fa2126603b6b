"""The application with as many replicas as a file says: a policy of Serve reads it. For tests of who comes and goes."""

import os
from pathlib import Path
from typing import Any

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments import app
from deployments.settings.groups import AutoscalingSettings

FILE = "MANTA_TEST_REPLICAS"  # environment variable: the file's path


class FromFile:
    """An autoscaling policy of Serve."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        return int(self._path.read_text()), {}


def autoscaling_config(settings: AutoscalingSettings) -> AutoscalingConfig:
    policy = AutoscalingPolicy(policy_function="tests.serve.scaled:FromFile", policy_kwargs={"path": os.environ[FILE]})
    return AutoscalingConfig(
        min_replicas=1,
        max_replicas=settings.max_replicas,
        initial_replicas=settings.initial_replicas,
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
        metrics_interval_s=0.5,
        look_back_period_s=1.0,
        policy=policy,
    )


def build(args: dict[str, Any]) -> Application:
    app.autoscaling_config = autoscaling_config
    return app.build(args)
