"""What clients may ask for: the one model of a request, for HTTP and gRPC alike, and what it becomes in the ledger."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from engine.sampling import Sampling
from orchestrator.ledger import Record
from wire.errors import InvalidArgument, NotFound
from wire.messages import Exactness

log = logging.getLogger(__name__)

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions

# Fields that would change the answer and are not built, with the values at which they would not: any other is refused.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (None, 0)),
    **dict.fromkeys(("echo", "logprobs", "use_beam_search"), (None, False)),
    "best_of": (None, 1),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "n": (None, 1),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "top_k": (None, -1, 0),
    "top_logprobs": (None, 0),
}
_ignored: set[str] = set()  # fields that were logged already

TokenIds = Annotated[list[int], Field(fail_fast=True)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


@dataclass(frozen=True)
class Limits:
    """What the served models allow. methods: of sparsity, that the plan allows."""

    model_name: str
    vocab_size: int
    max_context: int
    stop_token_ids: list[int]
    methods: tuple[str, ...] = ()


class StreamOptions(BaseModel):
    """include_usage: whether a last event tells the tokens of the whole request."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """The fields of every request that generates. None stands for a field that was left out.

    Of our own are exactness, sparsity (the method of an approximate request) and request_id; ignore_eos is vLLM's, and
    all others are OpenAI's. Fields that are not declared are accepted, unless they ask for what is not built.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**64)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    exactness: Literal["exact", "approximate"] | None = None
    sparsity: str | None = None
    ignore_eos: bool | None = None
    request_id: str | None = Field(None, max_length=128)

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.request_id or "").isprintable():
            raise InvalidArgument("request_id must be at most 128 printable characters", "request_id")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options: only with stream", "stream_options")
        if self.sparsity and self.exactness != "approximate":
            raise InvalidArgument(
                f"sparsity {self.sparsity!r} is for requests with exactness 'approximate'", "sparsity"
            )
        for name, value in (self.model_extra or {}).items():
            # A truth value is no number: `logprobs: 0` asks for something, false does not.
            neutral = (value == n and isinstance(value, bool) == isinstance(n, bool) for n in _NOT_BUILT.get(name, ()))
            if name in _NOT_BUILT and not any(neutral):
                raise InvalidArgument(f"{name}: this is not supported (value {str(value)[:80]!r})", name)
            if name not in _NOT_BUILT and name not in _ignored and len(_ignored) < 1000:
                _ignored.add(name)
                log.info("requests may carry the field %r, which is ignored", name[:80])
        return self


class CompletionRequest(GenerationRequest):
    """A request for the continuation of a prompt."""

    prompt: (
        str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
    )


class ContentPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(strict=True)

    role: str
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """A request for the next message of a conversation."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


R = TypeVar("R", bound=BaseModel)


def read_request(model: type[R], values: Mapping[str, Any]) -> R:
    """Return the request that has these values. Raises InvalidArgument for values that it cannot have."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid_argument(error.errors()) from None


def invalid_argument(errors: Sequence[Mapping[str, Any]]) -> InvalidArgument:
    """Return the refusal for what pydantic found wrong: of the first field, with all that it might have been."""
    first = errors[0]["loc"][:1]
    of_field = [error for error in errors if error["loc"][:1] == first]
    # Below a field that may have several types, the places name the types.
    steps = zip(*(error["loc"] for error in of_field), strict=False)
    place = [step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps)]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
    reasons = " or ".join(dict.fromkeys(error["msg"].removeprefix("Value error, ") for error in of_field[:4]))
    given = "" if errors[0]["type"] == "missing" else f", got {str(errors[0]['input'])[:80]!r}"
    return InvalidArgument(f"{param or 'the body'}: {reasons}{given}", param or None)


def check_model(name: str | None, limits: Limits) -> None:
    """Raise NotFound for a model that is not served."""
    if name and name != limits.model_name:
        raise NotFound(
            f"model {name!r} is not served here; the model is {limits.model_name!r}", "model", "model_not_found"
        )


def encode_text(text: str, tokenizer: Any, limits: Limits, special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text that may be a prompt. Raises InvalidArgument."""
    if len(text) > 64 * limits.max_context:  # no tokenizer packs that much; do not even try
        raise _beyond_context(limits, f"your prompt has {len(text)} characters")
    return tokenizer.encode(text, add_special_tokens=special_tokens)


def check_tokens(tokens: list[int], limits: Limits) -> list[int]:
    """Return the tokens of a prompt as they are. Raises InvalidArgument for one that is no token of the model."""
    outside = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        raise InvalidArgument(f"prompt token {outside} lies outside the vocabulary of {limits.vocab_size}", "prompt")
    return tokens


def _beyond_context(limits: Limits, what: str) -> InvalidArgument:
    message = f"This model's maximum context length is {limits.max_context} tokens; {what}."
    return InvalidArgument(message, "prompt", "context_length_exceeded")


def to_record(request: GenerationRequest, tokens: list[int], limits: Limits) -> Record:
    """Return the ledger's record of a request with a prompt of these tokens. Raises ServiceError."""
    check_model(request.model, limits)
    if not tokens:
        raise InvalidArgument("the prompt is empty", "prompt")
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if len(tokens) + max_tokens > limits.max_context:
        raise _beyond_context(limits, f"your prompt has {len(tokens)} tokens, and max_tokens is {max_tokens}")
    if request.sparsity and request.sparsity not in limits.methods:
        raise InvalidArgument(
            f"sparsity must be one of {', '.join(limits.methods)}; got {request.sparsity!r}", "sparsity"
        )
    return Record(
        session=request.request_id or secrets.token_hex(12),
        tokens=list(tokens),
        prompt_tokens=len(tokens),
        max_tokens=max_tokens,
        stop_token_ids=[] if request.ignore_eos else list(limits.stop_token_ids),
        sampling=_sampling(request),
        exactness=Exactness[(request.exactness or "exact").upper()],
        sparsity=request.sparsity or "",
    )


def _sampling(request: GenerationRequest) -> Sampling:
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    if 0 < temperature < 0.01:
        temperature = 0.01  # as vLLM does: below it the softmax overflows
    top_p = max(top_p, 1e-6)  # it travels as a float32; only the likeliest token is left long before
    return Sampling(temperature, top_p, secrets.randbits(63) if request.seed is None else request.seed)
