"""What a step runs: every session whose proposal is here (γ + 1 tokens each), every session that no draft serves for
now (one token each, and those that it proposes or drafts by itself), and a share of the prompts still to be read.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from specahead.config import TargetSettings
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import Sampling, one_hot
from specahead.engine.sampling.judging import Drafted
from specahead.engine.sampling.logprobs import TokenLogprobs
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput, SparseRead
from specahead.engine.steps.passes.outputs import StepUnderWay
from specahead.engine.steps.rounds.behind_steps import Imposed
from specahead.engine.steps.runner import Runner
from specahead.engine.steps.step_loop import share_prefill
from specahead.sparsity.prompts import sparse_tokens
from specahead.wire.messages import Proposal
from target_service.screening import Confirms, Screening
from target_service.self_drafting import SelfDrafting
from target_service.session import TargetSession

SCORED_ROWS = 256  # tokens of prompts whose log probabilities are asked for, that a step reads


@dataclass
class VerifyRound:
    """A session's part of a step: a proposal to verify, or none to decode one token plainly.

    proposal: the draft's; None where the target proposes by itself, or nothing is proposed. wait_seconds: how long the
    target has waited for the proposal. drafting_cost: the tokens that have to be accepted to pay for drafting in the
    step itself; 0 where nothing is drafted there. is_void: what it gives counts for nothing. imposed: the verdict of a
    judge that decides in place of the model (target_service.hooks), once it was asked for.
    """

    session: TargetSession
    proposal: Proposal | None
    input: SequenceInput
    wait_seconds: float
    drafting_cost: float = 0.0
    is_void: bool = False
    imposed: Imposed | None = None

    @property
    def held(self) -> int:
        """How many tokens it is to confirm, between the first one and those proposed."""
        return self.input.held

    @property
    def proposed(self) -> list[int]:
        """The tokens to verify, whoever proposed them; those drafted in the step are there once it has run."""
        return self.input.tokens[1 + self.held :]

    @property
    def is_guessed(self) -> bool:
        """Whether what is proposed was guessed before the session's draft was asked."""
        return self.session.first_guess is not None and self.proposal is None and bool(self.proposed)

    @property
    def screens(self) -> bool:
        """Whether what it accepts is held back until a dense pass confirms it."""
        return self.input.screens


@dataclass
class VerifyStep:
    """What one pass of the model runs.

    left_running: whether executing it does not wait for it; the next step does (target_service.overlap). under_way:
    what is to be waited for then. before: the step that was left running, for which this one waits. began: when it was
    launched, by time.perf_counter.
    """

    rounds: list[VerifyRound] = field(default_factory=list)
    prefills: list[tuple[TargetSession, SequenceInput]] = field(default_factory=list)
    left_running: bool = False
    before: "VerifyStep | None" = None
    under_way: StepUnderWay | None = None
    began: float = 0.0

    @property
    def inputs(self) -> list[SequenceInput]:
        """The inputs of the pass: those of the rounds, then those of prompts."""
        return [item.input for item in self.rounds] + [item for _, item in self.prefills]

    @property
    def work(self) -> list[tuple[SequenceKV, int]]:
        """How many tokens the pass adds to each sequence."""
        return [(item.kv, item.rows) for item in self.inputs]

    @property
    def sessions(self) -> Iterator[TargetSession]:
        """The sessions that take part."""
        yield from (item.session for item in self.rounds)
        yield from (session for session, _ in self.prefills)

    @property
    def ending(self) -> "VerifyStep | None":
        """The step whose results executing this one gives: the one before, where that was left running."""
        return self.before or (None if self.left_running else self)


@dataclass(frozen=True)
class VerifyResult:
    """What the pass gave that has ended (VerifyStep.ending).

    outputs: of each round, in order. prompts: of each part of a prompt, the log probabilities of the tokens behind its
    tokens, if they are asked for. seconds: that it took.
    """

    outputs: list[SequenceOutput]
    prompts: list[list[TokenLogprobs]]
    seconds: float


