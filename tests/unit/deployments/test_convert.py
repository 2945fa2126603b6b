"""What an absent or a strange field means."""

import pytest

from deployments.http.convert import salt_of
from replicas.errors import InvalidRequest


def test_different_keys_give_different_salts() -> None:
    pairs = [(None, None), ("a", None), ("a", "b"), (None, "a"), ("ab", None), ('a", "b', "c"), ("b", "a")]
    assert len({salt_of(*pair) for pair in pairs}) == len(pairs)
    assert salt_of("", "") == salt_of(None) == ""


@pytest.mark.parametrize(
    ("keys", "param"),
    [(("a\0b", None), "cache_salt"), (("a", "\0"), "extra_key"), (("\1id\1", None), "cache_salt")],
)  # fmt: skip
def test_a_key_that_could_pass_for_two_or_an_adapters_is_refused(keys: tuple[str, str | None], param: str) -> None:
    with pytest.raises(InvalidRequest, match="U") as caught:
        salt_of(*keys)
    assert caught.value.param == param
