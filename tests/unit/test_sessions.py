"""Sessions from their opening to their end, on both sides; docs/architecture.md has the protocol."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.engine.kv.pages import PAGE_SIZE, pages_for
from specahead.engine.sampling.distributions import Sampling
from specahead.wire import messages as m
from target_service.policy import PLAIN, Options, Pace, Policy, Proposer, RoundPlan
from target_service.session import DraftPeer
from tests.unit.clock import Clock
from tests.unit.distributions import changed_row, chi_square, probs_of_row
from tests.unit.fake_models import PLAN, VOCAB, FakeModel, hashed
from tests.unit.world import Faults, World, prompts, totals

# Greedy outcomes


@pytest.mark.parametrize("exactness", m.Exactness)
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("agreement", [0, 3, 4])
@pytest.mark.parametrize("gamma", [1, 4])
def test_greedy_is_plain_decoding(
    clock: Clock, exactness: m.Exactness, ahead: bool, agreement: int, gamma: int
) -> None:
    """Whatever the draft proposes; what it agrees on is what is accepted."""
    model = FakeModel(ends=exactness is m.Exactness.APPROXIMATE, agreement=agreement)
    world = World(clock, gamma, model, gamma=gamma, ahead=ahead)
    world.attach()
    names = [world.open(prompt, 25, exactness=exactness) for prompt in prompts(world.rng, 4)]
    world.finish(*names)
    drafted, accepted = totals(world)
    assert drafted > 40
    if agreement == 0:
        assert accepted == 0
    elif agreement == 4:
        assert accepted == drafted
        assert not world.drafter.counters["resyncs"]
    else:
        assert 0 < accepted < drafted
    assert not world.verifier.counters["draft_timeouts"]
    assert world.drafter.counters["refused_frames"] == world.verifier.counters["refused_frames"] == 0


PENALTIES = Sampling(0.8, seed=5, frequency_penalty=0.5, repetition_penalty=1.2)


class Nearsighted(FakeModel):
    """Target and draft look back a few tokens, so that what a draft has not read makes no difference."""

    def target(self, tokens: list[int]) -> np.ndarray:
        return super().target(tokens[-6:])

    def draft(self, tokens: list[int]) -> np.ndarray:
        return super().draft(tokens[-6:])


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.9, seed=3), PENALTIES])
def test_a_draft_may_read_the_last_tokens_of_a_prompt_alone(clock: Clock, ahead: bool, sampling: Sampling) -> None:
    """It proposes what it would propose if it had read all, but for what rules count in the prompt."""
    world = World(clock, 1, Nearsighted(agreement=4), ahead=ahead, draft_reads=20, draft_context=90)
    world.attach()
    texts = [[world.rng.randrange(VOCAB) for _ in range(count)] for count in (130, 200, 300, 25)]
    names = [world.open(text, 25, sampling=sampling) for text in texts]
    world.run()
    if sampling.greedy:
        world.finish(*names)
    drafted, accepted = totals(world)
    assert drafted > 60
    assert accepted > (0.5 if sampling is PENALTIES else 0.95) * drafted


def test_a_draft_reads_a_text_that_grows_from_where_it_began(clock: Clock) -> None:
    """Each turn finds the KV of the last one, until what the draft reads is four times what it reads at least."""
    world = World(clock, 1, Nearsighted(agreement=4), draft_reads=32, draft_context=200)
    world.attach()
    text, skips, read = [3 + at % 7 for at in range(70)], [], []
    for turn in range(6):
        name = world.open(text, 4)
        while not (sessions := world.drafter.admission.sessions):
            assert world.happen()
        skips.append(sessions[0].skipped)
        read.append(len(sessions[0].tokens) - sessions[0].kv.length)
        world.run()
        world.finish(name)
        text = world.ledger.records[name].tokens + [5 + turn] * 16
    assert skips == [32, 32, 32, 32, 32, 128]
    assert all(count < 40 for count in read[1:5]), "what came since the last turn alone"


def test_work_ahead_that_is_right_is_kept(clock: Clock) -> None:
    """In lockstep a draft that agrees is a round ahead each time: no epoch passes, nothing is drafted twice."""
    world = World(clock, model=FakeModel(ends=True))
    link = world.attach()
    world.open([3] * 40, 26, exactness=m.Exactness.APPROXIMATE)
    for _ in range(300):
        for queue in (link.to_draft, link.to_target):
            while queue:
                world._deliver(link, queue)
        world.draft_side.advance(world.rng)
        while world.draft_side.dirty or world.draft_side.step:
            world.draft_side.advance(world.rng)
        while link.to_target:
            world._deliver(link, link.to_target)
        world.target_side.advance(world.rng)
    world.check_greedy("s0")
    assert [commit.at.epoch for commit in world.commits["s0"]] == [0] * 6
    assert [commit.drafted for commit in world.commits["s0"]] == [4, 4, 4, 4, 4, 1]
    assert world.drafter.counters["proposals"] == 6
    world.check_nothing_left()


class Confusing(FakeModel):
    """Where its draft errs, the target's token is the draft's second choice."""

    def draft(self, tokens: list[int]) -> np.ndarray:
        logits = self.target(tokens).copy()
        if hashed(self.view(tokens), salt=1) % 4 >= self.agreement:
            first, second = np.argsort(-logits)[:2]
            logits[[first, second]] = logits[[second, first]]
        return logits


def test_more_branches_meet_more_verdicts(clock: Clock) -> None:
    foreseen = []
    for branches in (1, 4, 16):
        shares = []
        for seed in range(4):
            world = World(clock, seed, Confusing(agreement=3), branches=branches)
            world.attach()
            names = [world.open([seed, i] * 20, 60) for i in range(3)]
            world.finish(*names)
            counted = world.drafter.counters
            shares.append(counted["met_verdicts"] / max(1, counted["overlapped_verdicts"]))
            assert counted["met_verdicts"] >= world.verifier.counters["foreseen_rounds"]
        foreseen.append(sum(shares) / len(shares))
    assert foreseen[0] + 0.1 < foreseen[1] < foreseen[2]
    assert foreseen[2] > 0.6


def test_without_a_draft_the_target_decodes_plainly(clock: Clock) -> None:
    world = World(clock, 3)
    names = [world.open(prompt, 12) for prompt in prompts(world.rng, 3)]
    world.finish()
    for name in names:
        world.check_greedy(name)
        assert [len(commit.tokens) for commit in world.commits[name]] == [1] * 12
    assert clock.now == 0  # no one was waited for


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 5, 6, 11])
@pytest.mark.parametrize("agreement", [3, 4])
def test_max_tokens_cut_exactly(clock: Clock, max_tokens: int, agreement: int) -> None:
    for ahead in (True, False):
        world = World(clock, max_tokens, FakeModel(agreement=agreement), ahead=ahead)
        world.attach()
        name = world.open([5] * 20, max_tokens)
        world.finish(name)
        assert len(world.ledger.records[name].generated) == max_tokens
        assert world.commits[name][-1].finish_reason is m.FinishReason.LENGTH


@pytest.mark.parametrize("place", range(0, 12, 2))
@pytest.mark.parametrize("agreement", [3, 4])
def test_stop_tokens_cut_exactly(clock: Clock, place: int, agreement: int) -> None:
    """Wherever in a round one falls; it is the last token, and nothing that was accepted behind it counts."""
    model = FakeModel(agreement=agreement)
    prompt = [9, place]
    generated = model.plain(prompt, 12, [])[0][2:]
    stop = [generated[place], VOCAB - 1]
    world = World(clock, place, model)
    world.attach()
    name = world.open(prompt, 40, stop=stop)
    world.finish(name)
    record = world.ledger.records[name]
    assert record.generated == generated[: generated.index(generated[place]) + 1]
    assert record.finish_reason is m.FinishReason.STOP
    assert all(commit.accepted <= len(commit.tokens) for commit in world.commits[name])


@pytest.mark.parametrize("seed", range(3))
def test_a_session_opened_again_goes_on_where_it_stood(clock: Clock, seed: int) -> None:
    world = World(clock, seed, FakeModel(agreement=3))
    world.attach()
    prompt = [seed] * 30
    whole = world.model.plain(prompt, 20, [])[0]
    name = world.open(prompt, 20, done=whole[30:41])
    world.finish()
    assert world.ledger.records[name].tokens == whole
    assert world.commits[name][0].at.base == 41


@pytest.mark.parametrize("length", [31, 32, 33, 48])
def test_a_prompt_that_was_read_before_is_not_read_again(clock: Clock, length: int) -> None:
    """Both sides reuse its whole pages; the first round runs its last token."""
    world = World(clock, length)
    world.attach()
    prompt = [length % VOCAB] * length
    first = world.open(prompt, 20)
    world.run()
    world.check_greedy(first)
    covered = (length - 1) // PAGE_SIZE * PAGE_SIZE
    again = world.open(prompt, 20)
    world.verifier.plan_step()
    (link,) = world.links
    while link.to_draft:
        world._deliver(link, link.to_draft)
    world.drafter._apply_inbox()
    assert world.sessions[again].kv.length == covered
    assert link.draft_end.sessions[again].kv.length == covered
    world.finish(again)


@pytest.mark.parametrize("exactness", m.Exactness)
def test_only_kv_that_was_computed_densely_is_offered(clock: Clock, exactness: m.Exactness) -> None:
    """To a later session with the same text: an approximate session offers its prompt, an exact one all."""
    world = World(clock, 6, FakeModel(ends=True))
    world.attach()
    name = world.open([5] * 170, 60, exactness=exactness)
    world.finish()
    assert world.offered(name) == (160 if exactness is m.Exactness.APPROXIMATE else 224)


# Sampled outcomes


RULED = {
    "plain": Sampling(0.8, 0.95),
    "top_k": Sampling(1.2, 1.0, top_k=6),
    "min_p": Sampling(1.2, 1.0, min_p=0.1),
    "presence": Sampling(1.0, 0.95, presence_penalty=1.5),
    "frequency": Sampling(1.0, 0.95, frequency_penalty=1.5),
    "repetition": Sampling(1.0, 0.95, repetition_penalty=5.0),
    "bias": Sampling(0.8, 0.95, logit_bias={8: 2.5, 26: -100.0}),
    "min_tokens": Sampling(1.0, 0.95, min_tokens=2),
    "all": Sampling(1.1, 0.9, 0, 12, 0.02, 0.5, 0.4, 1.2, {8: 1.5}, 2),
}
PROMPT, STOPS = [7, 30, 6, 15, 26], [11, 12, 13, 14]


@pytest.mark.parametrize("sampling", [replace(each, temperature=0.0) for each in RULED.values()], ids=RULED)
def test_greedy_with_rules_is_plain_decoding_with_them(clock: Clock, sampling: Sampling) -> None:
    """Whatever a draft proposes, also where the target is opened again in the middle."""
    model = FakeModel(agreement=2)
    world = World(clock, 6, model, gamma=4, branches=3)
    world.attach()
    rng = random.Random(3)
    for prompt in prompts(rng, 6):
        done = None
        for _ in range(2):
            name = world.open(prompt, 25, sampling, STOPS, done=done)
            world.finish()
            tokens, record = list(prompt), world.ledger.records[name]
            while len(tokens) < len(prompt) + 25 and not (len(tokens) > len(prompt) and tokens[-1] in STOPS):
                logits = changed_row(model.target(tokens), tokens, len(prompt), sampling, STOPS)
                tokens.append(int(logits.argmax()))
            assert record.tokens == tokens
            done = tokens[len(prompt) : -1][:7]


def test_log_probabilities_are_of_the_targets_own_distribution(clock: Clock) -> None:
    """Each committed token has one, whether it was proposed or not, and so have the prompt's, which come in parts."""
    model = FakeModel(agreement=2)
    world = World(clock, 7, model, gamma=3, prefill_chunk=24)
    world.attach()
    rng = random.Random(4)
    texts = prompts(rng, 6)
    world.open(texts[0], 1)
    world.run()  # a prefix that is known is read again for the log probabilities of its tokens
    names = [
        world.open(text, 9, Sampling(0.9, 0.9, seed=i), logprobs=i % 3, echo=i > 1) for i, text in enumerate(texts)
    ]
    world.run()
    for name, echo in zip(names, [False, False, True, True, True, True], strict=True):
        record = world.ledger.records[name]
        of_prompt, told = ([each for c in world.commits[name] for each in getattr(c, f)] for f in LOGPROBS)
        assert len(of_prompt) == (record.prompt_tokens - 1 if echo else 0)
        first = 1 if echo else record.prompt_tokens
        assert len(of_prompt + told) == len(record.tokens) - first
        for at, found in enumerate(of_prompt + told, first):
            expected = torch.from_numpy(model.target(record.tokens[:at])).double().log_softmax(-1)
            assert found.logprob == pytest.approx(float(expected[record.tokens[at]]), abs=1e-5)
            best = expected.topk(record.asked.alternatives)
            assert found.top_ids == best.indices.tolist()
            assert found.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


