"""The ``args`` of the observatory's application, checked before anything starts.

Owns:      names and checks of its settings; the admin key is one, and may come from the environment instead.
Never:     shows the key: it is a SecretStr here.
"""

import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator

from deployments.settings.groups import Settings
from deployments.settings.settings_file import sentences
from deployments.tenancy.keys import KEY_LEN, KEY_VARIABLE
from replicas.errors import InvalidConfig


class ObservatorySettings(Settings):
    """The settings of the observatory's own application."""

    application: str = Field(default="manta", min_length=1)  # name of the application that it watches
    admin_key: SecretStr | None = None  # None: from the environment; without a key the observatory is open
    allowed_hosts: tuple[str, ...] = ()  # names in Host beside the loopback's, where that is served without a key
    grafana_url: str | None = Field(default=None, pattern=r"^https?://")  # where people open it; the page leads there
    log_format: Literal["text", "json"] = "text"  # of its own log lines

    @field_validator("admin_key")
    @classmethod
    def _long_enough(cls, key: SecretStr | None) -> SecretStr | None:
        """Check the key's length, without white space around it."""
        if key is None:
            return None
        stripped = key.get_secret_value().strip()
        if len(stripped) < KEY_LEN:
            raise ValueError(f"must have at least {KEY_LEN} characters, here or in {KEY_VARIABLE}")
        return SecretStr(stripped)

    @property
    def key(self) -> str | None:
        return None if self.admin_key is None else self.admin_key.get_secret_value()


def parse(args: Mapping[str, Any]) -> ObservatorySettings:
    """Check ``args``. Raises: InvalidConfig that lists every wrong setting, why, and what is allowed."""
    try:
        return ObservatorySettings.model_validate(dict(args))
    except ValidationError as error:
        allowed = list(ObservatorySettings.model_fields)
        raise InvalidConfig(*sentences(error, allowed=lambda _: allowed)) from error


def with_key(args: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return ``args`` with the key of the environment if they have none; to be parsed."""
    given = environ.get(KEY_VARIABLE)
    return {**args, "admin_key": given} if given and not args.get("admin_key") else dict(args)


def key_moved(args: Mapping[str, Any], environ: MutableMapping[str, str] = os.environ) -> dict[str, Any]:
    """Move the key from ``args`` into the environment: Serve writes arguments into its logs."""
    args = dict(args)
    key = args.pop("admin_key", None)
    if key:
        environ[KEY_VARIABLE] = str(key)
    return args


def check_one_key(all_args: Iterable[Mapping[str, Any]], environ: Mapping[str, str] = os.environ) -> None:
    """Check that groups of settings which share an environment (`key_moved`) have one key: the args of an observatory,
    the router's group of an application. Raises: InvalidConfig."""
    given = (with_key(args, environ).get("admin_key") for args in all_args)
    keys = {str(key).strip() for key in given if key}
    if len(keys) > 1:
        raise InvalidConfig(
            "admin_key: the observatories and routers of one file are built in one environment, which has one key: "
            f"give them all the same admin_key, or leave it out and set {KEY_VARIABLE}"
        )


def key_sent(
    args: Mapping[str, Any],
    runtime_env: Mapping[str, Any],
    environ: Mapping[str, str] = os.environ,
    *,
    names: Sequence[str] = (KEY_VARIABLE,),
) -> dict[str, Any] | None:
    """Return ``runtime_env`` with the keys of our environment, for a cluster that has another one; None if there are
    none here or the file gives them. ``names``: of the variables."""
    env_vars = dict(runtime_env.get("env_vars") or {})
    given = {KEY_VARIABLE} if args.get("admin_key") else set()
    sent = {name: environ[name] for name in names if environ.get(name) and name not in {*env_vars, *given}}
    return {**runtime_env, "env_vars": {**env_vars, **sent}} if sent else None
