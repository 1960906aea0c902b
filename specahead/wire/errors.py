"""The errors that cross an edge, with their gRPC status and their HTTP code."""

import grpc


class ServiceError(Exception):
    """Raised anywhere on a request's way; the servicer or gateway turns it into a status."""

    status: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_code: int = 500
    kind: str = "internal_error"  # OpenAI's error.type
    code: str = "internal_error"  # OpenAI's error.code; error.param, the wrong field, is an attribute of the instance
    retry_after: int = 0  # seconds after which trying again may help; 0: it would not help
    reported: bool = False  # whether log and metrics have it

    def __init__(self, message: str, param: str | None = None, code: str = "", retry_after: int = 0) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or type(self).code
        self.retry_after = retry_after or type(self).retry_after


class InvalidArgument(ServiceError):
    status, http_code, kind = grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"
    code = "invalid_value"


class Unauthenticated(ServiceError):
    status, http_code, kind = grpc.StatusCode.UNAUTHENTICATED, 401, "invalid_request_error"
    code = "invalid_api_key"


class NotFound(ServiceError):
    status, http_code, kind = grpc.StatusCode.NOT_FOUND, 404, "not_found_error"
    code = "not_found"


class FailedPrecondition(ServiceError):
    status, http_code, kind = grpc.StatusCode.FAILED_PRECONDITION, 400, "failed_precondition_error"
    code = "failed_precondition"


class ResourceExhausted(ServiceError):
    status, http_code, kind = grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"
    code = "rate_limit_exceeded"
    retry_after = 1


class Unavailable(ServiceError):
    status, http_code, kind = grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error"
    code = "service_unavailable"
    retry_after = 1


class DeadlineExceeded(ServiceError):
    status, http_code, kind = grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"
    code = "deadline_exceeded"


_BY_CODE = {kind.status.value[0]: kind for kind in ServiceError.__subclasses__()}


def error_from_code(code: int, message: str) -> ServiceError:
    """Return the error that a peer reported by its numeric gRPC status."""
    return _BY_CODE.get(code, ServiceError)(message)


class ClusterError(RuntimeError):
    """Ray or a service could not be started."""
