"""The ``args`` of the observatory's application, checked before anything starts.

Owns:      names and checks of its settings; the admin key is one, and may come from the environment instead.
Never:     shows the key: it is a SecretStr here.
"""

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from pydantic import Field, SecretStr, ValidationError, field_validator

from deployments.replica_settings import Settings, nearest
from replicas.errors import InvalidConfig

KEY_VARIABLE = "MANTA_ADMIN_KEY"
KEY_LEN = 8  # characters, at least


class ObservatorySettings(Settings):
    application: str = Field(default="manta", min_length=1)  # name of the application that it watches
    admin_key: SecretStr | None = None  # None: from the environment; without one, everybody may look

    @field_validator("admin_key")
    @classmethod
    def _long_enough(cls, key: SecretStr | None) -> SecretStr | None:
        if key is not None and len(key.get_secret_value()) < KEY_LEN:
            raise ValueError(f"must have at least {KEY_LEN} characters, here or in {KEY_VARIABLE}")
        return key

    @property
    def key(self) -> str | None:
        return None if self.admin_key is None else self.admin_key.get_secret_value()


def parse(args: Mapping[str, Any]) -> ObservatorySettings:
    """The settings. Raises: InvalidConfig that lists every setting that is wrong, why, and what is allowed."""
    try:
        return ObservatorySettings.model_validate(dict(args))
    except ValidationError as error:
        problems = [_problem(each) for each in error.errors(include_url=False)]
        message = "args of the observatory:\n" + "\n".join(f"  {problem}" for problem in problems)
        raise InvalidConfig(message) from error


def with_key(args: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """``args`` with the key of the environment where they hold none; to be parsed."""
    given = environ.get(KEY_VARIABLE)
    return {**args, "admin_key": given} if given and not args.get("admin_key") else dict(args)


def key_moved(args: Mapping[str, Any], environ: MutableMapping[str, str] = os.environ) -> dict[str, Any]:
    """``args`` without their key, which the environment has from now on: Serve writes arguments into its logs."""
    args = dict(args)
    key = args.pop("admin_key", None)
    if key:
        environ[KEY_VARIABLE] = str(key)
    return args


def _problem(error: Any) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        names = list(ObservatorySettings.model_fields)
        return f"{name}: is unknown{nearest(name, names)}; allowed: {', '.join(names)}"
    return f"{name}: {error['msg'].removeprefix('Value error, ')}"  # what was given may be the key