LOGPROBS = "prompt_logprobs", "logprobs"


def check_distribution(
    world: World, names: list[str], prompt: list[int], sampling: Sampling, first: int | None = None
) -> None:
    """The first tokens have the target's distribution, and the second ones behind one of them: `first`, or the most
    frequent.
    """
    outcomes = [world.ledger.records[name].generated for name in names]
    if first is None:
        ((first, _),) = Counter(outcome[0] for outcome in outcomes).most_common(1)
    for start in ((), (first,)):
        counts = Counter(o[len(start)] for o in outcomes if tuple(o[: len(start)]) == start and len(o) > len(start))
        tokens = [*prompt, *start]
        logits = changed_row(world.model.target(tokens), tokens, len(prompt), sampling, STOPS)
        assert chi_square(counts, probs_of_row(logits, sampling)) > 1e-4


# Drafts that come and go, and links that misbehave


@pytest.mark.parametrize("seed", range(4))
def test_sparse_sessions_outlive_their_drafts(clock: Clock, seed: int) -> None:
    """They read everything while there is no draft. What is always read is all that this model looks at."""
    world = World(clock, seed, FakeModel(ends=True, agreement=3), replace(PLAN, group_size=32))
    name = world.open([3] * 150, 60, exactness=m.Exactness.APPROXIMATE)
    world.attach()

    def until_it_says_more(speculating: bool) -> None:
        before = len(world.commits[name])
        while not any((commit.drafted > 0) == speculating for commit in world.commits[name][before:]):
            assert world.happen()
            assert not world.ended(name)

    for _ in range(2):
        until_it_says_more(speculating=True)
        world.detach(world.links[0])
        until_it_says_more(speculating=False)
        world.attach()
    until_it_says_more(speculating=True)
    world.finish(name)
    plain = [commit for commit in world.commits[name] if not commit.drafted]
    drafted = [commit for commit in world.commits[name] if commit.drafted]
    assert any(commit.figures.kv_tokens_read < commit.figures.kv_tokens_total for commit in drafted)
    assert all(commit.figures.kv_tokens_read == commit.figures.kv_tokens_total for commit in plain)