def plan_verify_step(
    sessions: Iterable[TargetSession],
    settings: TargetSettings,
    drafting: SelfDrafting | None,
    runner: Runner,
    patience: float,
    counters: Counter[str],
    now: float,
) -> VerifyStep | None:
    """Return the next step of these sessions, in order of their arrival; None if there is nothing to run.

    A session that waits for its draft too long at the time `now` is decoded plainly until the draft is ready again.
    patience: how long that is, in seconds. drafting: how sessions draft for themselves, if they do. runner: what will
    run the step. The KV of a deterministic one has to be that of the first time also where it is read again.
    """
    step = VerifyStep()
    reading: list[TargetSession] = []
    alone: list[TargetSession] = []
    proposed: list[tuple[TargetSession, Proposal]] = []
    for session in sessions:
        if session.unread > 0:
            reading.append(session)
        elif waits(session, patience, counters, now):
            continue
        elif (proposal := _proposal_of(session)) is not None:
            proposed.append((session, proposal))
        else:
            alone.append(session)
    step.rounds = _plan_rounds(proposed, alone, settings, drafting, runner.kv, now)
    starts = [session.kv.length for session in reading]
    shares = share_prefill(starts, _readable(reading), settings.prefill_chunk)
    how = settings.widest_round, runner.deterministic
    for session, share in zip(reading, shares, strict=True):
        if share:
            step.prefills.append((session, _plan_reading(session, share, *how)))
    return step if step.rounds or step.prefills else None


def waits(session: TargetSession, patience: float, counters: Counter[str], now: float) -> bool:
    """Return whether a session has no part in a step at the time `now`: it waits for its grammar, or for its draft,
    which it does for `patience` seconds."""
    if session.unread > 0:
        return False
    if session.grammar is not None and not session.grammar.ready:
        return True
    if session.awaits_its_end or not session.next_round.gamma or _proposal_of(session) is not None:
        return False
    return not _may_decode_plainly(session, patience, counters, now)


def _proposal_of(session: TargetSession) -> Proposal | None:
    """Return the proposal to verify in a session's next round, if it is here and the round is to be drafted."""
    return session.ready_proposal() if session.next_round.gamma and not session.awaits_its_end else None


def _plan_rounds(
    proposed: list[tuple[TargetSession, Proposal]],
    alone: list[TargetSession],
    settings: TargetSettings,
    drafting: SelfDrafting | None,
    kv: KVCache,
    now: float,
) -> list[VerifyRound]:
    """Return the rounds of sessions with a proposal of their draft, and of those without. Of the latter those that
    draft for themselves all do, or none; then what their own texts propose is judged.
    """
    gamma, cost = drafted_for_themselves(alone, drafting, kv)
    given: list[tuple[TargetSession, Proposal | None, list[int]]] = [(each, own, own.tokens) for each, own in proposed]
    if not gamma:
        given += [(session, None, session.look_up(settings.most_drafted)) for session in alone]
    away = {each.id for each, *_ in given if each.screening is not None and not kv.is_resident(each.kv)}
    counts = [(each, 0 if each.copies else len(tokens)) for each, _, tokens in given]  # guesses are judged densely
    confirms = _how_each_confirms(counts, away)
    rounds = [plan_round(each, proposal, tokens, now, confirms[each.id]) for each, proposal, tokens in given]
    if drafting is not None and gamma:
        rounds += _plan_drafting(alone, drafting, gamma, cost, now)
    if settings.screens_lightly:
        screen_lightly(rounds, away)
    return rounds


def _plan_drafting(
    sessions: list[TargetSession], drafting: SelfDrafting, gamma: int, cost: float, now: float
) -> list[VerifyRound]:
    """Return the rounds of sessions that draft so many tokens for themselves. cost: as of `drafted_for_themselves`."""
    rounds = []
    for session in sessions:
        if session.memory is None or session.is_paused:
            rounds.append(plan_round(session, None, [], now))
            continue
        base = len(session.tokens)
        drafted = gamma if drafting.can_draft(session.weighed, base) else 0
        item = plan_round(session, None, [0] * drafted, now)
        item.input.read, item.drafting_cost = drafting.read(session.memory, base, drafted), cost
        rounds.append(item)
    return rounds


