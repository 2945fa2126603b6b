"""Builds the transfer desk of an engine over the pools of its ranks.

Owns:      the order of it: layout, ports, desk.
Never:     decides settings.
"""

from collections.abc import Callable, Sequence

from kvtransfer.ports.ports import RankPort
from kvtransfer.rooms.desk import KvTransfer
from kvtransfer.types import TransferSettings
from replicas.config import EngineConfig, kv_layout
from replicas.disagg.rooms import HandOffTerms
from replicas.disagg.wake import Wake
from replicas.errors import InvalidConfig
from replicas.runner.identity import model_identity
from replicas.runner.port import PortSpec


def port_spec(config: EngineConfig, settings: TransferSettings) -> PortSpec:
    """What all ports agree on. Raises: InvalidConfig when this engine's pages cannot be handed over."""
    try:
        identity = model_identity(config.model.path, config.model.quantization)
        return PortSpec(layout=kv_layout(config, identity), settings=settings)
    except ValueError as error:
        raise InvalidConfig(
            f"K/V cannot be handed over with parallel.tp = {config.parallel.tp}: {error}; choose a tp that divides the "
            "KV heads, or serve this model without hand-offs"
        ) from error


def open_desk(
    spec: PortSpec, make_ports: Callable[[], Sequence[RankPort]], wake: Wake
) -> tuple[KvTransfer, HandOffTerms]:
    """A desk that runs, and the terms on which the engine uses it. ``make_ports`` is called on the desk's thread.

    Raises: TransferError or OSError when the transfer library or the listening address is not to be had.
    """
    settings = spec.settings
    desk = KvTransfer(settings, spec.layout, make_ports, on_event=wake)
    desk.start()
    terms = HandOffTerms(
        fingerprint=spec.layout.fingerprint,
        open_timeout_s=settings.open_timeout_s,
        room_timeout_s=settings.room_timeout_s,
    )
    return desk, terms
