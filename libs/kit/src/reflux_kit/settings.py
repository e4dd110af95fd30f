"""Settings that every service has; a service adds its own fields under its own prefix."""

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


def _shared(name: str) -> str:
    return f"REFLUX_{name.upper()}"


def prefix(service: str) -> SettingsConfigDict:
    """Configuration of a service's settings class: own fields come from REFLUX_<SERVICE>_<FIELD>."""
    name = service.upper().replace("-", "_")
    return SettingsConfigDict(env_prefix=f"REFLUX_{name}_", extra="ignore", frozen=True, populate_by_name=True)


class ServiceSettings(BaseSettings):
    """Where to listen, whom to call, secrets. What to train is never an environment variable."""

    model_config = prefix("service")

    listen: str = "127.0.0.1:0"
    """gRPC address to bind; port 0 picks a free one."""

    http_listen: str = ""
    """HTTP address to bind (/metrics, /healthz and the service's own routes); empty serves no HTTP."""

    advertise_host: Annotated[str, Field(validation_alias=_shared("advertise_host"))] = ""
    """Host name under which peers reach this machine, for processes that register themselves; empty: as bound."""

    drain_seconds: float = Field(default=5.0, ge=0)
    """How long running calls may finish after SIGTERM."""

    max_message_mib: int = Field(default=4, ge=1, le=1024)
    """Largest gRPC request that is taken, in MiB; a larger one is RESOURCE_EXHAUSTED. Callers bound answers."""

    redis_url: Annotated[str, Field(validation_alias=_shared("redis_url"))] = "redis://127.0.0.1:6379/0"
    """Redis or Valkey: redis://host:port/db or unix://path."""

    object_store: Annotated[str, Field(validation_alias=_shared("object_store"))] = ""
    """Object store: file:///folder or s3://bucket/prefix; empty means a folder below `state_dir`."""

    s3_endpoint: Annotated[str, Field(validation_alias=_shared("s3_endpoint"))] = ""
    """Endpoint of an S3-compatible server; empty takes the SDK's default."""

    state_dir: Annotated[str, Field(validation_alias=_shared("state_dir"))] = ""
    """Folder for sockets, caches, logs and traces; empty keeps none of them."""

    stack_secret: Annotated[str, Field(validation_alias=_shared("stack_secret"), repr=False)] = ""
    """Secret of the stack; when it is set every call needs a token."""

    token: Annotated[str, Field(validation_alias=_shared("token"), repr=False)] = ""
    """Token to call with; empty mints one from `stack_secret`."""

    otlp_endpoint: Annotated[str, Field(validation_alias=_shared("otlp_endpoint"))] = ""
    """OpenTelemetry collector (host:port, gRPC); empty writes spans below `state_dir`."""

    trace_ratio: Annotated[float, Field(validation_alias=_shared("trace_ratio"), ge=0, le=1)] = 1.0
    """Share of root spans that are recorded."""

    log_json: Annotated[bool, Field(validation_alias=_shared("log_json"))] = False
    """One JSON object per log line instead of text."""

    scheduler_address: Annotated[str, Field(validation_alias=_shared("scheduler_address"))] = "127.0.0.1:7001"
    trainer_address: Annotated[str, Field(validation_alias=_shared("trainer_address"))] = "127.0.0.1:7002"
    gateway_address: Annotated[str, Field(validation_alias=_shared("gateway_address"))] = "127.0.0.1:7003"
    broker_address: Annotated[str, Field(validation_alias=_shared("broker_address"))] = "127.0.0.1:7004"
    sandbox_address: Annotated[str, Field(validation_alias=_shared("sandbox_address"))] = "127.0.0.1:7005"
    checkpoint_address: Annotated[str, Field(validation_alias=_shared("checkpoint_address"))] = "127.0.0.1:7006"
