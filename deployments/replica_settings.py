"""Settings of the replicas: how many, with what, and what a role's own group changes of it.

Owns:      the base class of all settings groups: frozen, and nothing unknown.
Never:     knows the engine's settings but by their dataclasses.
"""

import dataclasses
import difflib
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.other_names import CACHE_NAMES, here
from replicas.config import CacheConfig


def only_fields_of(cls: type) -> BeforeValidator:
    """Pydantic ignores what a dataclass does not know; a setting that is misspelt must not be."""
    names = [field.name for field in dataclasses.fields(cls)]

    def check(value: Any) -> Any:
        if isinstance(value, dict):
            for name in value:
                if name not in names:
                    raise ValueError(f"{name!r} is unknown{nearest(str(name), names)}; allowed: {', '.join(names)}")
        return value

    return BeforeValidator(check)


def nearest(name: str, names: list[str]) -> str:
    """In words that follow ``name``: what it is called here, or which of ``names`` may have been meant."""
    if ours := here(name):
        return f" (here it is {ours})"
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


class Settings(BaseModel):
    """Base of all: frozen, and nothing unknown."""

    # errors are logged with their cause; what was given may hold a secret
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), hide_input_in_errors=True)


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


def _partial(value: Any) -> Any:
    """Some fields of CacheConfig, each checked and converted by itself."""
    if isinstance(value, dict):
        try:
            checked = TypeAdapter(CacheConfig).validate_python(value)
        except ValidationError as error:
            wrong = [f"{each['loc'][0]}: {each['msg']}" for each in error.errors(include_url=False)]
            raise ValueError("; ".join(wrong)) from error
        return {name: getattr(checked, name) for name in value}
    return value


class RoleSettings(Settings):
    """What the replicas of one role have otherwise than ``replicas``, ``parallel`` and ``cache`` say."""

    count: int | None = Field(default=None, ge=1)
    autoscaling: AutoscalingSettings | None = None
    cpus: float | None = Field(default=None, gt=0)
    gpus: float | None = Field(default=None, ge=0)
    tp: int | None = Field(default=None, ge=1)
    # some of cache's settings; validators run from the last to the first
    cache: Annotated[
        dict[str, Any], BeforeValidator(_partial), only_fields_of(CacheConfig), CACHE_NAMES
    ] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_way(self) -> "RoleSettings":
        if self.count is not None and self.autoscaling is not None:
            raise ValueError("count and autoscaling are both given; allowed: one of them")
        return self
