"""Requests whose bytes are no message (bad UTF-8 in a string, a cut-off field): INVALID_ARGUMENT, as they deserve.

By itself gRPC answers INTERNAL, as if the server were to blame.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError


@dataclass(frozen=True)
class _Malformed:
    reason: str


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """For methods that take one request; on a request stream gRPC ends the call itself."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        deserialize = handler.request_deserializer

        def guarded(data: bytes) -> Any:
            try:
                return deserialize(data)
            except DecodeError as error:
                return _Malformed(str(error))

        if handler.response_streaming:
            stream = handler.unary_stream

            async def answer_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                await _refuse(request, context)
                async for response in stream(request, context):
                    yield response

            return grpc.unary_stream_rpc_method_handler(answer_stream, guarded, handler.response_serializer)
        unary = handler.unary_unary

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await _refuse(request, context)
            return await unary(request, context)

        return grpc.unary_unary_rpc_method_handler(answer, guarded, handler.response_serializer)


async def _refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
    if isinstance(request, _Malformed):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is no valid message: {request.reason}")
