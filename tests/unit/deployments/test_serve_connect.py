"""`deployments serve` with RAY_ADDRESS: a cluster that is not there is said at once."""

import socket
import time

import pytest

from deployments.command import cluster


def test_a_cluster_that_does_not_answer_is_said_with_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens there
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        started_s = time.monotonic()
        with pytest.raises(cluster.NoCluster, match=f"Ray at {address} .* does not answer") as raised:
            cluster.connect(address)
    assert "ray start --head" in str(raised.value)
    assert time.monotonic() - started_s < cluster.REACH_S + 5  # Ray alone takes minutes
