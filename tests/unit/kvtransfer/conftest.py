"""Fixtures of the tests of stores."""

from collections.abc import Iterator

import pytest

from tests import s3_server as server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    with server.serving() as url:
        yield url
