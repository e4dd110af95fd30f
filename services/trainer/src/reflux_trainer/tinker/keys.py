"""Who calls: API keys to tenants. Keys are compared by their digests and appear nowhere."""

import hashlib

from pydantic import BaseModel, ConfigDict

from reflux_kit.errors import Unauthenticated
from reflux_kit.keys import HashedKey, KeyRing, check_unique, read_toml

_PREFIXES = ("tml-", "eyJ")
"""How the SDK's keys begin."""
_MAX_KEY = 4096


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: tuple[HashedKey, ...] = ()
    """Several keys may open the same tenant."""


class Tenants:
    """Owns the keys. Without a file any key is its own tenant while there is no stack secret, else none gets in."""

    def __init__(self, keys: tuple[HashedKey, ...] | None, stack_secret: str) -> None:
        """`keys` is None when no file was named."""
        self._keys = KeyRing(keys or ())
        self._open = keys is None and not stack_secret

    def of(self, key: str | None) -> str:
        """The tenant of an `x-api-key` header. Raises `Unauthenticated` without repeating the key."""
        if not key or not key.startswith(_PREFIXES) or len(key) > _MAX_KEY:
            raise Unauthenticated('an API key is required: send "x-api-key: tml-..."')
        if self._open:
            return f"key-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        found = self._keys.find(key.encode())
        if found is None:
            raise Unauthenticated("the API key is not one of those that REFLUX_TINKER_KEYS_FILE names")
        return found.name


def load_tenants(path: str, stack_secret: str) -> Tenants:
    """Reads the file of keys, if one is named. Raises `StartupError` naming the mistake."""
    if not path:
        return Tenants(None, stack_secret)
    keys = read_toml(path, _KeysFile, "Tinker keys").keys
    check_unique(keys, ("sha256",), f"the file of Tinker keys {path}")
    return Tenants(keys, stack_secret)
