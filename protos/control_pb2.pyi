from protos import speculation_pb2 as _speculation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Exactness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTNESS_UNSPECIFIED: _ClassVar[Exactness]
    EXACTNESS_EXACT: _ClassVar[Exactness]
    EXACTNESS_APPROXIMATE: _ClassVar[Exactness]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]

class Proposer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROPOSER_UNSPECIFIED: _ClassVar[Proposer]
    PROPOSER_LOOKUP: _ClassVar[Proposer]
    PROPOSER_SELF: _ClassVar[Proposer]
    PROPOSER_DRAFT: _ClassVar[Proposer]
EXACTNESS_UNSPECIFIED: Exactness
EXACTNESS_EXACT: Exactness
EXACTNESS_APPROXIMATE: Exactness
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
PROPOSER_UNSPECIFIED: Proposer
PROPOSER_LOOKUP: Proposer
PROPOSER_SELF: Proposer
PROPOSER_DRAFT: Proposer

class ServeFrame(_message.Message):
    __slots__ = ("open", "abort", "beat")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    open: Open
    abort: Abort
    beat: _speculation_pb2.Beat
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., beat: _Optional[_Union[_speculation_pb2.Beat, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session", "tokens", "prompt_tokens", "max_tokens", "stop_token_ids", "sampling", "exactness", "wants_logprobs", "wants_prompt_logprobs", "alternatives", "grammar", "caller", "choice", "client", "resumed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    WANTS_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WANTS_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    session: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _speculation_pb2.Sampling
    exactness: Exactness
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    alternatives: int
    grammar: str
    caller: str
    choice: int
    client: str
    resumed: bool
    def __init__(self, session: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_speculation_pb2.Sampling, _Mapping]] = ..., exactness: _Optional[_Union[Exactness, str]] = ..., wants_logprobs: bool = ..., wants_prompt_logprobs: bool = ..., alternatives: _Optional[int] = ..., grammar: _Optional[str] = ..., caller: _Optional[str] = ..., choice: _Optional[int] = ..., client: _Optional[str] = ..., resumed: bool = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class ServedFrame(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[ServedEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[ServedEvent, _Mapping]]] = ...) -> None: ...

class ServedEvent(_message.Message):
    __slots__ = ("commit", "closed", "beat", "report")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    commit: Commit
    closed: Closed
    beat: _speculation_pb2.Beat
    report: Report
    def __init__(self, commit: _Optional[_Union[Commit, _Mapping]] = ..., closed: _Optional[_Union[Closed, _Mapping]] = ..., beat: _Optional[_Union[_speculation_pb2.Beat, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("number", "opens", "sessions", "waiting", "free_places", "free_kv_pages", "queue_places", "unread_tokens", "tokens_per_second", "queue_seconds", "indexed", "evicted", "kv_pages", "draining", "left", "taken")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_PLACES_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_PLACES_FIELD_NUMBER: _ClassVar[int]
    UNREAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    INDEXED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    opens: int
    sessions: int
    waiting: int
    free_places: int
    free_kv_pages: int
    queue_places: int
    unread_tokens: int
    tokens_per_second: float
    queue_seconds: float
    indexed: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    kv_pages: int
    draining: bool
    left: _containers.RepeatedScalarFieldContainer[str]
    taken: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, number: _Optional[int] = ..., opens: _Optional[int] = ..., sessions: _Optional[int] = ..., waiting: _Optional[int] = ..., free_places: _Optional[int] = ..., free_kv_pages: _Optional[int] = ..., queue_places: _Optional[int] = ..., unread_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., indexed: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ..., kv_pages: _Optional[int] = ..., draining: bool = ..., left: _Optional[_Iterable[str]] = ..., taken: _Optional[_Iterable[str]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("at", "tokens", "drafted", "accepted", "finish_reason", "kv_tokens_read", "kv_tokens_total", "announced_bytes", "stale_rounds", "prefill_seconds", "wait_seconds", "draft_seconds", "verify_seconds", "kv_tokens_fetched", "cached_tokens", "queue_seconds", "logprobs", "prompt_logprobs", "preemptions", "screening_drafted", "screening_accepted", "screened", "confirmed", "proposer", "audited_tokens", "total_variation", "kl_divergence", "same_greedy", "rounds_made_exact")
    AT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_READ_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STALE_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FETCHED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SCREENING_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    SCREENING_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SCREENED_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    AUDITED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_VARIATION_FIELD_NUMBER: _ClassVar[int]
    KL_DIVERGENCE_FIELD_NUMBER: _ClassVar[int]
    SAME_GREEDY_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_MADE_EXACT_FIELD_NUMBER: _ClassVar[int]
    at: _speculation_pb2.At
    tokens: _containers.RepeatedScalarFieldContainer[int]
    drafted: int
    accepted: int
    finish_reason: FinishReason
    kv_tokens_read: int
    kv_tokens_total: int
    announced_bytes: int
    stale_rounds: int
    prefill_seconds: float
    wait_seconds: float
    draft_seconds: float
    verify_seconds: float
    kv_tokens_fetched: int
    cached_tokens: int
    queue_seconds: float
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    preemptions: int
    screening_drafted: _containers.RepeatedScalarFieldContainer[int]
    screening_accepted: _containers.RepeatedScalarFieldContainer[int]
    screened: int
    confirmed: int
    proposer: Proposer
    audited_tokens: int
    total_variation: float
    kl_divergence: float
    same_greedy: int
    rounds_made_exact: int
    def __init__(self, at: _Optional[_Union[_speculation_pb2.At, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., kv_tokens_read: _Optional[int] = ..., kv_tokens_total: _Optional[int] = ..., announced_bytes: _Optional[int] = ..., stale_rounds: _Optional[int] = ..., prefill_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., draft_seconds: _Optional[float] = ..., verify_seconds: _Optional[float] = ..., kv_tokens_fetched: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., preemptions: _Optional[int] = ..., screening_drafted: _Optional[_Iterable[int]] = ..., screening_accepted: _Optional[_Iterable[int]] = ..., screened: _Optional[int] = ..., confirmed: _Optional[int] = ..., proposer: _Optional[_Union[Proposer, str]] = ..., audited_tokens: _Optional[int] = ..., total_variation: _Optional[float] = ..., kl_divergence: _Optional[float] = ..., same_greedy: _Optional[int] = ..., rounds_made_exact: _Optional[int] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("session", "code", "message")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    session: str
    code: int
    message: str
    def __init__(self, session: _Optional[str] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("peer", "pid", "attached", "refusal", "counters", "gauges", "version")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    peer: str
    pid: int
    attached: _containers.RepeatedScalarFieldContainer[str]
    refusal: str
    counters: _containers.ScalarMap[str, float]
    gauges: _containers.ScalarMap[str, float]
    version: str
    def __init__(self, peer: _Optional[str] = ..., pid: _Optional[int] = ..., attached: _Optional[_Iterable[str]] = ..., refusal: _Optional[str] = ..., counters: _Optional[_Mapping[str, float]] = ..., gauges: _Optional[_Mapping[str, float]] = ..., version: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: bool = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Targets(_message.Message):
    __slots__ = ("addresses",)
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class TargetsSet(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
