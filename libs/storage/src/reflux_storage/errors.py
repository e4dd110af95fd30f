"""What a store call can end with; each error also is the builtin that fits it."""


class StorageError(Exception):
    """Base of everything that this package raises for its callers."""


class InvalidKey(StorageError, ValueError):
    """The key can never name an object."""


class InvalidPart(StorageError, ValueError):
    """A part has a number or size that the upload does not allow."""


class AlreadyExists(StorageError, FileExistsError):
    """A create-only write found an object under the key."""


class PreconditionFailed(StorageError):
    """A compare-and-swap found another etag, or no object."""


class NotFound(StorageError, FileNotFoundError):
    """No object under the key, no such upload, or a range beyond the object's end."""


class StoreUnavailable(StorageError, ConnectionError):
    """The store did not do the call in time; the same call may succeed later."""


class CorruptObject(StorageError, ValueError):
    """Stored bytes differ from what was written."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key}: {what}")
        self.key = key
        self.what = what
