"""How to reach an S3 endpoint."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class S3Options:
    """Endpoint, credentials and bounds of one S3 client."""

    endpoint: str | None = None
    """Address of an S3-compatible server; None is AWS."""

    region: str = "us-east-1"
    """Region to sign for."""

    access_key_id: str | None = None
    """None leaves credentials to the client's own chain (AWS_ACCESS_KEY_ID and so on)."""

    secret_access_key: str | None = None
    """Belongs to `access_key_id`."""

    connect_timeout_seconds: float = 3.0
    """Bound of one connection attempt."""

    read_timeout_seconds: float = 30.0
    """Longest silence of a connection that has been made."""

    attempts: int = 4
    """Tries of one request (connection errors, 5xx, SlowDown) with jittered back-off."""

    connections: int = 16
    """Most connections that the client keeps open."""
