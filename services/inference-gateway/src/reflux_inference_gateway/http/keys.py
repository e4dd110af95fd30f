"""API keys of tenants at the HTTP door, with what each may do."""

from pydantic import BaseModel, ConfigDict, Field

from reflux_kit.keys import HashedKey, KeyRing, check_unique, read_toml


class ApiKey(HashedKey):
    """One tenant's key; requests are shared and counted by its name."""

    max_concurrent: int = Field(default=0, ge=0)
    """Requests that may be under way at once; 0 sets no limit."""

    models: tuple[str, ...] = ()
    """Models that the key opens; empty opens all."""


class _KeysFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: tuple[ApiKey, ...] = ()


def load_keys(path: str) -> KeyRing[ApiKey]:
    """Reads a TOML file of `[[keys]]` tables; an empty path gives none. Raises `StartupError` naming the mistake."""
    if not path:
        return KeyRing()
    keys = read_toml(path, _KeysFile, "API keys").keys
    check_unique(keys, ("name", "sha256"), f"the file of API keys {path}")
    return KeyRing(keys)
