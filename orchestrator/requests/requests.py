"""Models of requests, for HTTP and gRPC. Those of chats are in chat_request.py."""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from orchestrator.requests.long_fields import Entries, Items
from orchestrator.text.structured_outputs import Strict, StructuredRequest
from specahead.wire.errors import InvalidArgument

log = logging.getLogger(__name__)

# Former fields of vLLM, and one of Anthropic, and what took their place there.
_REPLACED = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "output_format": "output_config.format",
}
# Fields that are not supported, with the values at which they would change nothing; any other value is refused.
_NOT_BUILT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logprobs", "use_beam_search", "background", "echo"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("logprob_token_ids", "thinking_token_budget"), ()),
    **dict.fromkeys(("functions", "bad_words", "documents", "mcp_servers"), ([],)),
    **dict.fromkeys(("chat_template", "prompt_logprobs", "truncate_prompt_tokens", "allowed_token_ids"), ()),
    **dict.fromkeys(("audio", "web_search_options", "prompt_embeds", "previous_response_id", "conversation"), ()),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
    **dict.fromkeys(_REPLACED, ()),
}
UNSUPPORTED = "unsupported"  # the type of pydantic's errors whose sentence says all
MAX_LOGPROBS = 20  # likely tokens that are reported beside a token
MAX_NAME = 120  # characters of a request's name; a session's, with a choice's number, has 128 at most
MAX_CHOICES = 1024  # of one request
_ignored: set[str] = set()  # fields that were logged already

TokenIds = Items[int]  # checked where the vocabulary is known
Several = Field(min_length=1, max_length=MAX_CHOICES)
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
BiasedToken = Annotated[int, Field(ge=0, lt=2**31, strict=False)]  # the keys of a JSON object are strings
Penalty = Annotated[float, Field(ge=-2, le=2)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    """Whether a last event has the usage of the whole request."""


class GenerationRequest(StructuredRequest):
    """The fields of every request that generates. None means that a field was left out.

    Unknown fields are ignored, except those of `_NOT_BUILT`.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
    default_max_tokens: ClassVar[int | None] = None  # None: the rest of the context

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Entries[BiasedToken, float] | None = None
    stop: StopString | Annotated[Items[StopString], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Fields of specahead alone.
    exactness: Literal["exact", "approximate"] | None = None
    request_id: str | None = Field(None, max_length=MAX_NAME)
    return_speculation: bool | None = None
    """Whether a whole answer says how speculation went; the header X-Return-Speculation asks for it, too."""
    # Fields of vLLM.
    ignore_eos: bool | None = None
    stop_token_ids: Items[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)

    @property
    def wanted_logprobs(self) -> int | None:
        """The number of likely tokens beside each token's log probability; None: no log probabilities."""
        return None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's tokens get log probabilities too."""
        return False

    @property
    def only_echoes(self) -> bool:
        """Whether the answer has the prompt alone."""
        return self.max_tokens == 0

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage of the whole request."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.request_id or "").isprintable():
            raise InvalidArgument(f"request_id: expected at most {MAX_NAME} printable characters", "request_id")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options: only with stream", "stream_options")
        for name, value in (self.model_extra or {}).items():
            if name in _NOT_BUILT:
                _check_neutral(name, value)
            elif name not in _ignored and len(_ignored) < 1000:
                _ignored.add(name)
                log.info("requests carry the field %r, which is ignored", name[:80])
        return self


def _check_neutral(name: str, value: Any) -> None:
    """Raise InvalidArgument if a field that is not supported has a value that would change something."""
    if name in _REPLACED and value is not None:
        raise InvalidArgument(f"{name}: use {_REPLACED[name]}", name, "unsupported_parameter")
    # `logprobs: 0` would change something, false would not, and the two are equal in Python.
    same = (value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in _NOT_BUILT[name])
    if value is not None and not any(same):
        message = f"{name}: this field is not supported (value {str(value)[:80]!r})"
        raise InvalidArgument(message, name, "unsupported_parameter")


def check_one_answer(request: GenerationRequest) -> None:
    """Raise InvalidArgument if a request asks for several answers where its API has one."""
    if request.n not in (None, 1):
        message = f"n: this path gives one answer (value {request.n})"
        raise InvalidArgument(message, "n", "unsupported_parameter")


class CompletionRequest(GenerationRequest):
    """A request for the continuation of one prompt or several, each a text or token ids."""

    default_max_tokens = 16  # OpenAI's

    prompt: str | TokenIds | Annotated[Items[str], Several] | Annotated[Items[TokenIds], Several]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | Literal[False] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return None if self.logprobs is False else self.logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        return bool(self.echo) and self.wanted_logprobs is not None

    def echoes(self, decode: Callable[[list[int]], str]) -> list[str]:
        """Return the echo of each prompt, empty without `echo`. decode: gives the text of tokens."""
        if not self.echo:
            return [""] * len(self.prompts)
        return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in self.prompts]

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidArgument("max_tokens: expected at least 1, or 0 together with echo, got 0", "max_tokens")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts."""
        several = isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int)
        return list(self.prompt) if several else [self.prompt]  # type: ignore[arg-type, list-item]


class TokenizeRequest(Strict, extra="allow"):
    """A text or a conversation to tokenize; other fields are those of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """Tokens to convert to text."""

    model: str | None = None
    tokens: TokenIds


R = TypeVar("R", bound=BaseModel)


def read_request(model: type[R], values: Mapping[str, Any]) -> R:
    """Return the request with these values. Raises InvalidArgument for values that it cannot have."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise invalid_argument(error.errors()) from None


def invalid_argument(errors: Sequence[Mapping[str, Any]]) -> InvalidArgument:
    """Return an error for the first field that pydantic refused, with all the types that it might have had."""
    first = errors[0]["loc"][:1]
    of_field = [error for error in errors if error["loc"][:1] == first]
    # Within a field of several types, pydantic's locations name the types.
    steps = zip(*(error["loc"] for error in of_field), strict=False)
    place = [step[0] for step in takewhile(lambda step: len(set(step)) == 1, steps)]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
    known = [error for error in of_field if error["type"] == UNSUPPORTED]
    words = [error["msg"].removeprefix("Value error, ") for error in (known or of_field)[:4]]
    reasons = " or ".join(dict.fromkeys(words))
    given = "" if known or errors[0]["type"] == "missing" else f", got {_shown(errors[0]['input'])}"
    code = "unsupported_value" if known else ""
    return InvalidArgument(f"{param or 'the body'}: {reasons}{given}", param or None, code)


def _shown(value: Any) -> str:
    """Return the beginning of a value, or its length: the text of a long list would take long to make."""
    if isinstance(value, list | dict) and len(value) > 80:
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return repr(str(value)[:80])
