"""The gRPC service specahead.v1.Inference for clients."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import Message

from orchestrator.requests.callers import current_caller
from orchestrator.requests.records import check_count
from orchestrator.requests.requests import CompletionRequest, read_request
from orchestrator.sessions.generation import Chunk, Frontend
from protos import control_pb2, inference_pb2, inference_pb2_grpc
from specahead.wire.errors import InvalidArgument, NotFound, ServiceError
from specahead.wire.messages import FinishReason
from specahead.wire.server import guarded

_EXACTNESS = {control_pb2.EXACTNESS_EXACT: "exact", control_pb2.EXACTNESS_APPROXIMATE: "approximate"}


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """Serves the model."""

    def __init__(self, frontend: Frontend, locate: Callable[[grpc.aio.ServicerContext], None] | None = None) -> None:
        """locate: takes the context of each call that generates, and notes the address of its client."""
        self._frontend, self._locate = frontend, locate

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        if self._locate is not None:
            self._locate(context)
        self._frontend.observer.follow(context.invocation_metadata() or ())
        async with guarded(context), aclosing(self._generate(request)) as responses:
            async for response in responses:
                yield response

    async def _generate(self, pb: inference_pb2.GenerateRequest) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        frontend = self._frontend
        try:
            with current_caller().request():
                frontend.check_room()
                frontend.check_model(pb.model)
                check_count(len(pb.token_ids.ids), frontend.limits)  # before they become a list of Python
                request = _request_from_pb(pb)
                special = request.add_special_tokens is not False
                prompts = [await frontend.encode(prompt, special) for prompt in request.prompts]
                request.request_id = name = request.request_id or secrets.token_hex(12)
                grammar = await frontend.grammar(request)
                records = frontend.prepare(request, prompts, grammar)
                (echo,), (tokens,) = request.echoes(frontend.tokenizer.decode), prompts
                for choice in range(len(records) if request.echo else 0):
                    yield _chunk_to_pb(name, Chunk(echo, tokens, choice=choice))
                async with aclosing(frontend.generate(records, request)) as chunks:
                    async for chunk in chunks:
                        yield _chunk_to_pb(name, chunk)
        except ServiceError as error:
            frontend.observer.report(error, request=pb.request_id or None)
            raise

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.AbortResponse:
        async with guarded(context):
            if not self._frontend.abort(request.request_id):
                raise NotFound(f"no request {request.request_id!r} is running")
            return inference_pb2.AbortResponse()

    async def ListModels(self, request: Any, context: grpc.aio.ServicerContext) -> inference_pb2.ListModelsResponse:
        frontend = self._frontend
        model = inference_pb2.Model(
            id=frontend.name,
            max_model_len=frontend.limits.max_context,
            vocab_size=frontend.limits.vocab_size,
            draft=frontend.draft_name,
        )
        return inference_pb2.ListModelsResponse(models=[model])

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        async with guarded(context):
            frontend = self._frontend
            frontend.check_model(request.model)
            tokens = await frontend.encode(request.text)
            return inference_pb2.TokenizeResponse(token_ids=tokens, max_model_len=frontend.limits.max_context)


def _request_from_pb(pb: inference_pb2.GenerateRequest) -> CompletionRequest:
    """Return a message as a request; fields that are not set count as left out. Raises InvalidArgument."""
    kind = pb.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("prompt: set text or token_ids", "prompt")
    given = ((field.name, value) for field, value in pb.ListFields() if field.name in CompletionRequest.model_fields)
    values = {name: _plain(value) for name, value in given}
    values["prompt"] = pb.text if kind == "text" else list(pb.token_ids.ids)
    if pb.exactness:
        values["exactness"] = _EXACTNESS.get(pb.exactness, f"EXACTNESS {pb.exactness}")
    return read_request(CompletionRequest, values)


def _plain(value: Any) -> Any:
    """Return a field's value as a built-in type."""
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Message):
        return {field.name: _plain(inner) for field, inner in value.ListFields()}
    return dict(value) if isinstance(value, Mapping) else list(value)


def _chunk_to_pb(request_id: str, chunk: Chunk) -> inference_pb2.GenerateResponse:
    of_last: dict[str, Any] = {}
    if chunk.finish_reason is not FinishReason.NONE:
        of_last["usage"] = {
            "prompt_tokens": chunk.prompt_tokens,
            "completion_tokens": chunk.completion_tokens,
            "total_tokens": chunk.prompt_tokens + chunk.completion_tokens,
            "cached_tokens": chunk.cached_tokens,
        }
        summary, names = chunk.totals.summary(), inference_pb2.SpeculationSummary.DESCRIPTOR.fields_by_name
        of_last["speculation"] = {name: summary[name] for name in names}
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        text=chunk.text,
        token_ids=chunk.tokens,
        finish_reason=control_pb2.FinishReason.Name(chunk.finish_reason),
        choice=chunk.choice,
        logprobs=[vars(item) for item in chunk.logprobs[: len(chunk.tokens)]],
        prompt_logprobs=[vars(item) for item in chunk.prompt_logprobs],
        **of_last,
    )
