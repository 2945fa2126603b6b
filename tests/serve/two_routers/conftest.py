"""Two routers over two replicas of the short model, with adapters and batches, for both files of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import make_adapter
from tests.embedded import short_model
from tests.serve.running import Running, serving

FIXED, FIRST, SECOND = "fixed", "first", "second"


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the application keeps its batches (batches/), and finds its adapters (all/)."""
    return tmp_path_factory.mktemp("two_routers")


@pytest.fixture(scope="package")
def refs(folder: Path) -> set[str]:
    """The identities of the three adapters."""
    path = Path(short_model())
    names = (FIXED, FIRST, SECOND)
    return {make_adapter(folder / "all" / name, path, seed=n, size=0.5).identity for n, name in enumerate(names)}


@pytest.fixture(scope="package")
def app(folder: Path, refs: set[str]) -> Iterator[Running]:
    roots = folder / "all"
    with serving(
        folder,
        model={"path": short_model()},
        replicas={"count": 2, "cpus": 0.5, "health_period_s": 0.5},
        cache={"max_total_tokens": 16_000},
        router={"count": 2, "batch_folder": str(folder / "batches")},
        adapters={"names": {FIXED: str(roots / FIXED)}, "roots": [str(roots)], "names_folder": str(folder / "names")},
    ) as running:
        yield running
