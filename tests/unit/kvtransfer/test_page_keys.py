import numpy as np

from kvtransfer.pages import page_keys

TOKENS = np.arange(64, dtype=np.int32)


def test_keys_of_a_prefix_are_a_prefix_of_the_keys() -> None:
    assert page_keys(TOKENS, 16, "").tolist()[:2] == page_keys(TOKENS[:32], 16, "").tolist()


def test_a_key_tells_its_tokens_all_tokens_before_and_the_salt() -> None:
    changed = TOKENS.copy()
    changed[0] = 99
    keys, others, salted = (page_keys(*args) for args in ((TOKENS, 16, ""), (changed, 16, ""), (TOKENS, 16, "x")))
    assert len({*keys.tolist(), *others.tolist(), *salted.tolist()}) == 12


def test_a_chain_goes_on_from_its_parent() -> None:
    keys = page_keys(TOKENS, 16, "x")
    assert page_keys(TOKENS[16:], 16, "", parent=int(keys[0])).tolist() == keys.tolist()[1:]


def test_a_partial_page_has_no_key() -> None:
    assert len(page_keys(TOKENS[:31], 16, "")) == 1
    assert page_keys(TOKENS[:15], 16, "").dtype == np.uint64
    assert len(page_keys(TOKENS[:15], 16, "")) == 0


def test_keys_are_the_same_in_every_process_and_for_every_layout_of_the_array() -> None:
    """A key that another process, or an older run, made must still name the same page."""
    strided = np.stack([TOKENS, TOKENS], axis=1)[:, 0]
    assert page_keys(strided, 16, "").tolist() == page_keys(TOKENS, 16, "").tolist()
    assert hex(int(page_keys(np.array([1, 2, 3, 4], dtype=np.int32), 4, "")[0])) == "0x6fc1ebd4f4d6ea31"