def test_a_draft_that_stays_silent_is_waited_for_once(clock: Clock) -> None:
    world = World(clock)
    silent = DraftPeer("silent", lambda event: None)
    world.verifier.protocol.attach(silent)
    name = world.open([1] * 20, 10)
    world.run()
    world.check_greedy(name)
    assert clock.now == pytest.approx(1.0)
    assert world.verifier.counters["draft_timeouts"] == 1
    assert world.verifier.counters["plain_rounds"] == 10


def test_a_session_is_drafted_again_after_a_timeout(clock: Clock) -> None:
    world = World(clock, 2)
    link = world.attach()
    name = world.open([1] * 20, 60)
    for _ in range(40):  # the draft hears nothing at first
        if world.target_side.dirty or world.target_side.step:
            world.target_side.advance(world.rng)
        else:
            clock.now += 1.5
            world.target_side.dirty = True
    assert 0 < len(world.commits[name]) < 30
    assert link.to_draft
    world.finish(name)
    assert world.commits[name][-1].drafted


def test_sessions_without_room_at_the_draft_are_decoded_plainly_until_there_is(clock: Clock) -> None:
    """One that finds none when it begins, and one whose room is needed by an older one."""
    for first_tokens, length in ((20, 70), (60, 20)):
        world = World(clock, 4, draft_pages=pages_for(20 + 80 + 10))
        world.attach()
        first, second = world.open([1] * 20, first_tokens), world.open([2] * length, 80)
        world.finish(first, second)
        assert world.drafter.counters["declined_sessions"] >= 1
        rounds = ["d" if commit.drafted else "p" for commit in world.commits[second]]
        assert any(commit.drafted for commit in world.commits[first]) and "pd" in "".join(rounds)
        assert rounds[:2] == ["p", "p" if length == 70 else "d"]


