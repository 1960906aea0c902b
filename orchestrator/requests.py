"""What a client may ask for, checked in one place for both transports."""

import secrets
from dataclasses import dataclass, field
from typing import Any

from engine.sampling import LEAST_TEMPERATURE, Sampling
from orchestrator.ledger import Record
from wire.errors import InvalidArgument, NotFound
from wire.messages import Exactness

MAX_STOP_STRINGS, MAX_STOP_LENGTH = 16, 256


@dataclass(frozen=True)
class Limits:
    """What the served models allow."""

    model_name: str
    vocab_size: int
    max_context: int
    stop_token_ids: list[int]
    methods: tuple[str, ...] = ()  # of sparsity, that the plan allows


@dataclass(frozen=True)
class GenerationRequest:
    """A request as a transport hands it over: typed, not yet checked. None: the client left it out."""

    prompt: str | list[int]
    request_id: str = ""
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    exactness: str | None = None  # "exact" or "approximate"
    sparsity: str | None = None  # method of an approximate request
    ignore_eos: bool = False


DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions


def check_model(name: str | None, limits: Limits) -> None:
    if name and name != limits.model_name:
        raise NotFound(f"model {name!r} is not served here; the model is {limits.model_name!r}")


def check_text(text: str, what: str) -> str:
    """JSON can carry lone surrogates, which are no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} is not valid Unicode: {error.reason} at character {error.start}") from None
    return text


def encode_text(text: str, tokenizer: Any, limits: Limits, special_tokens: bool = True) -> list[int]:
    """Token ids of a text that may be a prompt. Raises InvalidArgument."""
    check_text(text, "prompt")
    if len(text) > 64 * limits.max_context:  # no tokenizer packs that much; do not even try
        raise InvalidArgument(f"prompt of {len(text)} characters; the context is {limits.max_context} tokens")
    return tokenizer.encode(text, add_special_tokens=special_tokens)


def encode_prompt(prompt: str | list[int], tokenizer: Any, limits: Limits) -> list[int]:
    """Token ids of a prompt, checked. Raises InvalidArgument."""
    if isinstance(prompt, str):
        tokens = encode_text(prompt, tokenizer, limits)
    else:
        tokens = prompt
        outside = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
        if outside is not None:
            raise InvalidArgument(f"prompt token {outside} lies outside the vocabulary of {limits.vocab_size}")
    if not tokens:
        raise InvalidArgument("the prompt is empty")
    return tokens


def to_record(request: GenerationRequest, tokenizer: Any, limits: Limits) -> Record:
    """Check everything about a request and make the ledger's record of it. Raises ServiceError."""
    check_model(request.model, limits)
    if len(request.request_id) > 128 or not request.request_id.isprintable():
        raise InvalidArgument("request_id must be at most 128 printable characters")
    tokens = encode_prompt(request.prompt, tokenizer, limits)
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if max_tokens < 1:
        raise InvalidArgument(f"max_tokens must be at least 1, got {max_tokens}")
    if len(tokens) + max_tokens > limits.max_context:
        raise InvalidArgument(
            f"the prompt has {len(tokens)} tokens; with max_tokens {max_tokens} that exceeds the context of "
            f"{limits.max_context} tokens"
        )
    exactness = _exactness(request.exactness)
    return Record(
        session=request.request_id or secrets.token_hex(12),
        tokens=list(tokens),
        prompt_tokens=len(tokens),
        max_tokens=max_tokens,
        stop_token_ids=[] if request.ignore_eos else list(limits.stop_token_ids),
        sampling=_sampling(request),
        exactness=exactness,
        sparsity=_sparsity(request.sparsity, exactness, limits),
    )


def _sampling(request: GenerationRequest) -> Sampling:
    temperature = 1.0 if request.temperature is None else request.temperature
    top_p = 1.0 if request.top_p is None else request.top_p
    if not 0 <= temperature <= 2:  # nor is NaN
        raise InvalidArgument(f"temperature must lie in [0, 2], got {temperature}")
    if not 0 < top_p <= 1:
        raise InvalidArgument(f"top_p must lie in (0, 1], got {top_p}")
    if 0 < temperature < LEAST_TEMPERATURE:
        temperature = LEAST_TEMPERATURE  # as vLLM does
    top_p = max(top_p, 1e-6)  # it travels as a float32; only the likeliest token is left long before
    seed = secrets.randbits(63) if request.seed is None else request.seed
    if not 0 <= seed < 2**64:
        raise InvalidArgument(f"seed must lie in [0, 2^64), got {seed}")
    check_stop(request.stop)
    return Sampling(temperature, top_p, seed)


def _exactness(name: str | None) -> Exactness:
    try:
        return Exactness[(name or "exact").upper()]
    except KeyError:
        raise InvalidArgument(f"exactness must be 'exact' or 'approximate', got {name!r}") from None


def _sparsity(name: str | None, exactness: Exactness, limits: Limits) -> str:
    if not name:
        return ""
    if exactness is not Exactness.APPROXIMATE:
        raise InvalidArgument(f"sparsity {name!r} is for requests with exactness 'approximate'")
    if name not in limits.methods:
        raise InvalidArgument(f"sparsity must be one of {', '.join(limits.methods)}; got {name!r}")
    return name


def check_stop(stop: list[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS or any(not s or len(s) > MAX_STOP_LENGTH for s in stop):
        raise InvalidArgument(
            f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters, got {stop!r}"
        )
    for text in stop:
        check_text(text, "stop")
