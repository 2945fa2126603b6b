"""Settings of the replicas: how many, with what, and what a role's own group changes of it.

Owns:      the base class of all settings groups: frozen, and nothing unknown.
Never:     knows the engine's settings but by their dataclasses.
"""

from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    field_validator,
    model_validator,
    with_config,
)
from typing_extensions import TypedDict  # pydantic's own; typing's has what it needs from Python 3.12 on

from deployments.settings.other_names import CACHE_NAMES
from deployments.settings.setting_errors import shown
from replicas.config import CacheConfig, ParallelConfig, SchedulerConfig

# errors are logged with their cause; what was given may hold a secret
_GROUP = ConfigDict(extra="forbid", hide_input_in_errors=True)
for _engines in (CacheConfig, SchedulerConfig, ParallelConfig):
    with_config(_GROUP)(_engines)


class Settings(BaseModel):
    """Base of all: frozen, and nothing unknown."""

    model_config = ConfigDict(**_GROUP, frozen=True, protected_namespaces=())


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
    count: int | Literal["auto"] = "auto"  # auto: 2 if cores and memory, or the GPUs, allow, else 1
    cpus: float = Field(default=1.0, gt=0)  # of each rank; also its compute threads
    gpus: float = Field(default=0.0, ge=0)  # of each rank
    autoscaling: AutoscalingSettings | None = None  # replaces count
    health_period_s: float = Field(default=2.0, gt=0)
    health_timeout_s: float = Field(default=30.0, gt=0)
    drain_timeout_s: float = Field(default=120.0, ge=0)  # a replica that leaves finishes its requests for so long

    @field_validator("count", mode="before")
    @classmethod
    def _auto_or_some(cls, count: Any) -> Any:
        if count != "auto" and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise ValueError(f"must be auto, or a whole number of 1 or more, not {shown(count)}")
        return count

    @field_validator("gpus")
    @classmethod
    def _whole(cls, gpus: float | None) -> float | None:
        return _check_gpus(gpus)


def _check_gpus(gpus: float | None) -> float | None:
    if gpus is not None and gpus > 1 and gpus != int(gpus):
        raise ValueError(f"must be a whole number, or a part of one GPU, below 1, not {gpus:g}")
    return gpus


# some of cache's settings, each checked by itself
_SomeOfCache = with_config(_GROUP)(TypedDict("_SomeOfCache", get_type_hints(CacheConfig), total=False))  # type: ignore[operator]


class RoleSettings(Settings):
    """What the replicas of one role have otherwise than ``replicas``, ``parallel`` and ``cache`` say."""

    count: int | None = Field(default=None, ge=1)
    autoscaling: AutoscalingSettings | None = None
    cpus: float | None = Field(default=None, gt=0)
    gpus: float | None = Field(default=None, ge=0)
    tp: int | None = Field(default=None, ge=1)
    cache: Annotated[
        dict[str, Any], GetPydanticSchema(lambda _, schema_of: schema_of(_SomeOfCache)), CACHE_NAMES
    ] = Field(default_factory=dict)  # some of cache's settings

    @field_validator("gpus")
    @classmethod
    def _whole(cls, gpus: float | None) -> float | None:
        return _check_gpus(gpus)

    @model_validator(mode="after")
    def _one_way(self) -> "RoleSettings":
        if self.count is not None and self.autoscaling is not None:
            raise ValueError("count and autoscaling are both given; allowed: one of them")
        return self
