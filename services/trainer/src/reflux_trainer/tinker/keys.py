"""Who calls: API keys to tenants. Keys are compared by their digests and appear nowhere."""

import hashlib
import hmac
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reflux_kit.errors import StartupError, Unauthenticated

_PREFIXES = ("tml-", "eyJ")
"""How the SDK's keys begin."""
_MAX_KEY = 4096


class TenantKey(BaseModel):
    """One key as the file has it; the key itself is nowhere."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """The tenant; several keys may open the same one."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    """SHA-256 of the key in hexadecimal digits. Keys are long and random, so that a slow hash adds nothing."""


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: tuple[TenantKey, ...] = ()


class Tenants:
    """Owns the keys. Without a file any key is its own tenant while there is no stack secret, else none gets in."""

    def __init__(self, keys: tuple[TenantKey, ...] | None, stack_secret: str) -> None:
        """`keys` is None when no file was named."""
        self._keys = None if keys is None else [(bytes.fromhex(key.sha256), key.name) for key in keys]
        self._open = keys is None and not stack_secret

    def of(self, key: str | None) -> str:
        """The tenant of an `x-api-key` header. Raises `Unauthenticated` without repeating the key."""
        if not key or not key.startswith(_PREFIXES) or len(key) > _MAX_KEY:
            raise Unauthenticated('an API key is required: send "x-api-key: tml-..."')
        digest = hashlib.sha256(key.encode()).digest()
        if self._open:
            return f"key-{digest.hex()[:16]}"
        found = None
        for stored, name in self._keys or ():
            if hmac.compare_digest(stored, digest):
                found = name
        if found is None:
            raise Unauthenticated("the API key is not one of those that REFLUX_TINKER_KEYS_FILE names")
        return found


def load_tenants(path: str, stack_secret: str) -> Tenants:
    """Reads the file of keys, if one is named. Raises `StartupError` naming the mistake."""
    if not path:
        return Tenants(None, stack_secret)
    try:
        with Path(path).open("rb") as file:
            keys = _KeysFile.model_validate(tomllib.load(file)).keys
    except OSError as error:
        raise StartupError(f"the file of Tinker keys {path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"the file of Tinker keys {path} is not TOML: {error}") from None
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StartupError(f"the file of Tinker keys {path}: {where}: {first['msg']}") from None
    if len({key.sha256 for key in keys}) < len(keys):
        raise StartupError(f"the file of Tinker keys {path} has the same sha256 twice")
    return Tenants(keys, stack_secret)
