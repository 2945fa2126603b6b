"""A store is opened by its URL; a URL that names none says what to do."""

import socket
import sys
from pathlib import Path

import pytest

from kvtransfer.stores.store import ReadStatus, WriteStatus
from kvtransfer.stores.urls import name_of, open_store
from tests.s3_server import BUCKET
from tests.unit.kvtransfer.test_store_protocol import LAYOUT, key_of, only, run_of_pages, views


def test_a_folder_and_a_bucket_are_opened_by_url(tmp_path: Path, s3_server: str) -> None:
    for url in (f"file://{tmp_path}/a%20b", f"s3://{BUCKET}/urls/deep?endpoint={s3_server}&region=eu-1&timeout_s=9"):
        store = open_store(url, layout_digest=LAYOUT, capacity_bytes=10**6)
        pages = views(run_of_pages(1, seed=1))
        assert only(store.write([(key_of(1), pages)])).status is WriteStatus.STORED
        assert only(store.read([(key_of(1), pages)])).status is ReadStatus.OK
        store.check()
        store.close()
    assert len(list((tmp_path / "a b").glob("*/*.kv"))) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/var/cache", "'/var/cache' is no URL of a store: file:///absolute/path, file://~/path or s3:"),
        ("file://host/path", "is no URL of a store"),
        ("redis://host", "is no URL of a store"),
        ("file:///var/cache?region=eu-1", "has no option region: file:///absolute/path, file://~/path is wanted"),
        ("s3:///prefix", "names no bucket: s3://bucket/prefix is wanted"),
        ("s3://bucket?endpiont=http://a", "has no option endpiont: .* any of endpoint, region, timeout_s"),
        ("s3://bucket?timeout_s=soon", "timeout_s is seconds"),
        ("s3://bucket?endpoint=nowhere", "nowhere"),
        ("file:///dev/null/x", "cannot be opened: .*Name a folder that can be written"),
    ],
)
def test_a_url_that_names_no_store_says_what_to_do(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(url, layout_digest=LAYOUT, capacity_bytes=10**6)


def test_a_folder_may_lie_in_the_users_own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = open_store("file://~/.cache/manta/store", layout_digest=LAYOUT, capacity_bytes=10**6)
    assert only(store.write([(key_of(1), views(run_of_pages(1, seed=1)))])).status is WriteStatus.STORED
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / ".cache/manta/store").glob("**")] == [0o700] * 2


def test_a_folder_that_others_may_write_is_refused_with_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    says = rf"the store file://{tmp_path} is not used: {tmp_path} can be written by others \(mode 777\). Name a folder"
    with pytest.raises(ValueError, match=says):
        open_store(f"file://{tmp_path}", layout_digest=LAYOUT, capacity_bytes=10**6)


def test_a_folder_needs_a_capacity(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capacity_bytes = 0"):
        open_store(f"file://{tmp_path}/store", layout_digest=LAYOUT, capacity_bytes=0)
    assert not (tmp_path / "store").exists()


def test_without_boto3_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[s3\]'"):
        open_store("s3://bucket", layout_digest=LAYOUT, capacity_bytes=10**6)


def test_a_folder_is_named_with_its_host_and_a_bucket_without_its_options() -> None:
    assert name_of("file:///var/cache") == f"{socket.gethostname()}:file:///var/cache"
    assert name_of("s3://bucket/prefix?region=eu-1") == "s3://bucket/prefix"
