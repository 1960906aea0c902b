"""How sessions speculate: the setting `speculation`, with which experts and benchmarks override the policy."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from specahead.config.setting import Keyed, Share, Within

Quantization = Literal["none", "fp8"]
KVCacheDtype = Literal["auto", "fp8"]
QUANTIZATIONS, KV_CACHE_DTYPES = get_args(Quantization), get_args(KVCacheDtype)

MAX_BRANCHES = 16
MOST_GAMMA = 64
READ_AT_ONCE = 16  # tokens of a session for which a pass reads its KV once (64 rows of queries, 4 heads a group)
MOST_JUDGED = 31  # proposed and screened tokens that a pass can judge (specahead.kernels.rejection)
AUDIT_SHARE = 0.02  # of the time of approximate rounds that audits may take, and of these rounds
SELF_READ_SHARE = 0.06  # share of the KV that a target reads when it drafts for itself or screens

WITHOUT_DRAFT = ("none", "lookup", "self", "auto")  # what --draft takes beside a model

_GPU_BRANCHES = 8  # a GPU's passes take their time for reading memory, so outcomes beside the likeliest are cheap
_GPU_READ_SHARE = 0.1
_GAMMA, _SELF_GAMMA = 4, 8


@dataclass(frozen=True, kw_only=True)
class Speculation(Keyed, group="speculation"):
    """Every choice that a key leaves open (None) is made by the policy, or follows from models and device."""

    gamma: Annotated[int, Within(least=1, most=MOST_GAMMA)] | None = None
    """Tokens drafted a round; null: as many, up to max_gamma, as are fastest by measured costs and acceptance."""
    max_gamma: Annotated[int, Within(least=1, most=MOST_GAMMA)] | None = None
    """Tokens drafted a round at most, where gamma is null; null: 8 with draft self or auto, else 4."""
    hold: Annotated[int, Within(least=0, most=MOST_JUDGED)] | None = None
    """Tokens of an exact session that sparse attention screens at most before one dense pass confirms them; 0: none,
    each round is dense; null: as many as are fastest, where screening can pay."""
    lookup: bool | None = None
    """Whether exact sessions propose tokens that followed their last ones earlier: up to 15 before their draft model is
    asked, where the last 15 occurred before, and where the last three did if it is not; null: where it is on a GPU."""
    draft_context: Annotated[int, Within(least=0)] = 2048
    """A draft that announces no blocks reads the last tokens of a prompt alone: at least as many as this, at most twice
    as many, and four times of a text that grows; 0: all."""
    draft_read_share: Share | None = None
    """Share of the KV that the draft's passes after a round's first one read; null: 0.1 on a GPU, 1 on a CPU."""
    branches: Annotated[int, Within(least=0, most=MAX_BRANCHES)] | None = None
    """Outcomes of a verdict that a draft service drafts for at most while the target verifies; 0: it waits for the
    verdict; null: 8 on a GPU, 1 on a CPU."""
    draft_quantization: Quantization | None = None
    """fp8: rounds of up to 128 rows read the draft's weights, or the target's where it drafts for itself, from a copy
    in 8 bits; null: fp8 where the GPU reads it and has the memory."""
    screening_quantization: Quantization | None = None
    """fp8: steps that screen up to 64 tokens read the target's weights from a copy in 8 bits; null: as for
    draft_quantization."""
    audit_share: Annotated[float, Within(least=0, most=1)] | None = None
    """Share of approximate rounds that are verified densely beside, to see how far their distributions are from the
    dense ones; 0: none; null: 0.02, or fewer so that it takes 0.02 of the time."""
    max_divergence: Share | None = None
    """Total variation from the dense distributions below which approximate sessions are held, on average, by reading
    more; 1: they are not held; null: by the plan."""


@dataclass(frozen=True, kw_only=True)
class ResolvedSpeculation(Speculation):
    """A speculation with nothing left open but to the policy: gamma and hold, where they are None."""

    max_gamma: int
    lookup: bool
    draft_read_share: float
    branches: int

    def skipped_by_draft(self, prompt_tokens: int, announces: bool) -> int:
        """Return how many tokens at the beginning of a prompt a draft does not read.

        It is a multiple of `draft_context`, so that the next turns of a conversation find the KV of the last one
        (draft_service.admission). announces: whether the draft announces blocks of this session.
        """
        if announces or not self.draft_context:
            return 0
        return max(0, prompt_tokens // self.draft_context - 1) * self.draft_context


@dataclass(frozen=True)
class Circumstances:
    """What the choices of a speculation depend on beside itself."""

    draft: str
    """The draft model, or one of WITHOUT_DRAFT."""
    on_gpu: bool = False
    """Whether the service runs on a GPU."""
    in_tiers: bool = False
    """Whether the target's KV lies in host memory and the GPU holds a part of it."""

    @property
    def has_draft(self) -> bool:
        """Whether a draft model proposes."""
        return self.draft not in WITHOUT_DRAFT

    @property
    def drafts_for_itself(self) -> bool:
        """Whether the target's own sparse attention proposes."""
        return self.draft in ("self", "auto")


def resolve(asked: Speculation, where: Circumstances) -> ResolvedSpeculation:
    """Return the speculation with every None resolved, but for gamma and hold where the policy chooses them."""
    max_gamma = asked.gamma or asked.max_gamma or (_SELF_GAMMA if where.drafts_for_itself else _GAMMA)
    share = asked.draft_read_share or (_GPU_READ_SHARE if where.on_gpu and where.has_draft else 1.0)
    given = {item.name: getattr(asked, item.name) for item in dataclasses.fields(Speculation)}
    resolved = {
        "max_gamma": max_gamma,
        "hold": asked.hold if asked.hold is not None or _may_hold(max_gamma, where) else 0,
        "lookup": asked.lookup if asked.lookup is not None else where.on_gpu and where.has_draft,
        "draft_read_share": share,
        "branches": asked.branches if asked.branches is not None else _GPU_BRANCHES if where.on_gpu else 1,
    }
    return ResolvedSpeculation(**(given | resolved))


def _may_hold(max_gamma: int, where: Circumstances) -> bool:
    """Return whether the policy may screen: a draft or the text must propose, and dense passes must cost more than
    sparse ones, as on a GPU."""
    proposes = where.has_draft or where.draft == "lookup"
    return where.on_gpu and proposes and max_gamma <= most_gamma_holding(where.in_tiers)


def most_gamma_holding(in_tiers: bool) -> int:
    """Return the most tokens that a round may draft where the policy chooses how many are held."""
    return MOST_JUDGED // 2 if in_tiers else READ_AT_ONCE - 3
