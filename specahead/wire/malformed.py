"""Answers requests whose bytes are no message (bad UTF-8 in a string, a cut-off field) with INVALID_ARGUMENT.

By itself gRPC answers INTERNAL, as if the server were to blame.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """For methods that take one request; on a request stream gRPC ends the call itself."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return the method's handler, which parses its request itself."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler

        async def parse(data: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                reason = f"the request is no valid message: {error}"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)

        async def answer(data: bytes, context: grpc.aio.ServicerContext) -> Any:
            return await handler.unary_unary(await parse(data, context), context)

        async def answer_stream(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            answers = handler.unary_stream(await parse(data, context), context)
            if inspect.isawaitable(answers):  # the health service's Watch, which writes to the context
                await answers
                return
            async for response in answers:
                yield response

        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(answer_stream, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)
