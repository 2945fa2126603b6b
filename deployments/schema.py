"""The ``args`` of serve_config.yaml: every setting of the application, checked before anything starts.

Owns:      names, defaults and checks of the application's settings. Those of the engine are the dataclasses of
           replicas/config.py themselves, so that the two cannot drift.
Never:     fills in what depends on the machine (capacity.py, replicas.config.resolve).
"""

import dataclasses
import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from replicas.config import CacheConfig, DType, ParallelConfig, SchedulerConfig
from replicas.errors import InvalidConfig
from routing.policies import POLICIES

T = TypeVar("T")


def _only_fields_of(cls: type) -> BeforeValidator:
    """Pydantic ignores what a dataclass does not know; a setting that is misspelt must not be."""
    names = [field.name for field in dataclasses.fields(cls)]

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            for name in value:
                if name not in names:
                    raise ValueError(f"{name!r} is unknown{_nearest(str(name), names)}; allowed: {', '.join(names)}")
        return value

    return BeforeValidator(check)


class Settings(BaseModel):
    """Base of all: frozen, and nothing unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSettings(Settings):
    path: str = Field(min_length=1)  # folder (relative to the project's root) or hub id
    served_name: str | None = None  # as requests name it; None: the last part of the path
    dtype: DType | None = None  # None: float32 on CPU, the checkpoint's on GPU
    context_len: int | None = Field(default=None, ge=1)  # None: the model's own

    @property
    def name(self) -> str:
        return self.served_name or self.path.rstrip("/").rsplit("/", 1)[-1]


class AutoscalingSettings(Settings):
    """Bounds and delays are Ray Serve's, under its names; the rule is autoscaling.py's."""

    min_replicas: int = 1
    max_replicas: int = Field(default=2, ge=1)
    initial_replicas: int | None = None
    ttft_objective_s: float = Field(default=5.0, gt=0)  # prompt tokens that wait should be computed within this
    pool_high: float = Field(default=0.85, gt=0, le=1)  # share of the KV pools that requests may hold
    running_high: float = Field(default=0.9, gt=0, le=1)  # share of the running slots that requests may take
    slack: float = Field(default=0.7, gt=0, le=1)  # fewer replicas only if loaded to at most this share of the limits
    target_ongoing_requests: float | None = Field(default=None, gt=0)  # given: Ray's own rule instead of ours
    upscale_delay_s: float = Field(default=10.0, ge=0)
    downscale_delay_s: float = Field(default=300.0, ge=0)
    metrics_interval_s: float = Field(default=1.0, gt=0)  # how often replicas tell Serve
    look_back_period_s: float = Field(default=5.0, gt=0)  # over which Serve averages that

    @model_validator(mode="after")
    def _averaged(self) -> "AutoscalingSettings":
        if self.look_back_period_s <= self.metrics_interval_s:
            raise ValueError(
                f"look_back_period_s ({self.look_back_period_s}) must exceed metrics_interval_s "
                f"({self.metrics_interval_s})"
            )
        return self

    @field_validator("min_replicas", "initial_replicas")
    @classmethod
    def _at_least_one(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError(
                "must be at least 1: without a replica the routers answer 503 themselves, so that Ray Serve would "
                "never see a request to start one for"
            )
        return value

    @model_validator(mode="after")
    def _ordered(self) -> "AutoscalingSettings":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) exceeds max_replicas ({self.max_replicas})")
        return self


class ReplicaSettings(Settings):
    count: int | Literal["auto"] = "auto"  # auto: 2 if cores and memory allow, else 1
    cpus: float = Field(default=1.0, gt=0)  # of each rank; also its compute threads
    gpus: float = Field(default=0.0, ge=0)  # of each rank
    autoscaling: AutoscalingSettings | None = None  # replaces count
    health_period_s: float = Field(default=2.0, gt=0)
    health_timeout_s: float = Field(default=30.0, gt=0)
    drain_timeout_s: float = Field(default=120.0, ge=0)  # a replica that leaves finishes its requests for so long

    @model_validator(mode="after")
    def _positive(self) -> "ReplicaSettings":
        if self.count != "auto" and self.count < 1:
            raise ValueError(f"count = {self.count}; allowed: auto, or 1 and more")
        return self


class RouterSettings(Settings):
    policy: str = "estimated_ttft"
    count: int = Field(default=1, ge=1)  # routers; each is an HTTP ingress
    cpus: float = Field(default=0.0, ge=0)
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    max_tries: int = Field(default=3, ge=1)  # replicas that one request may be sent to, one after the other
    retry_wait_s: float = Field(default=30.0, ge=0)  # how long a request whose replica died waits for another one
    report_period_s: float = Field(default=0.1, gt=0, le=10)  # how often replicas send cache events and statistics
    max_wait_s: float = Field(default=120.0, gt=0)  # longer queues, as estimated, are answered with 429
    decisions_kept: int = Field(default=1000, ge=1)  # of the most recent requests, for GET /route/{rid}

    @model_validator(mode="after")
    def _known(self) -> "RouterSettings":
        if self.policy not in POLICIES:
            raise ValueError(f"policy = {self.policy!r} is unknown; allowed: {', '.join(POLICIES)}")
        return self


class AppConfig(Settings):
    """All of it."""

    model: ModelSettings
    replicas: ReplicaSettings = ReplicaSettings()
    router: RouterSettings = RouterSettings()
    cache: Annotated[CacheConfig, _only_fields_of(CacheConfig)] = CacheConfig()
    scheduler: Annotated[SchedulerConfig, _only_fields_of(SchedulerConfig)] = SchedulerConfig()
    parallel: Annotated[ParallelConfig, _only_fields_of(ParallelConfig)] = ParallelConfig()
    attention: Literal["auto", "torch_native", "cpu"] = "auto"


def parse(args: dict[str, Any]) -> AppConfig:
    """The settings. Raises: InvalidConfig that lists every setting that is wrong, why, and what is allowed."""
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        problems = [_problem(each) for each in error.errors(include_url=False)]
        raise InvalidConfig("serve_config.yaml, args:\n" + "\n".join(f"  {problem}" for problem in problems)) from error


def _problem(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        names = _names_beside(error["loc"])
        return f"{path}: is unknown{_nearest(str(error['loc'][-1]), names)}; allowed: {', '.join(names)}"
    if error["type"] == "missing":
        return f"{path}: is missing"
    return f"{path}: {error['msg'].removeprefix('Value error, ')}; got {str(error['input'])[:100]!r}"


def _names_beside(loc: tuple[int | str, ...]) -> list[str]:
    """Settings that the group of ``loc`` knows."""
    group = _GROUPS.get(".".join(str(part) for part in loc[:-1]), AppConfig)
    return list(group.model_fields)


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


_GROUPS: dict[str, type[Settings]] = {
    "": AppConfig,
    "model": ModelSettings,
    "replicas": ReplicaSettings,
    "replicas.autoscaling": AutoscalingSettings,
    "router": RouterSettings,
}
