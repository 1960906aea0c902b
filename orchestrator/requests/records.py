"""From a checked request to the ledger's records, within the limits of the served model."""

import secrets
from dataclasses import dataclass, field, fields, replace
from typing import Any

from orchestrator.requests.callers import current_caller, current_client
from orchestrator.requests.requests import MAX_CHOICES, GenerationRequest
from orchestrator.sessions.ledger import Record, SpeculationTotals
from orchestrator.text.special_tokens import TextEncoder
from specahead.engine.sampling.distributions import LEAST_TEMPERATURE, Sampling
from specahead.wire.errors import InvalidArgument
from specahead.wire.messages import Exactness, Open
from specahead.wire.server import MOST_BYTES

MOST_CHARACTERS = 32  # a token's mean in a text as long as a context: words have 5, only runs of spaces have more


@dataclass(frozen=True)
class Limits:
    """The limits and defaults of a served model."""

    model_name: str
    vocab_size: int
    max_context: int
    stop_token_ids: list[int]
    kv_tokens: int = 0
    """The longest session for which KV has room; 0 until that is known."""
    defaults: Sampling = field(default_factory=Sampling)
    """The sampling of requests that do not state their own."""
    uncalibrated: bool = False
    """Whether approximate requests use a plan that was not calibrated."""

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its answer: a context's, unless KV has room for fewer."""
        return min(self.max_context, self.kv_tokens or self.max_context)


def max_body(limits: Limits) -> int:
    """Return the most bytes of a request over HTTP: 64 for each token of the context.

    That is room for several prompts of the usual 4 to 8 bytes a token, as text or ids, and no body takes long to read.
    """
    return (64 << 10) + 64 * limits.max_context


def max_message(limits: Limits) -> int:
    """Return the most bytes of a message over gRPC: those of the longest text that is not refused by its length."""
    return min(MOST_BYTES, (64 << 10) + 4 * MOST_CHARACTERS * limits.max_context)


def encode_text(
    text: str, encoder: TextEncoder, limits: Limits, special_tokens: bool = True, rendered: bool = False
) -> list[int]:
    """Return the token ids of a prompt's text. Raises InvalidArgument if it is longer than the context.

    A text that is far too long is refused before it is encoded, which would take much time and memory.
    special_tokens: whether the model's own are put around it. rendered: whether a chat template has made the text, with
    all special tokens.
    """
    if len(text) > MOST_CHARACTERS * limits.max_context:
        raise _beyond_context(limits, f"your prompt has {len(text)} characters")
    tokens = encoder.encode_rendered(text) if rendered else encoder.encode(text, special_tokens)
    check_count(len(tokens), limits)
    return tokens


def check_tokens(tokens: list[int], limits: Limits) -> list[int]:
    """Return the tokens of a prompt as they are. Raises InvalidArgument for more than the context has, and for one that
    is not in the vocabulary."""
    check_count(len(tokens), limits)
    outside = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
    if outside is not None:
        raise InvalidArgument(f"prompt token {outside} lies outside the vocabulary of {limits.vocab_size}", "prompt")
    return tokens


def check_count(tokens: int, limits: Limits) -> None:
    """Raise InvalidArgument if a prompt of `tokens` tokens is longer than the context."""
    if tokens > limits.max_context:
        raise _beyond_context(limits, f"your prompt has {tokens}")


def _beyond_context(limits: Limits, what: str) -> InvalidArgument:
    message = f"This model's maximum context length is {limits.longest} tokens; {what}."
    return InvalidArgument(message, "prompt", "context_length_exceeded")


