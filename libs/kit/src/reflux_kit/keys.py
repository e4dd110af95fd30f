"""Files of settings that operators write: TOML, checked against a model; and API keys in them, hashed."""

import hashlib
import hmac
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reflux_kit.errors import StartupError

M = TypeVar("M", bound=BaseModel)


def read_toml(path: str, kind: type[M], what: str) -> M:
    """A file as `kind`. Raises `StartupError`, that it is a file of `what`, naming the mistake without its value."""
    try:
        with Path(path).open("rb") as file:
            return kind.model_validate(tomllib.load(file))
    except OSError as error:
        raise StartupError(f"the file of {what} {path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the file of {what} {path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise StartupError(f"the file of {what} {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


class HashedKey(BaseModel):
    """One API key as a file has it; the key itself is nowhere."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """The tenant."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    """SHA-256 of the key in hexadecimal digits. Keys are long and random, so that a slow hash adds nothing."""


K = TypeVar("K", bound=HashedKey)


class KeyRing(Generic[K]):
    """Owns the keys of one file."""

    def __init__(self, keys: Sequence[K] = ()) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, secret: bytes) -> K | None:
        """The key's entry, or None; every entry is compared, each in constant time."""
        digest = hashlib.sha256(secret).digest()
        found = None
        for stored, key in self._keys:
            if hmac.compare_digest(stored, digest):
                found = key
        return found


def check_unique(keys: Sequence[HashedKey], fields: Sequence[str], where: str) -> None:
    """Raises `StartupError` when two keys of the file `where` share one of `fields`."""
    for field in fields:
        if len({getattr(key, field) for key in keys}) < len(keys):
            raise StartupError(f"{where} has the same {field} twice")
