"""How long the start of an engine took, by phase."""

from dashboards.catalog import CATALOG
from replicas.engine.loop import EngineLoop


def test_an_engine_knows_how_long_each_phase_of_its_start_took(engine_loop: EngineLoop) -> None:
    times = engine_loop.engine.started.times
    assert set(times) == set(CATALOG["replica_start_seconds"].labels["phase"])
    assert all(took_s > 0 for took_s in times.values())
    assert times["load_weights"] + times["warm_up"] < times["total"]
