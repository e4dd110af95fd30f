"""The stores that the conformance tests run against: a folder, and moto's S3 server when it is installed."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from reflux_storage.stores import open_store
from reflux_storage.stores.base import ObjectStore
from reflux_storage.stores.options import S3Options


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Address of a moto server on a free port."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        pytest.skip("moto[server] is not installed: S3 conformance not tested")
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def s3_options(s3_endpoint: str) -> S3Options:
    """Options for the moto server."""
    return S3Options(endpoint=s3_endpoint, access_key_id="test", secret_access_key="test", attempts=2)


@pytest.fixture
def s3_url(s3_options: S3Options) -> str:
    """A fresh bucket."""
    import boto3

    client: Any = boto3.client(
        "s3",
        endpoint_url=s3_options.endpoint,
        region_name=s3_options.region,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    bucket = f"b-{uuid4().hex}"
    client.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/some/prefix"


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each mechanism."""
    if request.param == "folder":
        return open_store(f"file://{tmp_path}/store")
    return open_store(request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options"))
