"""The errors that cross an edge, with their gRPC status and their HTTP code."""

from typing import Any

import grpc


class ServiceError(Exception):
    """Raised anywhere on a request's way; the servicer or gateway turns it into a status."""

    status: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_code: int = 500
    kind: str = "internal_error"  # OpenAI's error.type
    retry_after: int = 0  # seconds after which it is worth trying again; 0: not known
    reported: bool = False  # whether log and metrics have it


class InvalidArgument(ServiceError):
    status, http_code, kind = grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"


class Unauthenticated(ServiceError):
    status, http_code, kind = grpc.StatusCode.UNAUTHENTICATED, 401, "invalid_request_error"
    code = "invalid_api_key"


class NotFound(ServiceError):
    status, http_code, kind = grpc.StatusCode.NOT_FOUND, 404, "not_found_error"


class FailedPrecondition(ServiceError):
    status, http_code, kind = grpc.StatusCode.FAILED_PRECONDITION, 400, "failed_precondition_error"


class ResourceExhausted(ServiceError):
    status, http_code, kind = grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"

    def __init__(self, message: str, *details: Any, retry_after: int = 1) -> None:
        super().__init__(message, *details)
        self.retry_after = retry_after


class Unavailable(ServiceError):
    status, http_code, kind = grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error"


_BY_CODE = {kind.status.value[0]: kind for kind in ServiceError.__subclasses__()}


def error_from_code(code: int, message: str) -> ServiceError:
    """The error that a peer reported by its numeric gRPC status."""
    return _BY_CODE.get(code, ServiceError)(message)


class ClusterError(RuntimeError):
    """Ray or a service could not be started."""
