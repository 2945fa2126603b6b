"""A server that speaks S3, on loopback, for the tests of stores."""

import contextlib
from collections.abc import Iterator
from unittest import mock

BUCKET = "manta-test"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "manta", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Run moto's server with an empty bucket, and have credentials in the environment. Yields: its URL."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with mock.patch.dict("os.environ", CREDENTIALS):
        boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1").create_bucket(Bucket=BUCKET)
        yield f"http://{host}:{port}"
    server.stop()
