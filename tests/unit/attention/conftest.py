import pytest

from replicas.kernels import bf16_tiles


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that does not multiply bf16: K and V in it become fp32."""
    monkeypatch.setattr(bf16_tiles, "way", lambda: None)
