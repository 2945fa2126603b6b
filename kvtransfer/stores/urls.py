"""Opens a store by its URL.

    file:///var/cache/manta                                a folder of this host
    file://~/.cache/manta/store                            one in the home of the user whose process this is
    s3://bucket/prefix                                     AWS; credentials and region from where boto3 finds them
    s3://bucket/prefix?endpoint=http://10.0.0.7:9000&region=eu-1&timeout_s=5    a service that speaks S3
"""

import os
import urllib.parse

from kvtransfer.stores.file import FileMedium
from kvtransfer.stores.items import NO_SECRET
from kvtransfer.stores.object import ObjectMedium
from kvtransfer.stores.store import Medium, Store, Untrusted

OPTIONS = ("endpoint", "region", "timeout_s")


def open_store(url: str, *, layout_digest: bytes, capacity_bytes: int, secret: bytes = NO_SECRET) -> Store:
    """Open the store at ``url``. It may be on any thread; the calls that follow come from one.

    Args:    layout_digest: 8 bytes that differ where a page's bytes mean something else; see `page_chain`.
             capacity_bytes: of a folder, all its processes together. A bucket has lifecycle rules for it.
             secret: that items are tagged with (`store_secret`), where others can write too.
    Raises:  ValueError for a URL that names no store, or one that this host cannot have; it says what to do.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "s3":
        return Store(_bucket(url, parts), layout_digest=layout_digest, secret=secret)
    path = urllib.parse.unquote(parts.path)
    if parts.netloc == "~":
        path = os.path.expanduser(f"~{path}")
    if parts.scheme != "file" or parts.netloc not in ("", "localhost", "~") or not os.path.isabs(path) or parts.query:
        raise ValueError(
            f"{url!r} is no URL of a store: file:///absolute/path, file://~/path or s3://bucket/prefix is wanted"
        )
    if capacity_bytes <= 0:
        raise ValueError(f"a store in a folder needs a capacity, capacity_bytes = {capacity_bytes}")
    try:
        medium: Medium = FileMedium(path, capacity_bytes=capacity_bytes)
    except Untrusted as error:
        raise ValueError(
            f"the store {url} is not used: {error}. Name a folder that is not there, which is made, or take it for "
            "yourself: chown it to the user of this process, chmod it to 700, and name it rather than a link to it"
        ) from error
    except OSError as error:
        raise ValueError(f"the store {url} cannot be opened: {error}. Name a folder that can be written") from error
    return Store(medium, layout_digest=layout_digest, secret=secret)


def _bucket(url: str, parts: urllib.parse.SplitResult) -> Medium:
    options = {name: values[-1] for name, values in urllib.parse.parse_qs(parts.query).items()}
    unknown = sorted(options.keys() - set(OPTIONS))
    if not parts.netloc or unknown:
        what = f"has no option {', '.join(unknown)}" if unknown else "names no bucket"
        raise ValueError(f"{url!r} {what}: s3://bucket/prefix is wanted, and after a ? any of {', '.join(OPTIONS)}")
    try:
        deadline_s = float(options.get("timeout_s", "5"))
    except ValueError:
        deadline_s = 0.0
    if not 0 < deadline_s < 3600:
        raise ValueError(f"{url!r}: timeout_s is seconds, more than 0 and less than 3600")
    endpoint, region = options.get("endpoint"), options.get("region")
    return ObjectMedium(parts.netloc, prefix=parts.path, endpoint=endpoint, region=region, deadline_s=deadline_s)