def drafted_for_themselves(
    sessions: Iterable[TargetSession], drafting: SelfDrafting | None, kv: KVCache
) -> tuple[int, float]:
    """Return how many tokens each of these sessions, without a proposal of a draft, drafts in a step of their own, and
    the tokens of each that have to be accepted to pay for it.
    """
    able = [session for session in sessions if session.memory is not None and not session.is_paused]
    tokens = sum(len(session.tokens) for session in able)
    if drafting is None or not tokens:
        return 0, 0.0
    away = sum(len(session.tokens) for session in able if not kv.is_resident(session.kv))
    gamma = drafting.drafted_in_step(tokens, away)
    return gamma, drafting.cost(gamma, tokens, away)


def _readable(reading: list[TargetSession]) -> list[int]:
    """Return how many tokens each session may read in a step: all, but for those whose prompts are scored.

    A row of logits is large, so that all of these together have SCORED_ROWS.
    """
    left, readable = SCORED_ROWS, []
    for session in reading:
        tokens = session.unread
        if session.prompt_logprobs is not None:
            tokens = min(tokens, left)
            left -= tokens
        readable.append(tokens)
    return readable


def _plan_reading(session: TargetSession, share: int, round_tokens: int, deterministic: bool) -> SequenceInput:
    """Return a part of the committed tokens without KV: up to `share` of them, as a prompt.

    Where KV has to be that of the first time, tokens that were generated run in rounds again, as if they were proposed.
    """
    start, prompt_end = session.kv.length, session.prompt_tokens - 1
    sparse_end = sparse_tokens(session.prompt_tokens)
    if session.prompt is not None and start < sparse_end:
        end = min(start + share, sparse_end)
        return SequenceInput(session.kv, session.tokens[start:end], prompt=session.prompt)
    if session.prompt_logprobs is not None:
        return SequenceInput(session.kv, session.tokens[start : start + share], logits="all")
    if not deterministic:
        return SequenceInput(session.kv, session.tokens[start : start + share])
    if start < prompt_end:
        return SequenceInput(session.kv, session.tokens[start : min(start + share, prompt_end)])
    first, *others = session.tokens[start : start + min(share, round_tokens)]
    drafted = Drafted(others, [], Sampling(temperature=0.0), start + 1)
    return SequenceInput(session.kv, [first, *others], logits="all", drafted=drafted)


def _may_decode_plainly(session: TargetSession, patience: float, counters: Counter[str], now: float) -> bool:
    if session.draft is None or not session.drafted:
        return True
    if session.stats.waiting_since is None:
        session.stats.waiting_since = now
    if now - session.stats.waiting_since < patience:
        return False
    counters["draft_timeouts"] += 1
    session.drafted = False
    return True


def _how_each_confirms(rounds: Sequence[tuple[TargetSession, int]], away: Collection[str]) -> dict[str, Confirms]:
    """Return how each of these sessions does, by name, with so many proposed tokens: each by itself of those that are
    `away`, whose KV has partly left the GPU, and the others together. The link brings the KV of one session in the time
    that it takes for it among others, so that confirming before it must would only bring it more often.
    """
    near = [(session, proposed) for session, proposed in rounds if session.id not in away]
    confirms = dict.fromkeys((session.id for session, _ in near), how_to_confirm(near))
    far = ((session, proposed) for session, proposed in rounds if session.id in away)
    return confirms | {session.id: how_to_confirm([(session, proposed)]) for session, proposed in far}


def how_to_confirm(rounds: Iterable[tuple[TargetSession, int]]) -> Confirms:
    """Return whether one of these sessions, with so many proposed tokens each, has to confirm what it holds.

    Then all of them do, and weigh what they read if one is to that holds something, or soon may: one dense pass for
    all takes less time than passes that list everything for some of them, between which the others screen
    (docs/performance.md).
    """
    screened = [(session, session.screening, proposed) for session, proposed in rounds if session.screening is not None]
    confirm = [(session, screening) for session, screening, n in screened if _is_confirmed(session, screening, n)]
    holding = any(len(session.tokens) > screening.confirmed for session, screening in confirm)
    if not holding and len(confirm) < len(screened):
        return Confirms.NO
    weighs = any(screening.is_to_weigh and (holding or n) for _, screening, n in screened)
    return Confirms.WEIGHING if weighs else Confirms.YES


