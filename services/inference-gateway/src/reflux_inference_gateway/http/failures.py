"""Which HTTP error a failure of the fleet becomes. Pure."""

from reflux_inference_gateway.errors import GenerationLost, NoReplica, Overloaded, UnknownModel, VersionGone
from reflux_inference_gateway.openai_errors import ApiError
from reflux_kit.errors import CapacityExhausted, ServiceError


def unknown_model(model: str) -> ApiError:
    """404 for a model that no replica serves."""
    return ApiError(404, f"the model {model[:200]!r} does not exist", param="model", code="model_not_found")


def as_api_error(error: ServiceError | ApiError) -> ApiError:
    """The answer to a request that failed so."""
    match error:
        case ApiError():
            return error
        case UnknownModel():
            return ApiError(404, str(error), param="model", code="model_not_found")
        case Overloaded():
            return ApiError(429, str(error), code="overloaded", retry_after_seconds=1)
        case CapacityExhausted():
            return ApiError(429, str(error), code=error.reason.lower(), retry_after_seconds=1)
        case NoReplica():
            return ApiError(503, str(error), code="no_replica", retry_after_seconds=1)
        case VersionGone():
            return ApiError(409, str(error), code="version_gone")
        case GenerationLost():
            return ApiError(502, str(error), code="generation_lost")
    return ApiError(500, str(error), code=error.reason.lower())