def test_a_session_that_is_too_long_for_the_draft_is_decoded_plainly(clock: Clock) -> None:
    world = World(clock, 4, draft_context=50)
    link = world.attach()
    begun: Counter[str] = Counter()
    send = link.target_end.send

    def count(event: m.TargetEvent) -> None:
        if isinstance(event, m.Begin):
            begun[event.at.session] += 1
        send(event)

    link.target_end.send = count
    long, short = world.open([1] * 40, 20), world.open([2] * 20, 20)
    world.finish(long, short)
    assert not any(commit.drafted for commit in world.commits[long])
    assert any(commit.drafted for commit in world.commits[short])
    assert begun == {long: 1, short: 1}


@pytest.mark.parametrize("seed", range(8))
def test_a_session_id_can_be_used_again(clock: Clock, seed: int) -> None:
    """By a client for its next request, or when a session is opened again; at once, however the last one ended.

    Frames of the last one that are still on their way are stale: they neither count nor look dishonest.
    """
    world = World(clock, seed, FakeModel(ends=True, agreement=3 + seed % 2))
    world.attach()
    rng = random.Random(seed)
    for _ in range(4):
        stop = rng.sample(range(VOCAB), 6)
        prompt = [rng.randrange(VOCAB)] * rng.choice([20, 23, 40])
        name = world.open(prompt, 30, stop=stop, exactness=m.Exactness.APPROXIMATE, name="mine")
        moment = rng.choice([10, 20, 200])
        while any(name == session.id for session in world.verifier.admission.everyone()):
            world.happen()
            moment -= 1
            if moment == 0:
                world.abort(name)
        if moment > 0:
            world.check_greedy(name)
            last = world.commits[name]
            assert len(last) < 3 or any(commit.drafted for commit in last)
        world.ledger.close(name)
    assert not world.verifier.counters["draft_timeouts"]
    world.finish()


