from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class At(_message.Message):
    __slots__ = ("session", "epoch", "round", "base")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    round: int
    base: int
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., base: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "peer", "model", "vocab_size", "tokenizer_hash", "plan_hash", "gamma", "block_size")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    peer: str
    model: str
    vocab_size: int
    tokenizer_hash: str
    plan_hash: str
    gamma: int
    block_size: int
    def __init__(self, protocol_version: _Optional[int] = ..., peer: _Optional[str] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_hash: _Optional[str] = ..., plan_hash: _Optional[str] = ..., gamma: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: Hello
    def __init__(self, target: _Optional[_Union[Hello, _Mapping]] = ...) -> None: ...

class DraftFrame(_message.Message):
    __slots__ = ("hello", "batch")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    batch: DraftEvents
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., batch: _Optional[_Union[DraftEvents, _Mapping]] = ...) -> None: ...

class DraftEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DraftEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[DraftEvent, _Mapping]]] = ...) -> None: ...

class DraftEvent(_message.Message):
    __slots__ = ("proposals", "ready", "decline", "resync", "beat", "load")
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    proposals: Proposals
    ready: Ready
    decline: Decline
    resync: Resync
    beat: Beat
    load: Load
    def __init__(self, proposals: _Optional[_Union[Proposals, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ..., resync: _Optional[_Union[Resync, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Proposals(_message.Message):
    __slots__ = ("at", "offsets", "assumed_tokens", "counts", "tokens", "support_counts", "support_ids", "support_probs", "draft_seconds", "selection")
    AT_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_PROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    at: At
    offsets: _containers.RepeatedScalarFieldContainer[int]
    assumed_tokens: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    support_counts: _containers.RepeatedScalarFieldContainer[int]
    support_ids: bytes
    support_probs: bytes
    draft_seconds: float
    selection: bytes
    def __init__(self, at: _Optional[_Union[At, _Mapping]] = ..., offsets: _Optional[_Iterable[int]] = ..., assumed_tokens: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., support_counts: _Optional[_Iterable[int]] = ..., support_ids: _Optional[bytes] = ..., support_probs: _Optional[bytes] = ..., draft_seconds: _Optional[float] = ..., selection: _Optional[bytes] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("at",)
    AT_FIELD_NUMBER: _ClassVar[int]
    at: At
    def __init__(self, at: _Optional[_Union[At, _Mapping]] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("session", "reason")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    session: str
    reason: str
    def __init__(self, session: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Resync(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("other_sessions",)
    OTHER_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    other_sessions: int
    def __init__(self, other_sessions: _Optional[int] = ...) -> None: ...

class TargetFrame(_message.Message):
    __slots__ = ("welcome", "batch")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    batch: TargetEvents
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., batch: _Optional[_Union[TargetEvents, _Mapping]] = ...) -> None: ...

class TargetEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[TargetEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[TargetEvent, _Mapping]]] = ...) -> None: ...

class TargetEvent(_message.Message):
    __slots__ = ("begin", "verdict", "end", "refusal", "beat")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    verdict: Verdict
    end: End
    refusal: Refusal
    beat: Beat
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    seed: int
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("at", "tokens", "sampling", "max_length", "announces", "prompt_tokens", "stop_token_ids", "grammar", "gamma", "dense", "draws_own")
    AT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    DRAWS_OWN_FIELD_NUMBER: _ClassVar[int]
    at: At
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    max_length: int
    announces: bool
    prompt_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: str
    gamma: int
    dense: bool
    draws_own: bool
    def __init__(self, at: _Optional[_Union[At, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_length: _Optional[int] = ..., announces: bool = ..., prompt_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[str] = ..., gamma: _Optional[int] = ..., dense: bool = ..., draws_own: bool = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("at", "accepted", "tokens", "plain", "gamma", "dense")
    AT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    at: At
    accepted: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    plain: bool
    gamma: int
    dense: bool
    def __init__(self, at: _Optional[_Union[At, _Mapping]] = ..., accepted: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., plain: bool = ..., gamma: _Optional[int] = ..., dense: bool = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("expected", "reason")
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    expected: At
    reason: str
    def __init__(self, expected: _Optional[_Union[At, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...
