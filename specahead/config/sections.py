"""Every setting of specahead, declared once: name, type, default, help, group and range."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar

from specahead import models
from specahead.config.access import ClientAccess, ServiceAccess
from specahead.config.attention_backends import ATTENTION_BACKENDS, ATTENTION_HELP, check_attention_backend
from specahead.config.setting import Section, Setting, SettingsError, setting
from specahead.config.speculation import (
    MOST_JUDGED,
    READ_AT_ONCE,
    SELF_READ_SHARE,
    Circumstances,
    ResolvedSpeculation,
    Speculation,
    most_gamma_holding,
    resolve,
)

LOAD_FORMATS = ("auto", "dummy")
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral", "qwen3_coder")
JSON_WHITESPACE = ("compact", "none", "any")
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1")
LARGEST_PORT = 65535
ALTERNATIVES_RIGHT = 0.7  # of the share of accepted tokens, measured with the bundled pair (docs/performance.md)
ROUTING = ("prefix", "least-loaded", "round-robin")  # orchestrator/sessions/routing.py

_models = partial(setting, group="models and plan", by_model=True)
_rounds = partial(setting, group="rounds", by_model=True)
_limits = partial(setting, group="sessions and steps", by_model=True)
_memory = partial(setting, group="KV memory", by_model=True)
_running = partial(setting, group="how the models run", by_model=True)
_services = partial(setting, group="where the services listen")
_port = partial(setting, least=0, most=LARGEST_PORT)
_scaling = partial(setting, group="scaling", by_model=True)
_placement = partial(setting, group="placement")
_endpoints = partial(setting, group="client endpoints")

_BY_POLICY = Speculation()

# The draft's own model, of which the target has to know whether there is one.
_DRAFT = Setting(
    "draft model: Hugging Face id or folder; or without a draft service self: the target drafts for itself, reading "
    "little of its KV, where that pays, lookup: it proposes what followed the same tokens earlier in the text, auto: "
    "self where it pays, else lookup, none: it runs one token a step",
    group="models and plan",
    name="draft",
    by_model=True,
)
_draft_model = partial(field, default=str(models.DRAFT), metadata={"setting": _DRAFT})

# The target's own model, which a draft without a plan has to know the sizes of.
_TARGET = Setting("target model: Hugging Face id or folder", group="models and plan", name="target", by_model=True)
_target_model = partial(field, default=str(models.TARGET), metadata={"setting": _TARGET})

# The targets' and the gateways' own.
_RESUMPTION = Setting(
    "seconds that requests wait for a lost target before they fail, and that a target keeps what those of a lost "
    "gateway have come to",
    group="client endpoints",
    least=0,
)
_resume_timeout = partial(field, default=60.0, metadata={"setting": _RESUMPTION})


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """What the engine needs to open a model and make room for its KV.

    The room for KV is `kv_tokens`; if that is 0 it is `kv_memory` GiB, and if that is 0 too it is what
    `gpu_memory_utilization` leaves beside the weights, though never more than `max_sessions` of `max_context` tokens
    need. With `host_kv_memory` this room is what lies on the device at once of the KV in host memory.

    The last two fields are no settings, since the plan gives them: `dense_layers`, the layers that sparse sessions read
    wholly and whose KV stays on the device, and `group_size`, the tokens of a group whose means are kept (0: none).
    """

    model: str = ""
    device: str = _running("auto", "cpu, cuda, or auto")
    dtype: str = _running(
        "auto",
        "float32, bfloat16, float16, or auto: bfloat16 on a GPU, and on a CPU that multiplies it (AMX) for models of "
        "more than 100 million parameters, else float32",
    )
    threads: int = _running(
        0,
        "CPU threads of each model; 0: its share of the cores of its node, which a launch's services have alike; in a "
        "service by itself torch's choice",
        least=0,
    )
    load_format: str = _running("auto", "auto, or dummy for random weights", choices=LOAD_FORMATS)
    enforce_eager: bool = _running(False, "capture no CUDA graphs, for debugging")
    deterministic: bool = _running(
        False, "the target's tokens do not depend on the batch nor on drafting, at some cost (GPU only)"
    )
    attention_backend: str = _running("auto", f"{', '.join(ATTENTION_BACKENDS)}: {ATTENTION_HELP}")
    speculation: Speculation = _rounds(  # noqa: RUF009
        _BY_POLICY,
        "how sessions speculate, for experts and benchmarks, as JSON or a mapping; the service chooses what it leaves "
        "out",
    )
    max_context: int = _limits(
        32768, "longest prompt and output together, in tokens; 0: what the models allow", least=0
    )
    max_sessions: int = _limits(64, "sessions that run at once; more are queued", least=1)
    kv_tokens: int = _memory(
        0, "KV room of the {side}, in tokens over all sessions; 0: by memory", name="{side}_kv_tokens", least=0
    )
    kv_memory: float = _memory(0.0, "GiB of KV of each service; 0: by gpu_memory_utilization", least=0)
    gpu_memory_utilization: float = _memory(0.9, "share of its GPU's memory that a service may take", above=0, most=1)
    host_kv_memory: float = 0.0
    dense_layers: tuple[int, ...] = ()
    group_size: int = 0

    @cached_property
    def chosen(self) -> ResolvedSpeculation:
        """How sessions speculate: what `speculation` says, and what follows from the models and the device."""
        return resolve(self.speculation, self._circumstances)

    @property
    def _circumstances(self) -> Circumstances:
        return Circumstances("none")

    @property
    def adaptive(self) -> bool:
        """Whether the target decides how many tokens are drafted."""
        return self.speculation.gamma is None

    @property
    def most_drafted(self) -> int:
        """Tokens drafted a round, at most."""
        return self.chosen.max_gamma

    @property
    def widest_round(self) -> int:
        """Tokens that a session runs in a round, at most."""
        return self.most_drafted + 1


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(ServiceAccess, ModelSettings):
    """What target and draft service have in common.

    `name` is no setting: a launch gives it to each of several services of a side; empty: it is called as its side.
    """

    plan: str = _models(
        str(models.PLAN),
        "plan file made by `specahead calibrate` for the pair; the bundled one is for the bundled pair, any other pair "
        "without a plan serves approximate uncalibrated: it reads everything unless a budget is stated",
    )
    budget: float = _models(0.0, "share of the KV blocks that approximate reads; 0: the plan's", least=0, most=1)
    method: str = _models("", "sparsity method that approximate uses by default; empty: the plan's", name="sparsity")
    prefill_chunk: int = _limits(
        0, "prompt tokens that one step may run, over all sessions; 0: 8192 on a GPU, 512 on a CPU", least=0
    )
    host: str = _services(
        "127.0.0.1",
        "address that draft and target services bind; empty: that of the node on which a launch's Ray runs them",
        name="service_host",
    )
    step_timeout: float = _limits(
        120.0, "seconds that one step of a model may take before its service ends itself as hung", above=0
    )
    traces: bool = setting(
        False,
        "add OpenTelemetry spans to the traces of an orchestrator's requests; a launch with a trace_share says it",
        group="traces",
        name="",
    )
    port: int = _port(
        0,
        "port of the {side} service, the next ones for further services of a launch; 0: any free one",
        group="where the services listen",
        name="{side}_port",
        by_model=True,
    )
    name: str = ""

    @property
    def draft_name(self) -> str:
        """The draft model, or one of WITHOUT_DRAFT."""
        raise NotImplementedError

    @property
    def has_draft(self) -> bool:
        """Whether a draft model drafts, be it as a service or in the target."""
        return self._circumstances.has_draft

    @property
    def drafts_for_itself(self) -> bool:
        """Whether the target drafts by its own sparse attention."""
        return self._circumstances.drafts_for_itself

    @property
    def pair(self) -> tuple[str, str]:
        """The target's model and the draft's; "" for a draft that is none."""
        raise NotImplementedError

    @property
    def plan_file(self) -> str:
        """The plan's file; empty where none is given for this pair, whose plan its two models' sizes give then."""
        return self.plan if self.plan != str(models.PLAN) or all(self._bundled.values()) else ""

    @property
    def _bundled(self) -> dict[str, bool]:
        """Of each model that there is, by its side: whether it is of the bundled pair."""
        bundled = zip(("target", "draft"), self.pair, (models.TARGET, models.DRAFT), strict=True)
        return {side: Path(model).resolve() == own for side, model, own in bundled if model}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.startswith(("/", "./", "../", "~")) and not Path(self.model).is_dir():
            raise SettingsError(f"the {self.side} model is {self.model!r}, and there is no such folder")
        bundled = self._bundled
        if self.has_draft and self.plan == str(models.PLAN) and not bundled[self.side] and any(bundled.values()):
            target, draft = self.pair
            raise SettingsError(
                f"the target is {target} and the draft {draft}: one of the bundled pair with another model. Give both "
                "(--target and --draft; a draft service by itself: --target-model), or a --plan made for the two"
            )
        try:
            check_attention_backend(self.attention_backend, self.device, self.deterministic, self.enforce_eager)
        except ValueError as error:
            raise SettingsError(str(error)) from None


@dataclass(frozen=True, kw_only=True)
class TargetSettings(ServiceSettings):
    """The target service and its verifier."""

    side: ClassVar[str] = "target"

    model: str = _target_model()
    draft: str = _draft_model()
    draft_in_target: bool = _models(
        False,
        "the target runs the draft model itself, on its own device, by turns with its own steps: no draft service, and "
        "a GPU each for --targets N in place of one for targets and one for drafts",
    )
    host_kv_memory: float = _memory(
        0.0,
        "GiB of host memory as the backing store of the target's KV, of which kv_memory is what its GPU holds; 0: none",
        least=0,
    )
    resume_timeout: float = _resume_timeout()
    max_queued: int = _limits(
        1024, "sessions that may wait for a place; more are refused, with 0 all that cannot run at once", least=0
    )
    synthetic_acceptance: float = _rounds(
        -1.0, "keep drafted tokens with this probability, for measurements; negative: the target decides"
    )
    synthetic_confirmation: float = _rounds(
        1.0, "of tokens that are to be confirmed (confirm_every), with synthetic_acceptance", least=0, most=1
    )
    synthetic_alternatives: float = _rounds(
        -1.0,
        "how often an alternative to a rejected token is right, with synthetic_acceptance; negative: 0.7 of that, "
        "which is as often as with the bundled pair at 0.8",
        most=1,
    )

    self_read_share: float = SELF_READ_SHARE
    self_from: int = -1
    draft_timeout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        hold = self.speculation.hold
        if hold:
            self._check_hold(hold)
        elif hold == 0 and self.synthetic_confirmation < 1:
            raise SettingsError(
                f"synthetic_confirmation is {self.synthetic_confirmation}, but hold is {hold}: nothing is confirmed"
            )
        elif hold == 0 and self.screens_lightly:
            raise SettingsError("speculation: screening_quantization is given, but hold is 0: nothing is screened")
        if self.synthetic_confirmation < 1 and self.synthetic_acceptance < 0:
            raise SettingsError(
                f"synthetic_confirmation is {self.synthetic_confirmation}, but verdicts are the target's own: give a "
                "synthetic_acceptance, or leave it out"
            )
        if self.speculation.lookup and not self.has_draft:
            raise SettingsError(f"speculation: lookup is not built with draft {self.draft}: leave one of them out")
        if self.draft_in_target and not self.has_draft:
            raise SettingsError(f"draft_in_target: draft is {self.draft!r}, expected a model's id or folder")
        if self.draft_in_target and self.host_kv_memory:
            raise SettingsError(
                "draft_in_target is not built with host_kv_memory: the draft's KV would have to lie in tiers as well; "
                "leave one of them out"
            )

    def _check_hold(self, hold: int) -> None:
        """Raise SettingsError for settings with which sparse attention cannot screen what a dense pass confirms."""
        least, most = self.most_drafted + 1, MOST_JUDGED - self.most_drafted
        by_policy = most_gamma_holding(self.host_kv_memory > 0)
        refused = {
            f"draft {self.draft}, where sparse attention proposes what a dense pass confirms": self.drafts_for_itself,
            "draft none, where nothing is proposed": self.draft == "none",
            # What a round is worth would be measured without what dense passes take back.
            "a gamma of null; give both, or neither": self.adaptive,
        }
        for what in (what for what, given in refused.items() if given):
            raise SettingsError(f"speculation: hold {hold} is not built with {what}")
        if not least <= hold <= most:
            raise SettingsError(
                f"speculation: hold is {hold}: with a gamma of {self.most_drafted} it must be 0, or from {least} (a "
                f"round's tokens) to {most}; null takes a gamma of at most {by_policy}"
            )

    @property
    def alternatives_share(self) -> float:
        """How often an alternative to a rejected token is right, where verdicts are imposed."""
        given = self.synthetic_alternatives
        return given if given >= 0 else ALTERNATIVES_RIGHT * max(0.0, self.synthetic_acceptance)

    @property
    def screens_lightly(self) -> bool:
        """Whether steps that screen read the weights in 8 bits."""
        return self.speculation.screening_quantization == "fp8"

    @property
    def most_held(self) -> int:
        """Tokens of an exact session that are screened before a dense pass confirms them, at most; 0: none are.

        Where the policy chooses, one drafted token still fits beside them into a pass that reads the KV once.
        """
        if self.chosen.hold is not None:
            return self.chosen.hold
        return MOST_JUDGED - self.most_drafted if self._holds_many else READ_AT_ONCE - 2

    @property
    def _holds_many(self) -> bool:
        """Whether the policy may hold as many tokens as can be judged: bringing KV from the host costs more than
        reading it repeatedly. A deterministic target keeps to the width that its steps have in any case.
        """
        return self.chosen.hold is None and self.host_kv_memory > 0 and not self.deterministic

    @property
    def widest_round(self) -> int:
        """Tokens that a session runs in a round, at most, with the tokens that it confirms.

        A deterministic target's steps are all as wide, so that its tokens do not depend on how rounds are made.
        """
        by_policy = self.chosen.hold is None
        held = self.most_held if not by_policy or self._holds_many else 0
        wide = by_policy or self.chosen.lookup or self.deterministic
        return max(READ_AT_ONCE if wide else 0, super().widest_round + held)

    @property
    def _circumstances(self) -> Circumstances:
        return Circumstances(self.draft, self.device.startswith("cuda"), self.host_kv_memory > 0)

    @property
    def draft_name(self) -> str:
        """The draft model, or one of WITHOUT_DRAFT."""
        return self.draft

    @property
    def pair(self) -> tuple[str, str]:
        """The target's model and the draft's; "" for a draft that is none."""
        return self.model, self.draft if self.has_draft else ""

    @property
    def own_draft(self) -> "DraftSettings":
        """How the draft runs that is part of the target: one round at a time, for the outcome that there is."""
        common = {item.name: getattr(self, item.name) for item in fields(ServiceSettings)}
        return DraftSettings(
            **common
            | {
                "model": self.draft,
                "target_model": self.model,
                "kv_tokens": 0,  # room for as many tokens as the target
                "deterministic": False,  # what a draft says changes no token of a deterministic target
                "dense_layers": (),
                "group_size": 0,
                "speculation": replace(self.speculation, overlap=False),
            }
        )

    @property
    def most_unread_tokens(self) -> int:
        """How many tokens a peer of the target may leave unread: as many as all sessions have, twice, or 2^18."""
        return max(1 << 18, 2 * self.max_sessions * self.max_context)


@dataclass(frozen=True, kw_only=True)
class DraftSettings(ServiceSettings):
    """The draft service and its drafter. `support` is no setting: the entries of a sampled token's distribution that
    travel to the target."""

    side: ClassVar[str] = "draft"

    model: str = _draft_model()
    target_model: str = _target_model()
    targets: tuple[str, ...] = _services(
        (), "HOST:PORT of a target service to draft for; may be repeated", name="", flag="target"
    )
    support: int = 64

    @property
    def _circumstances(self) -> Circumstances:
        return Circumstances(self.model, self.device.startswith("cuda"))

    @property
    def draft_name(self) -> str:
        """The draft model, or one of WITHOUT_DRAFT."""
        return self.model

    @property
    def pair(self) -> tuple[str, str]:
        """The target's model and the draft's; "" for a draft that is none."""
        return self.target_model, self.model if self.has_draft else ""


@dataclass(frozen=True, kw_only=True)
class ClientSettings(ClientAccess):
    """The endpoints that clients call."""

    served_model_name: str = _endpoints(
        "", "model name that clients use; empty: the target's last path component", by_model=True
    )
    host: str = _endpoints("127.0.0.1", "address that the client endpoints bind")
    grpc_port: int = _port(50051, "client gRPC port; 0: any free one", group="client endpoints")
    http_port: int = _port(8000, "client HTTP port; 0: any free one", group="client endpoints")
    tool_call_parser: str = _endpoints(
        "auto",
        f"how the model writes tool calls: {', '.join(TOOL_CALL_PARSERS)}; auto: as its chat template shows",
        by_model=True,
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = _endpoints(
        "auto",
        f"how the model marks its reasoning: {', '.join(REASONING_PARSERS)}; deepseek_r1 begins with it, unmarked",
        by_model=True,
        choices=REASONING_PARSERS,
    )
    json_whitespace: str = _endpoints(
        "compact",
        "white space in JSON that must follow a schema: compact (a blank after a comma or a colon, or none), none, or "
        "any (up to 32 blanks and line breaks between two parts); a request may say otherwise",
        by_model=True,
        choices=JSON_WHITESPACE,
    )
    generation_config: str = _endpoints(
        "auto",
        "how tokens are chosen where a request does not say: auto (by the model's generation_config.json) or none",
        by_model=True,
        choices=("auto", "none"),
    )
    resume_timeout: float = _resume_timeout()
    max_connections: int = _endpoints(1000, "client HTTP connections at once, half of them from one address", least=2)
    request_timeout: float = _endpoints(
        3600.0, "seconds that a request may take in all; 0: as long as it takes", least=0
    )
    routing: str = _endpoints(
        "prefix",
        "which of several targets takes a request: the one that has most of its prompt cached unless others are less "
        "busy, the least busy one, or one after the other",
        by_model=True,
        choices=ROUTING,
    )
    max_wait: float = _endpoints(
        0.0,
        "seconds that a request may be expected to wait before its prompt is read, else it is refused; 0: any time",
        by_model=True,
        least=0,
    )
    shutdown_grace: float = _endpoints(10.0, "seconds that requests in flight get to finish at shutdown", least=0)


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(Section):
    """Where the services run."""

    targets: int = _placement(1, "target services that Ray is to run", by_model=True, least=1)
    drafts: int = _placement(1, "draft services that Ray is to run; each serves all targets", by_model=True, least=1)
    max_targets: int = _scaling(
        0,
        "target services that Ray is to run at most, where the load asks for more than --targets, with drafts in "
        "proportion; 0: no more than these",
        least=0,
    )
    scale_kv_use: float = _scaling(
        0.7, "share of the targets' KV room that is to be in use; more is a load for more targets", above=0, most=1
    )
    scale_wait: float = _scaling(
        5.0, "seconds that a new request may be expected to wait, on average over the targets", above=0
    )
    scale_out_delay: float = _scaling(
        30.0, "seconds for which the load must ask for more targets until there are", least=0
    )
    scale_in_delay: float = _scaling(
        600.0, "seconds for which the load must ask for fewer targets until one is drained and ended", least=0
    )
    target_address: str = _placement(
        "",
        "HOST:PORT of a target service that runs already, or several with commas; then Ray is not used",
        by_model=True,
    )
    draft_address: str = _placement(
        "", "HOST:PORT of a draft service of theirs, or several, for its status in /metrics", by_model=True
    )
    connect_timeout: float = _placement(
        30.0, "seconds that target and draft may take to be found at the start; 0: any time", least=0
    )
    ray_address: str = _placement("auto", "address of a running Ray; auto: find one, else start one")
    namespace: str = _placement("specahead", "Ray namespace")
    join: bool = _placement(
        False, "place no services, but serve clients over those that another launch has placed in this namespace of Ray"
    )
    target_resource: str = _placement(
        "", "Ray's custom resource that a node must have to run the target; empty: any node will do", by_model=True
    )
    draft_resource: str = _placement("", "the same for the draft", by_model=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.max_targets < self.targets:
            raise SettingsError(f"max_targets {self.max_targets} is less than targets {self.targets}")
        placed_by_others = "join" if self.join else "target_address" if self.target_address else ""
        if self.max_targets and placed_by_others:
            raise SettingsError(f"max_targets: with {placed_by_others} this launch places no services")
        if self.join and self.target_address:
            raise SettingsError("join and target_address: the services are found by the one or by the other")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a launch. What both services need has the same value in both.

    several: a Config for each of several models, which differ in what settings may by model; all others are those of
    the first, as in this Config, which has its target and draft as well. Empty: the launch serves one model.
    """

    target: TargetSettings = field(default_factory=partial(TargetSettings, max_context=0, host=""))
    draft: DraftSettings = field(default_factory=partial(DraftSettings, max_context=0, host=""))
    clients: ClientSettings = field(default_factory=ClientSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    several: tuple["Config", ...] = ()

    @property
    def by_model(self) -> tuple["Config", ...]:
        """The settings of each model that is served."""
        return self.several or (self,)

    def label(self, model: "Config") -> str:
        """What stands in the names of a model's services: its name if there are several models, else nothing."""
        return model.model_name if self.several else ""

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft service."""
        return self.draft.has_draft and not self.target.draft_in_target

    @property
    def model_name(self) -> str:
        """What clients call the target."""
        return self.clients.served_model_name or Path(self.target.model).name
