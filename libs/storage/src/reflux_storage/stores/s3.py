"""An object store in an S3 bucket: conditional writes, bounded waits, and an answer when a response was lost.

Every write carries a token of its own in the object's metadata. The client retries on its own, so a refused condition
(412) or a vanished upload may be the echo of our own first try: `head` and the token decide.
"""

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import boto3.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from reflux_storage.errors import AlreadyExists, InvalidPart, NotFound, PreconditionFailed, StorageError
from reflux_storage.errors import StoreUnavailable as Unavailable
from reflux_storage.stores.base import (
    MAX_PARTS,
    MIN_PART_BYTES,
    MultipartUpload,
    ObjectInfo,
    ObjectStore,
    OpenUpload,
    PartReceipt,
    checked_key,
    checked_prefix,
)
from reflux_storage.stores.options import S3Options

# It reports every look for credentials at INFO.
logging.getLogger("botocore").setLevel(logging.WARNING)

_TOKEN = "reflux-write"
_MISSING = {"NoSuchKey", "404", "NotFound", "NoSuchUpload", "InvalidRange", "416"}
_REFUSED = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "409"}
_CONFLICT_TRIES = 4
_BODY_TRIES = 3


class S3Store(ObjectStore):
    """See the module; keys live under `prefix` of `bucket`."""

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        self._bucket = bucket
        self._prefix = f"{checked_key(prefix)}/" if prefix else ""
        self._where = f"s3://{bucket}" + (f" at {options.endpoint}" if options.endpoint else "")
        config = Config(
            connect_timeout=options.connect_timeout_seconds,
            read_timeout=options.read_timeout_seconds,
            retries={"mode": "standard", "total_max_attempts": options.attempts},
            max_pool_connections=options.connections,
            # Self-hosted servers have no DNS name per bucket.
            s3={"addressing_style": "path" if options.endpoint else "auto"},
        )
        with self._translated(""):
            self._client: Any = boto3.session.Session().client(
                "s3",
                endpoint_url=options.endpoint,
                region_name=options.region,
                aws_access_key_id=options.access_key_id,
                aws_secret_access_key=options.secret_access_key,
                config=config,
            )

    def put_create_only(self, key: str, data: bytes | memoryview) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._put(key, data, AlreadyExists(f"{key} exists"), IfNoneMatch="*")

    def put_if_match(self, key: str, data: bytes | memoryview, etag: str) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._put(key, data, PreconditionFailed(f"{key} has changed or does not exist"), IfMatch=etag)

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """See `ObjectStore`."""
        with self._translated(key):
            found = self._client.get_object(Bucket=self._bucket, Key=self._full(key))
            return found["Body"].read(), _info(key, found)

    def get_range(self, key: str, offset_bytes: int, into: memoryview) -> None:
        """See `ObjectStore`."""
        view = into.cast("B")
        if not len(view):
            return
        done = 0
        for attempt in range(_BODY_TRIES):
            wanted = f"bytes={offset_bytes + done}-{offset_bytes + len(view) - 1}"
            with self._translated(key):
                body = self._client.get_object(Bucket=self._bucket, Key=self._full(key), Range=wanted)["Body"]
                try:
                    while done < len(view) and (count := body.readinto(view[done:])):
                        done += count
                    break
                except HTTPClientError:  # the client repeats requests, not broken bodies: go on behind what came
                    if attempt == _BODY_TRIES - 1:
                        raise
        if done < len(view):
            raise NotFound(f"{key} ends before byte {offset_bytes + len(view)}")

    def head(self, key: str) -> ObjectInfo:
        """See `ObjectStore`."""
        return self._head(key)[0]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See `ObjectStore`."""
        pages = self._client.get_paginator("list_objects_v2")
        with self._translated(prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + checked_prefix(prefix)):
                for found in page.get("Contents", ()):
                    yield ObjectInfo(
                        found["Key"].removeprefix(self._prefix),
                        found["Size"],
                        found["ETag"],
                        found["LastModified"].timestamp(),
                    )

    def delete(self, key: str) -> None:
        """See `ObjectStore`."""
        with self._translated(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._full(key))

    def begin(self, key: str, part_bytes: int) -> MultipartUpload:
        """See `ObjectStore`."""
        if part_bytes < MIN_PART_BYTES:
            raise InvalidPart(f"{key}: parts of {part_bytes} bytes, the least is {MIN_PART_BYTES}")
        token = uuid.uuid4().hex
        with self._translated(key):
            answer = self._client.create_multipart_upload(
                Bucket=self._bucket, Key=self._full(key), Metadata={_TOKEN: token}
            )
        return MultipartUpload(key, f"{token}:{answer['UploadId']}", part_bytes)

    def put_part(self, upload: MultipartUpload, number: int, data: bytes | memoryview) -> PartReceipt:
        """See `ObjectStore`."""
        size = memoryview(data).nbytes
        if not 1 <= number <= MAX_PARTS or not 0 < size <= upload.part_bytes:
            raise InvalidPart(f"{upload.key}: part {number} of {size} bytes")
        with self._translated(upload.key):
            answer = self._client.upload_part(
                Bucket=self._bucket,
                Key=self._full(upload.key),
                UploadId=_bare(upload.upload_id),
                PartNumber=number,
                Body=bytes(data),  # the client takes no views: one copy of one part
            )
        # Servers that check parts want the same checksum again at completion.
        sums = "".join(f" {name}={answer[name]}" for name in ("ChecksumCRC32", "ChecksumCRC32C") if name in answer)
        return PartReceipt(number, size, answer["ETag"] + sums)

    def complete_create_only(self, upload: MultipartUpload, parts: Sequence[PartReceipt]) -> ObjectInfo:
        """See `ObjectStore`."""
        if [part.number for part in parts] != list(range(1, len(parts) + 1)) or not parts:
            raise InvalidPart(f"{upload.key}: parts must be 1..n")
        token = upload.upload_id.partition(":")[0]
        try:
            self._conditional(
                upload.key,
                self._client.complete_multipart_upload,
                AlreadyExists(f"{upload.key} exists"),
                UploadId=_bare(upload.upload_id),
                MultipartUpload={"Parts": [_completed(part) for part in parts]},
                IfNoneMatch="*",
            )
        except (AlreadyExists, NotFound) as refused:
            return self._ours_or(refused, upload.key, token)
        return self.head(upload.key)

    def abort(self, upload_key: str, upload_id: str) -> None:
        """See `ObjectStore`."""
        with self._translated(upload_key):
            try:
                self._client.abort_multipart_upload(
                    Bucket=self._bucket, Key=self._full(upload_key), UploadId=_bare(upload_id)
                )
            except ClientError as error:
                if _code(error) not in _MISSING:
                    raise

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """See `ObjectStore`."""
        pages = self._client.get_paginator("list_multipart_uploads")
        with self._translated(prefix):
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + checked_prefix(prefix)):
                for found in page.get("Uploads", ()):
                    key = found["Key"].removeprefix(self._prefix)
                    yield OpenUpload(key, found["UploadId"], found["Initiated"].timestamp())

    def check(self) -> None:
        """See `ObjectStore`."""
        with self._translated(""):
            self._client.head_bucket(Bucket=self._bucket)

    def _full(self, key: str) -> str:
        return self._prefix + checked_key(key)

    def _head(self, key: str) -> tuple[ObjectInfo, str]:
        with self._translated(key):
            found = self._client.head_object(Bucket=self._bucket, Key=self._full(key))
            return _info(key, found), found.get("Metadata", {}).get(_TOKEN, "")

    def _put(self, key: str, data: bytes | memoryview, refusal: Exception, **condition: str) -> ObjectInfo:
        token = uuid.uuid4().hex
        try:
            self._conditional(
                key, self._client.put_object, refusal, Body=bytes(data), Metadata={_TOKEN: token}, **condition
            )
        except (AlreadyExists, PreconditionFailed) as refused:
            return self._ours_or(refused, key, token)
        return self.head(key)

    def _conditional(self, key: str, call: Any, refusal: Exception, **arguments: Any) -> None:
        """Makes a conditional write; raises `refusal` when its condition does not hold."""
        for attempt in range(_CONFLICT_TRIES):
            with self._translated(key):
                try:
                    call(Bucket=self._bucket, Key=self._full(key), **arguments)
                    return
                except ClientError as error:
                    refused = _code(error) in _REFUSED or ("IfMatch" in arguments and _code(error) in _MISSING)
                    if refused:
                        raise refusal from None
                    # Another conditional write is under way; S3 asks to try again.
                    if _code(error) not in _CONFLICT or attempt == _CONFLICT_TRIES - 1:
                        raise

    def _ours_or(self, refused: Exception, key: str, token: str) -> ObjectInfo:
        """The object, if the refused write made it after all; otherwise raises `refused`."""
        try:
            info, found = self._head(key)
        except NotFound:
            raise refused from None
        if found != token:
            raise refused
        return info

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Turns the client's errors into the contract's."""
        try:
            yield
        except StorageError:
            raise
        except ClientError as error:
            code = _code(error)
            # Without an object in play a 404 is the bucket's.
            if code in _MISSING and key:
                raise NotFound(f"no object or upload {key}") from None
            detail = "no such bucket" if code in ("NoSuchBucket", "404") else f"{code} for {error.operation_name}"
            raise Unavailable(f"{self._where}: {detail}") from error
        except (BotoCoreError, HTTPClientError, OSError, ValueError) as error:  # ValueError: a malformed endpoint
            raise Unavailable(f"{self._where}: {error}") from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def _info(key: str, found: dict[str, Any]) -> ObjectInfo:
    return ObjectInfo(key, found["ContentLength"], found["ETag"], found["LastModified"].timestamp())


def _bare(upload_id: str) -> str:
    """The server's part of an upload id of ours, or of one that `list_uploads` gave."""
    token, colon, bare = upload_id.partition(":")
    return bare if colon and len(token) == 32 else upload_id


def _completed(part: PartReceipt) -> dict[str, Any]:
    etag, *sums = part.token.split(" ")
    return {"PartNumber": part.number, "ETag": etag, **dict(item.split("=", 1) for item in sums)}
