"""The settings of the draft service and the target service."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from specahead import models
from specahead.config.access import ServiceAccess
from specahead.config.setting import Called, Count, Port, Positive, Section, SettingsError, Share, Within
from specahead.config.speculation import (
    MOST_JUDGED,
    READ_AT_ONCE,
    SELF_READ_SHARE,
    Circumstances,
    KVCacheDtype,
    Quantization,
    ResolvedSpeculation,
    Speculation,
    most_gamma_holding,
    resolve,
)


@dataclass(frozen=True, kw_only=True)
class _RunSettings(Section, group="how the models run"):
    device: str = "auto"
    """cpu, cuda, or auto."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: bfloat16 on a GPU, and for models of more than 100 million parameters on a
    CPU that multiplies it (AMX); else float32."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights."""
    enforce_eager: bool = False
    """Capture no CUDA graphs, for debugging."""
    deterministic: bool = False
    """The target's tokens depend neither on the batch nor on drafting, at some cost (GPU only)."""


@dataclass(frozen=True, kw_only=True)
class _LimitSettings(Section, group="sessions and steps"):
    max_context: Annotated[Count, Called("max_model_len", "max_model_len")] = 32768
    """Longest prompt and output together, in tokens; 0: the longest that the models allow."""
    max_sessions: Positive = 64
    """Sessions that run at once; more are queued."""
    prefill_chunk: Count = 0
    """Prompt tokens that one step may run, over all sessions; 0: 8192 on a GPU, 512 on a CPU."""


@dataclass(frozen=True, kw_only=True)
class _MemorySettings(Section, group="KV memory"):
    kv_tokens: Count = 0
    """Tokens of KV that each service has room for, over all sessions; with host_kv_memory, that the target's GPU holds;
    0: by memory."""
    kv_memory: Annotated[float, Within(least=0)] = 0.0
    """GiB of KV of each service; 0: by gpu_memory_utilization."""
    gpu_memory_utilization: Share = 0.9
    """Share of its GPU's memory that a service may take."""


@dataclass(frozen=True, kw_only=True)
class _SpeculationSettings(Section, group="speculation"):
    speculation: Speculation = Speculation()  # noqa: RUF009 (it is frozen)
    """Overrides for experts and benchmarks, as JSON or a mapping; the service chooses each key that is left out."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(_SpeculationSettings, _MemorySettings, _LimitSettings, _RunSettings):
    """What the engine needs to open a model and make room for its KV.

    `gpu_memory_utilization` never gives more room than `max_sessions` of `max_model_len` tokens need. With
    `host_kv_memory` these settings give the part of the KV in host memory that the device holds at once.
    """

    model: str = ""
    """The model: a Hugging Face id or a folder."""
    threads: int = 0
    """CPU threads of the model; 0: torch's choice."""
    host_kv_memory: float = 0.0
    """GiB of host memory for the target's KV, of which each rank has an equal part; 0: the KV lies on the device."""
    quantization: Quantization = "none"
    """fp8: linear layers but the head are held in 8 bits; none: as the checkpoint has them."""
    tensor_parallel_size: int = 1
    """GPUs over which heads and columns of the model are split; 1: one device has it whole."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """fp8: keys and values are held in 8 bits; auto: in the model's dtype."""
    group_size: int = 0
    """Tokens of a group whose means are kept, by the plan; 0: none are."""

    @cached_property
    def chosen(self) -> ResolvedSpeculation:
        """How sessions speculate: what `speculation` says, and what follows from the models and the device."""
        return resolve(self.speculation, self.circumstances)

    @property
    def circumstances(self) -> Circumstances:
        """What the choices of a speculation depend on."""
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
class _PlanSettings(Section, group="models and plan"):
    plan: str = str(models.PLAN)
    """Plan that `specahead calibrate` made for the pair: a file, or a folder or Hugging Face id with a
    specahead-plan.json; the default is for the bundled pair. Any other pair without a plan serves approximate
    uncalibrated: it reads everything unless a budget is stated."""
    budget: Annotated[float, Within(least=0, most=1)] = 0.0
    """Share of the KV blocks that approximate reads; 0: the plan's."""


@dataclass(frozen=True, kw_only=True)
class _ListenSettings(Section, group="where the services listen"):
    host: Annotated[str, Called("service_host")] = "127.0.0.1"
    """Address that draft and target services bind; empty: the address of their Ray node."""
    port: Annotated[Port, Called("base_port")] = 0
    """Port of a service; a launch counts on from it: targets, then drafts; 0: any free one."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings(_ListenSettings, _PlanSettings, ServiceAccess, ModelSettings):
    """What target and draft service have in common."""

    name: str = ""
    """What a launch calls each of several services of a side; empty: it is called as its side."""

    @property
    def has_draft(self) -> bool:
        """Whether a draft model drafts, in a service or in the target's process."""
        return self.circumstances.has_draft

    @property
    def drafts_for_itself(self) -> bool:
        """Whether the target drafts by its own sparse attention."""
        return self.circumstances.drafts_for_itself

    @property
    def pair(self) -> tuple[str, str]:
        """The target's model and the draft's; "" without a draft model."""
        raise NotImplementedError

    @property
    def plan_file(self) -> str:
        """The plan's file; empty where none is given for this pair, whose plan its two models' sizes give then."""
        return self.plan if self.plan != str(models.PLAN) or all(self._bundled.values()) else ""

    @property
    def _bundled(self) -> dict[str, bool]:
        """Whether each model is of the bundled pair, by its side."""
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


