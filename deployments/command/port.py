"""The port that HTTP is served at: whether it is free, and who has it.

Never:     imports Ray or torch: a port that is taken is said within a second.
"""

import contextlib
import socket

import psutil

from replicas.errors import InvalidConfig


def check_port(host: str, port: int) -> None:
    """Raises: InvalidConfig when another process listens there, naming it where this user may know, or nobody can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            holder = _holder(port)
            held = f"{holder} listens there: stop it" if holder else "stop what holds it"
            raise InvalidConfig(
                f"http_options.port = {port}: {host}:{port} cannot be listened on ({error.strerror}); {held}, or give "
                "another port"
            ) from error


def _holder(port: int) -> str:
    """The process that listens at ``port``; "" where that cannot be known."""
    with contextlib.suppress(psutil.Error, OSError):
        for each in psutil.net_connections(kind="tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                process = psutil.Process(each.pid)
                return f"process {each.pid} ({' '.join(process.cmdline())[:80] or process.name()})"
    return ""
