"""Settings of the gateway process."""

from pydantic import Field

from reflux_inference_gateway.routing import PolicyName
from reflux_kit.settings import ServiceSettings, prefix


class GatewaySettings(ServiceSettings):
    """Environment prefix REFLUX_INFERENCE_GATEWAY_."""

    model_config = prefix("inference-gateway")

    listen: str = "127.0.0.1:7003"
    http_listen: str = "127.0.0.1:8003"

    routing: PolicyName = "group_spread"
    """How replicas are chosen, and groups split over them (docs/gateway.md)."""

    heartbeat_seconds: float = Field(default=1.0, gt=0, le=60)
    """How often replicas report."""

    replica_expiry_seconds: float = Field(default=5.0, gt=0)
    """A replica that is silent for longer gets no requests."""

    replica_abandon_seconds: float = Field(default=15.0, gt=0)
    """Requests on a replica that is silent for longer are re-issued, or fail when a part of the answer was out."""

    replica_wait_seconds: float = Field(default=60.0, ge=0)
    """How long a request waits for a replica that fits (alive, new enough) while the fleet is not paused."""

    startup_grace_seconds: float = Field(default=5.0, ge=0)
    """After a start, how long an unknown model may still turn up before HTTP answers 404."""

    max_held_requests: int = Field(default=4096, ge=1)
    """Requests that may wait; further ones are refused with 429 or RESOURCE_EXHAUSTED."""

    full_at_capacities: float = Field(default=0.0, ge=0)
    """A replica with so many times its capacity of samples in flight is full: requests queue at the gateway, fairly
    between tenants, until it has room. 0 leaves queues to the engines."""

    tenant_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of tenants in that queue, as JSON; 1 for those that are not named."""

    remote_prefill_tokens: int = Field(default=256, ge=1)
    """A prompt of which the decoding replica lacks fewer tokens is computed there, not by a prefill replica."""

    far_prefill_tokens: int = Field(default=2048, ge=0)
    """So many queued tokens more a prefill replica may have for each level of the topology that it is nearer."""

    remote_prefill_seconds: float = Field(default=10.0, gt=0)
    """A prompt that a prefill replica has not computed by then is computed where it is decoded."""

    max_body_bytes: int = Field(default=64 << 20, ge=1024)
    """Largest HTTP body; larger ones are refused with 413."""

    request_seconds: float = Field(default=1800.0, gt=0)
    """Longest time for one HTTP request, waiting included; gRPC callers bring their own deadline."""

    api_keys_file: str = ""
    """TOML file of tenants' API keys for the HTTP door (docs/openai-api.md); empty: tokens of the stack only."""

    tls_certificate: str = ""
    """PEM file with the certificate chain of the HTTP door; empty serves plain HTTP."""

    tls_key: str = ""
    """PEM file with its private key; empty when the certificate's file has it."""

    max_connections: int = Field(default=16_384, ge=1)
    """HTTP connections; above it the one that idles for longest is closed."""

    max_held_bytes: int = Field(default=1 << 30, ge=1024)
    """HTTP bodies that are read or answered at one time, together; further ones are refused with 429."""

    idle_seconds: float = Field(default=75.0, gt=0)
    """An HTTP connection without a request is closed after it."""

    head_seconds: float = Field(default=10.0, gt=0)
    """In which the head of an HTTP request must arrive, else 408."""

    body_seconds: float = Field(default=60.0, gt=0)
    """In which its body must arrive, else 408."""