@dataclass(frozen=True, kw_only=True)
class _OwnOfTarget(ServiceSettings, group="the target"):
    model: Annotated[str, Called("target")] = str(models.TARGET)
    """Target model: Hugging Face id or folder."""
    draft: str = str(models.DRAFT)
    """Draft model, or EAGLE-3 head of the target: Hugging Face id or folder. Without one: lookup proposes what followed
    the same tokens earlier in the text; self drafts by the target's own attention over little of its KV, where that
    pays; auto: self where it pays, else lookup; none: one token a step."""
    quantization: Quantization = "none"
    """fp8: the target's linear layers but the head are rounded to 8 bits as they are loaded, with no other copy; none:
    they stay as the checkpoint has them."""
    tensor_parallel_size: Annotated[int, Within(least=1, most=8)] = 1
    """GPUs of one machine over which each target's heads and columns are split: 1, 2, 4 or 8."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """fp8: the KV of the target, and of a draft in its process, is held in 8 bits (e4m3, a scale for each layer and
    KV head); auto: in the model's dtype."""
    max_queued: Count = 1024
    """Sessions that may wait for a place; more are refused; 0: every session that cannot run at once is refused."""
    host_kv_memory: Annotated[float, Within(least=0)] = 0.0
    """GiB of host memory that holds each target's KV; its GPUs share it equally and hold kv_memory of KV each; 0: all
    KV lies on the GPUs."""
    placement: Literal["auto", "together", "apart"] = "auto"
    """together: each target's process runs the draft model as well; apart: draft services do; auto: as suits GPUs,
    weights and KV; apart for a target service by itself."""


@dataclass(frozen=True, kw_only=True)
class TargetSettings(_OwnOfTarget):
    """The target service and its verifier."""

    side: ClassVar[str] = "target"

    self_read_share: float = SELF_READ_SHARE
    """Share of the KV that the target reads when it drafts for itself or screens."""
    draft_timeout: float = 0.0
    """Seconds that the target waits for a proposal before decoding plainly; 0: by what recent rounds took."""

    def __post_init__(self) -> None:
        super().__post_init__()
        hold = self.speculation.hold
        if hold:
            self._check_hold(hold)
        elif hold == 0 and self.screens_lightly:
            raise SettingsError("speculation: screening_quantization is given, but hold is 0: nothing is screened")
        if self.speculation.lookup and not self.has_draft:
            raise SettingsError(f"speculation: lookup is not built with draft {self.draft}: leave one of them out")
        if self.draft_in_target and not self.has_draft:
            raise SettingsError(f"placement is 'together': draft is {self.draft!r}, expected a model's id or folder")
        if self.tensor_parallel_size & (self.tensor_parallel_size - 1):
            raise SettingsError(f"tensor_parallel_size is {self.tensor_parallel_size}, expected 1, 2, 4 or 8")
        if self.draft_in_target and self.host_kv_memory:
            raise SettingsError(
                "placement 'together' is not built with host_kv_memory: the draft's KV would have to lie in tiers as "
                "well; leave one of them out"
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
    def draft_in_target(self) -> bool:
        """Whether the target's process runs the draft model as well, by turns with its own steps."""
        return self.placement == "together"

    @property
    def may_serve_exactly(self) -> bool:
        """Whether the policy may serve an approximate request exactly. A draft on the target's device reads whole
        contexts for its announcements, in time that the target lacks; and exact rounds may be screened.
        """
        return self.draft_in_target and self.chosen.hold is None

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
    def circumstances(self) -> Circumstances:
        return Circumstances(self.draft, self.device.startswith("cuda"), self.host_kv_memory > 0)

    @property
    def pair(self) -> tuple[str, str]:
        return self.model, self.draft if self.has_draft else ""

    @property
    def own_draft(self) -> "DraftSettings":
        """The settings of the draft in the target's process: it drafts one round at a time, after a known verdict."""
        common = {item.name: getattr(self, item.name) for item in fields(ServiceSettings)}
        return DraftSettings(
            **common
            | {
                "model": self.draft,
                "target_model": self.model,
                "kv_tokens": 0,  # room for as many tokens as the target
                "quantization": "none",
                "tensor_parallel_size": 1,
                "deterministic": False,  # a draft changes no token of a deterministic target
                "group_size": 0,
                "speculation": replace(self.speculation, branches=0),
            }
        )

    @property
    def most_unread_tokens(self) -> int:
        """Tokens that a peer of the target may leave unread: twice the tokens of all sessions, and 2^18 at least."""
        return max(1 << 18, 2 * self.max_sessions * self.max_context)


@dataclass(frozen=True, kw_only=True)
class _OwnOfDraft(ServiceSettings, group="models and plan"):
    model: Annotated[str, Called("draft")] = str(models.DRAFT)
    """Draft model: Hugging Face id or folder."""
    target_model: Annotated[str, Called("target")] = str(models.TARGET)
    """Target model: Hugging Face id or folder."""
    targets: Annotated[tuple[str, ...], Called("", "target")] = ()
    """HOST:PORT of a target service to draft for; may be repeated."""


@dataclass(frozen=True, kw_only=True)
class DraftSettings(_OwnOfDraft):
    """The draft service and its drafter."""

    side: ClassVar[str] = "draft"

    support: int = 64
    """Entries of a sampled token's distribution that travel to the target."""

    @property
    def circumstances(self) -> Circumstances:
        return Circumstances(self.model, self.device.startswith("cuda"))

    @property
    def pair(self) -> tuple[str, str]:
        return self.target_model, self.model if self.has_draft else ""
