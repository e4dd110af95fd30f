"""Which mechanism serves which address."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from reflux_storage.stores.base import ObjectStore
from reflux_storage.stores.options import S3Options


def open_store(url: str, s3: S3Options | None = None) -> ObjectStore:
    """Opens `file:///folder` (created when missing) or `s3://bucket/prefix`; sends nothing over a network yet.

    Raises `ValueError` for another address, `StoreUnavailable` for a folder that cannot be used.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path not in ("", "/"):
        from reflux_storage.stores.folder import FolderStore

        return FolderStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        from reflux_storage.stores.s3 import S3Store  # boto3 takes 0.3 s to import

        return S3Store(parts.netloc, parts.path.strip("/"), s3 or S3Options())
    raise ValueError(f"not an object store: {url!r} (want file:///folder or s3://bucket/prefix)")
