"""The ``transfer`` group: how prefill replicas hand K/V to decode replicas, and the secret that they share.

Owns:      names and checks of these settings; their defaults are those of kvtransfer/types.py.
Never:     shows the token: it is a SecretStr here, and `shown` leaves it out.
"""

import dataclasses
import os
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, field_validator

from deployments.settings.replica_settings import Settings
from kvtransfer.types import TransferSettings, Verify

TOKEN_VARIABLE = "MANTA_TRANSFER_TOKEN"
TOKEN_LEN = 16  # characters, at least
_DEFAULT: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(TransferSettings)}


def _yaml_off(value: Any) -> Any:
    return "off" if value is False else value  # in YAML a bare ``off`` is False


class TransferGroup(Settings):
    hand_off: Literal["conditional", "always"] = "conditional"  # always: whatever may be, even where that takes longer
    # None: all pages between CPUs; the last page of each write where a role has GPUs, whose pages are read back for it
    verify: Annotated[Verify | None, BeforeValidator(_yaml_off)] = None
    transport: Literal["auto", "tcp"] = "auto"
    host: str = Field(default="auto", min_length=1)  # where services listen; auto: the address of the replica's node
    token: SecretStr | None = None  # None: from the environment, else made by build
    open_timeout_s: float = Field(default=_DEFAULT["open_timeout_s"], gt=0)
    room_timeout_s: float = Field(default=_DEFAULT["room_timeout_s"], gt=0)
    call_timeout_s: float = Field(default=_DEFAULT["call_timeout_s"], gt=0)
    heartbeat_s: float = Field(default=_DEFAULT["heartbeat_s"], gt=0)
    heartbeat_misses: int = Field(default=_DEFAULT["heartbeat_misses"], ge=1)
    rank_timeout_s: float = Field(default=_DEFAULT["rank_timeout_s"], gt=0)
    pages_per_write: int = Field(default=_DEFAULT["pages_per_write"], ge=1)

    @field_validator("token")
    @classmethod
    def _long_enough(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and len(token.get_secret_value()) < TOKEN_LEN:
            raise ValueError(f"must have at least {TOKEN_LEN} characters, here or in {TOKEN_VARIABLE}")
        return token

    def of_engine(self, node_address: str) -> TransferSettings:
        """For an engine on the node with this address; `with_token` and `resolved` have been called."""
        assert self.token is not None, "build gives the replicas a token"
        given = {name: getattr(self, name) for name in _DEFAULT if name not in ("host", "token")}
        given["verify"] = self.verify or Verify.ALL
        host = node_address if self.host == "auto" else self.host
        return TransferSettings(host=host, token=self.token.get_secret_value().encode(), **given)

    def resolved(self, *, on_gpus: bool) -> "TransferGroup":
        """With what both sides must agree on filled in. ``on_gpus``: one of them, or both, have their pages there."""
        return self.model_copy(update={"verify": self.verify or (Verify.LAST if on_gpus else Verify.ALL)})

    def shown(self) -> dict[str, Any]:
        """As anyone may see it."""
        return self.model_dump(mode="json", exclude={"token"})


def with_token(args: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """``args`` for the replicas: with the secret of this cluster, from the settings, the environment, or new. What the
    environment gives has not been checked: parse them."""
    if not isinstance(args.get("transfer") or {}, Mapping):
        return dict(args)  # the check of the settings says so
    transfer = dict(args.get("transfer") or {})
    if not transfer.get("token"):
        transfer["token"] = environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)
    return {**args, "transfer": transfer}


def without_token(args: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` as anyone may see them."""
    transfer = {name: value for name, value in (args.get("transfer") or {}).items() if name != "token"}
    return {**args, "transfer": transfer} if "transfer" in args else dict(args)