def screen_lightly(rounds: list[VerifyRound], away: Collection[str] = ()) -> None:
    """Have the rounds of a step that screen run by the weights for what a later pass judges, unless others run beside
    them in one pass, by the weights of these. Rounds that read everything have a pass of their own where their sessions
    are `away`: some of their KV has left the GPU.
    """
    light = all(item.screens or item.session.id in away for item in rounds)
    for item in rounds:
        item.input.light = light and item.screens


def plan_round(
    session: TargetSession, proposal: Proposal | None, proposed: list[int], now: float, confirms: Confirms = Confirms.NO
) -> VerifyRound:
    """Return a session's part of a step: its last committed token, which has no KV yet, and what was proposed.

    A session that is screened, and reads everything in this round, runs what it holds once more, from its last
    confirmed token on, and as many of the proposed tokens as there is room for. proposal: as of `VerifyRound`.
    confirms: how the sessions of the step do, its own among them.
    """
    screening, base = session.screening, len(session.tokens)
    confirms_alone = screening is not None and _is_confirmed(session, screening, len(proposed))
    screens = screening is not None and confirms is Confirms.NO and not confirms_alone
    # Beside sessions that screen it lists everything, to run in their pass, and weighs that at no further cost, unless
    # it runs in a pass apart.
    weighs = confirms is not Confirms.YES
    if screening is not None and screening.deterministic and confirms is Confirms.NO:
        weighs = screening.is_to_weigh
    read = _plan_read(session, proposal, len(proposed), screens, weighs)
    screens &= read is not None and not read.reads_all
    supports = proposal.supports if proposal is not None else []
    held: list[int] = []
    if screening is not None and not screens:
        held, base = session.tokens[screening.confirmed :], screening.confirmed
        proposed = proposed[: screening.widest - 1 - len(held)]
        supports = supports[: len(proposed)]
        if screening.supports:
            supports = [*screening.supports, *(supports or map(one_hot, proposed))]
        elif held:  # they were drawn from nothing that is known
            supports = []
    drafted = Drafted(
        tokens=[*held, *proposed],
        supports=supports,
        sampling=session.sampling,
        base=base,
        rules=session.rules,
        committed=session.tokens[:base] if held and session.rules else session.tokens,
        logprobs=None if screens else session.logprobs,
        screens=screens,
        foresees=screens and screening is not None and screening.deterministic,
    )
    tokens = [session.tokens[base - 1], *drafted.tokens]
    since = session.stats.waiting_since
    return VerifyRound(
        session=session,
        proposal=proposal,
        input=SequenceInput(session.kv, tokens, logits="all", read=read, drafted=drafted, held=len(held)),
        wait_seconds=0.0 if since is None else now - since,
    )


def _is_confirmed(session: TargetSession, screening: Screening, proposed: int) -> bool:
    """Return whether a round confirms what a session holds, with so many proposed tokens, and is not screened itself:
    where nothing is proposed or it is guessed, where it would hold too many tokens, where it does not know what to
    read, and where the KV of what it holds was cut already for a step that had no room.
    """
    too_many = len(session.tokens) + proposed >= screening.confirmed + screening.most
    is_cut = session.kv.length < len(session.tokens) - 1
    return not proposed or session.copies or too_many or screening.is_stale or is_cut


def _plan_read(
    session: TargetSession, proposal: Proposal | None, proposed: int, screens: bool, weighs: bool
) -> SparseRead | None:
    """Return what a round reads; None is everything. Of a session that is screened, its first round reads everything,
    so that its first tokens leave at once, and those that confirm. weighs: whether such a round is to weigh what it
    reads.
    """
    if session.reader is None:
        return None
    base, announced = len(session.tokens), session.announced.get(session.key)
    selection = announced if proposal is not None and session.next_round.sparse else None
    everything = session.screening is not None and not screens
    read = session.reader.read(selection, base, base + proposed, everything, weighs)
    if read is not None and session.reads_wanted:
        read.report_blocks = True
    return read