def to_records(request: GenerationRequest, prompts: list[list[int]], limits: Limits, grammar: str = "") -> list[Record]:
    """Return the ledger's records of a request: n for each prompt, prompt by prompt. Raises ServiceError.

    grammar: the source of the grammar of the answers, which end where it is complete; empty for free text. Several
    records are named after the request with their numbers. As in vLLM, the choices of a prompt have consecutive seeds
    if the request has a seed, and random ones otherwise.
    """
    name, choices = request.request_id or secrets.token_hex(12), request.n or 1
    count = choices * len(prompts)
    if count > MAX_CHOICES:
        message = f"{len(prompts)} prompts with n {choices}: at most {MAX_CHOICES} choices are made in one request"
        raise InvalidArgument(message, "prompt")
    exactness = Exactness[(request.exactness or "exact").upper()]
    uncalibrated = limits.uncalibrated and exactness is Exactness.APPROXIMATE
    ends = [] if request.ignore_eos and not grammar else limits.stop_token_ids
    records = []
    for index in range(count):
        prompt = prompts[index // choices]
        seed = secrets.randbits(64) if request.seed is None else (request.seed + index % choices) % 2**64
        asked = Open(
            session=name if count == 1 else f"{name}-{index}",
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            max_tokens=_max_tokens(request, len(prompt), limits),
            stop_token_ids=ends + (request.stop_token_ids or []),
            sampling=_sampling(request, limits, seed),
            exactness=exactness,
            wants_logprobs=request.wanted_logprobs is not None,
            wants_prompt_logprobs=request.wants_prompt_logprobs,
            alternatives=request.wanted_logprobs or 0,
            grammar=grammar,
            caller=current_caller().name,
            choice=index,
            client=current_client(),
        )
        records.append(Record(asked, name, totals=SpeculationTotals(uncalibrated=uncalibrated)))
    return records


def _max_tokens(request: GenerationRequest, prompt_tokens: int, limits: Limits) -> int:
    """Return the most tokens of an answer. Raises InvalidArgument for more than the context has room for."""
    if prompt_tokens == 0:
        raise InvalidArgument("the prompt is empty", "prompt")
    max_tokens = request.default_max_tokens if request.max_tokens is None else max(1, request.max_tokens)
    if max_tokens is None:
        max_tokens = max(1, limits.longest - prompt_tokens)
    if (request.min_tokens or 0) > max_tokens:
        raise InvalidArgument(f"min_tokens {request.min_tokens}: at most max_tokens, {max_tokens}", "min_tokens")
    if prompt_tokens + max_tokens > limits.longest:
        raise _beyond_context(limits, f"your prompt has {prompt_tokens} tokens, and max_tokens is {max_tokens}")
    return max_tokens


def _sampling(request: GenerationRequest, limits: Limits, seed: int) -> Sampling:
    """Return a request's sampling. Raises InvalidArgument for a bias on a token that is not in the vocabulary."""
    given = {each.name: getattr(request, each.name) for each in fields(Sampling) if each.name != "seed"}
    sampling = replace(
        limits.defaults, seed=seed, **{name: value for name, value in given.items() if value is not None}
    )
    temperature, biases = sampling.temperature, sampling.logit_bias
    outside = next((token for token in biases if token >= limits.vocab_size), None)
    if outside is not None:
        message = f"logit_bias: token {outside} lies outside the vocabulary of {limits.vocab_size}"
        raise InvalidArgument(message, "logit_bias")
    if 0 < temperature < LEAST_TEMPERATURE:
        temperature = LEAST_TEMPERATURE  # as vLLM does
    return replace(
        sampling,
        temperature=temperature,
        top_p=max(sampling.top_p, 1e-6),  # sent as a float32; only the likeliest token is left long before
        top_k=max(sampling.top_k, 0),
        logit_bias={token: min(max(bias, -100.0), 100.0) for token, bias in biases.items()},
    )


def default_sampling(generation_config: dict[str, Any]) -> Sampling:
    """Return the sampling in a model's generation config, for requests that do not state their own."""
    names = "temperature", "top_p", "top_k", "min_p", "repetition_penalty"
    return Sampling(**{name: value for name in names if (value := generation_config.get(name)) is not None})