# Drafts that are of no use


def test_a_draft_that_is_never_right_is_left_out_and_tried_again(clock: Clock) -> None:
    """It has nothing to do meanwhile; tokens are those of plain decoding."""
    world = World(clock, 1, FakeModel(agreement=0))
    link = world.attach()
    name = world.open([1] * 20, 150)
    idle = 0
    while world.happen():
        session = world.sessions.get(name)
        if session is not None and session.is_paused and not link.to_draft and not world.draft_side.dirty:
            admission = world.drafter.admission
            assert world.drafter.session_count == len(admission.waiting) == 0
            assert not session.draft.awaited
            idle += 1
    world.check_greedy(name)
    assert idle > 0
    rounds = ["d" if commit.drafted else "p" for commit in world.commits[name]]
    drafted = [len(run) for run in "".join(rounds).split("p") if run]
    assert drafted[:3] == [9, 4, 4]
    plain = [len(run) for run in "".join(rounds).split("d") if run]
    assert plain[0] == 1 and plain[1] >= 16 and plain[2] >= 32, "the first token waits for no draft"
    assert world.verifier.counters["drafting_pauses"] in (3, 4)  # how soon each begins is a matter of the schedule
    totals = world.ledger.records[name].totals
    assert (totals.rounds, totals.plain_rounds) == (sum(drafted), sum(plain))
    assert world.verifier.counters["draft_timeouts"] == 0
    world.check_nothing_left()


class Whimsical(Policy):
    """Chooses by chance: how many tokens are drafted, whether announcements are read, and pauses."""

    def __init__(self, most: int, rng: random.Random, like: Policy) -> None:
        super().__init__(Options(Proposer.DRAFT, (most,), announced=True), like.costs, like.counters)
        self.rng, self.chosen = rng, set[RoundPlan]()

    def plan_of(self, pace: Pace, committed: int, announces: bool) -> RoundPlan:
        if self.rng.random() < 0.03:
            pace.pause.begin(committed)
        if pace.pause.lasts(committed):
            return PLAIN
        gamma, sparse = self.rng.randint(1, self.options.gammas[0]), self.rng.random() < 0.5
        made = RoundPlan(Proposer.DRAFT, gamma, sparse and announces)
        chosen = self.rng.choice([pace.next_round, made, made, PLAIN])
        self.chosen.add(chosen)
        return chosen


@settings(max_examples=20)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 4, 7]),
    st.sampled_from([1, 3, 8]),
    st.booleans(),
    st.sampled_from([0, 0, 6]),
    st.sampled_from([0, 10]),
)
def test_greedy_is_plain_decoding_whatever_is_chosen(
    clock: Clock, seed: int, gamma: int, branches: int, ahead: bool, faults: int, reads: int
) -> None:
    """Rounds of any length, announced or not, with pauses and trials, by chance; also where the link misbehaves."""
    model = FakeModel(ends=True, agreement=3)
    wrong = Faults(faults, jumps=faults // 3)
    how = {"gamma": gamma, "branches": branches, "ahead": ahead, "draft_reads": reads}
    world = World(clock, seed, model, faults=wrong, **how)
    whims = Whimsical(gamma, world.rng, world.verifier.policy)
    world.verifier.pacing.policy = whims
    world.attach()
    kinds = (m.Exactness.APPROXIMATE, m.Exactness.EXACT)
    names = [world.open(p, 40, exactness=kinds[i % 2]) for i, p in enumerate(prompts(world.rng, 3))]
    world.finish(*names)
    assert all(plan.gamma <= gamma for plan in whims.chosen) and len(whims.chosen) > 1
