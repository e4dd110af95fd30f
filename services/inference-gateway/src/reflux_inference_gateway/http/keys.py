"""API keys of tenants: hashed in a file, compared in constant time. Pure but for reading the file."""

import hashlib
import hmac
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reflux_kit.errors import StartupError


class ApiKey(BaseModel):
    """One tenant's key as the file has it; the key itself is nowhere."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """The tenant, as requests are shared and counted by."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    """SHA-256 of the key in hexadecimal digits. Keys are long and random, so that a slow hash adds nothing."""

    max_concurrent: int = Field(default=0, ge=0)
    """Requests that may be under way at once; 0 sets no limit."""

    models: tuple[str, ...] = ()
    """Models that the key opens; empty opens all."""


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: tuple[ApiKey, ...] = ()


class KeyRing:
    """Owns the keys of one file."""

    def __init__(self, keys: tuple[ApiKey, ...] = ()) -> None:
        self._keys = [(bytes.fromhex(key.sha256), key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, secret: bytes) -> ApiKey | None:
        """The key's entry, or None; every entry is compared, each in constant time."""
        digest = hashlib.sha256(secret).digest()
        found = None
        for stored, key in self._keys:
            if hmac.compare_digest(stored, digest):
                found = key
        return found


def load_keys(path: str) -> KeyRing:
    """Reads a TOML file of `[[keys]]` tables; an empty path gives none. Raises `StartupError` naming the mistake."""
    if not path:
        return KeyRing()
    try:
        with Path(path).open("rb") as file:
            keys = _KeysFile.model_validate(tomllib.load(file)).keys
    except OSError as error:
        raise StartupError(f"the file of API keys {path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the file of API keys {path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise StartupError(f"the file of API keys {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) < len(keys):
            raise StartupError(f"the file of API keys {path} has the same {field} twice")
    return KeyRing(keys)
