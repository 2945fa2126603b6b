"""What narrow numbers in the KV pool cost the embedded model (SPEC K10, K11)."""

from collections.abc import Iterator

import pytest

from replicas.config import CacheConfig, KvDType
from replicas.engine.engine import Engine
from replicas.launch import EngineSettings, load_engine
from replicas.loading.model_files import load_model_config
from tests.embedded import MODEL
from tests.numerics.perplexity import perplexity, text_ids

pytestmark = pytest.mark.model
NUM_TOKENS = 400


def engine(kv_dtype: KvDType, *, attention: str = "auto") -> Engine:
    cache = CacheConfig(kv_dtype=kv_dtype, max_total_tokens=1024)
    return load_engine(EngineSettings(model=MODEL, cache=cache, attention=attention, num_threads=1, context_len=1024))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def exact() -> Iterator[float]:
    """Perplexity with the pool in float32."""
    made = engine("float32")
    yield perplexity(made, text_ids(made, NUM_TOKENS))
    made.close()


@pytest.mark.parametrize(
    ("kv_dtype", "percent"),
    [
        ("int8", 1.0),
        pytest.param("fp8", 3.0, marks=pytest.mark.slow),
        pytest.param("fp8_e5m2", 6.0, marks=pytest.mark.slow),
    ],
)
def test_perplexity_stays_within(exact: float, kv_dtype: KvDType, percent: float) -> None:
    made = engine(kv_dtype)
    assert perplexity(made, text_ids(made, NUM_TOKENS)) == pytest.approx(exact, rel=percent / 100)
    made.close()


def test_the_reference_backend_says_the_same_of_an_int8_pool() -> None:
    """Each reads what it stored. Sums that differ in their last bit round a number the other way once in a while, and
    the layers above carry that on: the two are as far apart as either is from float32."""
    fast, plain = engine("int8"), engine("int8", attention="torch_native")
    ids = text_ids(fast, 200)
    assert perplexity(fast, ids) == pytest.approx(perplexity(plain, ids), rel=0.01)
    for made in (fast, plain):
        made.close()


@pytest.mark.parametrize(("kv_dtype", "cell_bytes"), [("float32", 46_080), ("bfloat16", 23_040), ("int8", 12_240)])
def test_the_same_memory_holds_more_tokens(kv_dtype: KvDType, cell_bytes: int) -> None:
    """30 layers x K and V x 3 heads x (64 numbers and, for int8, a scale of 4 bytes)."""
    assert load_model_config(MODEL).kv_cell_bytes(tp=1, kv_dtype=kv_dtype) == cell_bytes
