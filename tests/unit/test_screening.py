"""Three levels: the draft proposes, the target's sparse attention screens, its dense attention confirms."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.config import SettingsError
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.inputs import SequenceInput
from specahead.wire import messages as m
from target_service.screening import WEIGHED_EVERY
from target_service.verify_step import VerifyResult, VerifyStep
from tests.settings import target_settings
from tests.unit.clock import Clock
from tests.unit.fake_models import VOCAB, FakeModel, FakeRunner, hashed
from tests.unit.test_grammar_sessions import END, GRAMMARS, WORDS
from tests.unit.world import Faults, World, prompts


@dataclass(frozen=True)
class Screens(FakeModel):
    """Sparse attention has the dense one's best token in some quarters of all contexts, else another.

    It looks at the first block and the last token, which are read in any case.
    """

    ends: bool = True
    recent: int = 1
    screening: int = 3

    def sparse(self, tokens: list[int]) -> np.ndarray:
        agrees = hashed(self.view(tokens), salt=2) % 4 < self.screening
        return self.target(tokens) if agrees else np.roll(self.target(tokens), 2)


class ScreeningRunner(FakeRunner):
    """Notes in the values of the pages which KV a sparse pass has written."""

    def forward(self, inputs: list[SequenceInput]) -> list[Any]:
        for item in inputs:
            self.kv.grow(item.kv, item.kv.length + len(item.tokens))
            for position in range(item.kv.length, item.kv.length + len(item.tokens)):
                page, row = item.kv.pages[position // 16], position % 16
                self.kv.v_pages[0][page, :, row] = float(item.read is not None and not item.read.reads_all)
        return super().forward(inputs)

    def sparse_kv(self, pages: list[int], length: int) -> list[int]:
        """Return the positions whose KV a sparse pass has written."""
        flags = self.kv.v_pages[0].numpy()[pages, 0, :, 0].reshape(-1)[:length]
        return np.flatnonzero(flags).tolist()


@dataclass(frozen=True)
class Blurs(Screens):
    """Sparse attention has a distribution of its own in all contexts, near the dense one."""

    def sparse(self, tokens: list[int]) -> np.ndarray:
        return 0.5 * self.target(tokens) + 0.5 * np.roll(self.target(tokens), 2)


def screened(clock: Clock, seed: int, model: Screens, most: int | None = 11, **how: Any) -> World:
    world = World(clock, seed, model, hold=most, runner=ScreeningRunner, **how)
    world.target.sparse_logits = model.sparse
    return world


def check_kv(world: World) -> None:
    """All KV is dense but that of held tokens, and that of the confirmed token before them."""
    if world.target_side.step is None:
        for session in world.sessions.values():
            assert isinstance(world.target, ScreeningRunner)
            sparse = world.target.sparse_kv(session.kv.pages, session.kv.length)
            if session.screening is not None:
                assert len(session.tokens) - session.screening.confirmed <= session.screening.most
                assert all(position >= session.screening.confirmed - 1 for position in sparse)


@pytest.mark.parametrize("most", [11, None])
@pytest.mark.parametrize("screening", [0, 3, 4])
@pytest.mark.parametrize("agreement", [0, 3])
def test_greedy_is_plain_decoding_whatever_each_level_rejects(
    clock: Clock, screening: int, agreement: int, most: int | None
) -> None:
    model = Screens(agreement=agreement, screening=screening)
    world = screened(clock, 2 + screening, model, most, branches=1 + 2 * (screening % 2))
    world.attach()
    # By auto nothing is held until 16 dense rounds were seen.
    names = [world.open(prompt, 40 if most else 150) for prompt in prompts(world.rng, 3)]
    while world.happen():
        check_kv(world)
    for name in names:
        world.check_greedy(name)
    totals = [world.ledger.records[name].totals for name in names]
    counted = world.verifier.counters
    assert sum(each.screened for each in totals) == counted["screened_tokens"]
    assert sum(each.confirmed for each in totals) == counted["confirmed_tokens"]
    assert sum(each.screening_rounds for each in totals) == counted["screening_rounds"]
    if screening == 4:
        assert counted["confirmed_tokens"] == counted["screened_tokens"] > 0
    elif most:
        assert (counted["confirmed_tokens"] > 0) == (screening > 0)
        assert counted["confirmed_tokens"] < counted["screened_tokens"]
    assert world.drafter.counters["refused_frames"] == counted["refused_frames"] == 0
    world.check_nothing_left()


def test_most_rounds_are_sparse_where_all_is_accepted(clock: Clock) -> None:
    """One dense pass confirms 20 held tokens, which are 4 rounds of 5, with the next round's proposal."""
    world = screened(clock, 1, Screens(screening=4), most=20)
    world.attach()
    name = world.open([3] * 160, 151)
    world.finish(name)
    totals = world.ledger.records[name].totals
    dense = len(world.commits[name])
    assert not world.commits[name][0].screening_drafted, "the first tokens wait for no others"
    assert totals.screening_rounds > 2.5 * dense
    assert totals.confirmed == totals.screened > 90
    assert totals.kv_read_fraction < 0.95


@pytest.mark.parametrize("seed", range(3))
def test_sessions_of_a_step_confirm_together_and_every_fourth_time_weigh(clock: Clock, seed: int) -> None:
    """Where one session confirms its held tokens, no other one screens. Rounds without held tokens run beside those
    that screen and weigh the KV at no further cost: they do not count as confirmations.
    """
    world = screened(clock, seed, Screens(agreement=3, screening=3))
    kinds: dict[str, list[str]] = {}
    together = 0
    execute = world.verifier.execute

    def watched(step: VerifyStep) -> VerifyResult:
        nonlocal together
        begun = [item for item in step.rounds if len(item.session.tokens) > item.session.asked.prompt_tokens]
        if any(item.held for item in begun):
            assert not any(item.screens for item in begun)
            together += len(begun) > 1
        for item in begun:
            if item.held or (item.input.read and not item.screens):
                kind = ("weighs" if item.input.read else "confirms") if item.held else "weighs beside"
                kinds.setdefault(item.session.id, []).append(kind)
        return execute(step)

    world.attach()
    names = [world.open(prompt, 160) for prompt in prompts(world.rng, 3)]
    with patch.object(world.verifier, "execute", watched):
        world.run()
    for name in names:
        world.check_greedy(name)
    assert together > 5
    confirmations = Counter(kind for of_session in kinds.values() for kind in of_session)
    assert confirmations["confirms"] > 4 * WEIGHED_EVERY
    assert 0 < confirmations["weighs"] <= confirmations["confirms"]
    for of_session in kinds.values():
        unweighed = [len(list(run)) for kind, run in itertools.groupby(of_session) if kind == "confirms"]
        assert all(count < WEIGHED_EVERY for count in unweighed)


def test_only_steps_that_screen_wholly_run_by_the_weights_for_that(clock: Clock) -> None:
    """So that a step is one pass; what confirms runs by the target's own."""
    world = screened(clock, 1, Screens(screening=3), screening_quantization="fp8")
    world.attach()
    names = [world.open(prompt, 60) for prompt in prompts(world.rng, 3)]
    forward, kinds = world.target.forward, Counter[tuple[bool, bool]]()

    def watched(inputs: list[SequenceInput]) -> list[Any]:
        rounds = [item for item in inputs if item.drafted is not None and not item.ends_prompt]
        screen = {item.drafted.screens for item in rounds if item.drafted is not None}
        assert len({item.light for item in rounds}) <= 1
        kinds.update([(len(screen) > 1, item.light) for item in rounds])
        assert all(item.light == (screen == {True}) for item in rounds)
        return forward(inputs)

    world.target.forward = watched
    world.finish(*names)
    assert kinds[False, True] > 20 and kinds[False, False] > 5, kinds


@pytest.mark.parametrize("seed", range(2))
def test_a_step_for_which_there_is_no_room_may_cut_held_tokens_before_the_youngest_gives_way(
    clock: Clock, seed: int
) -> None:
    """The held tokens are of a session that was to confirm because the youngest had to, which then is in no step."""
    world = screened(clock, seed, Screens(agreement=3, screening=3))
    kv, refused, planned = world.target.kv, 0, 0
    reserve = kv.reserve

    def refusing(work: Any) -> bool:
        nonlocal refused, planned
        planned += len(work) > 1
        if len(work) > 1 and planned % 6 == 0:
            refused += 1
            return False
        return reserve(work)

    world.attach()
    names = [world.open(prompt, 120) for prompt in prompts(world.rng, 4)]
    with patch.object(kv, "reserve", refusing):
        while world.happen():
            check_kv(world)
    for name in names:
        world.check_greedy(name)
    assert refused > 10
    world.check_nothing_left()


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    screening=st.integers(0, 4),
    agreement=st.integers(1, 4),
    gamma=st.integers(1, 4),
    most=st.integers(5, 24),
    aborted=st.sets(st.integers(0, 4), max_size=2),
    pages=st.sampled_from([26, 40, 200]),
    faults=st.integers(0, 8),
    breaks=st.booleans(),
)
def test_whatever_happens_only_confirmed_tokens_leave(
    clock: Clock,
    seed: int,
    screening: int,
    agreement: int,
    gamma: int,
    most: int | None,
    aborted: set[int],
    pages: int,
    faults: int,
    breaks: bool,
) -> None:
    """Rejections at each level, aborts, lost drafts, misplaced frames, and sessions that give way, all mixed."""
    model = Screens(agreement=agreement, screening=screening)
    how: dict[str, Any] = {"gamma": gamma, "branches": 1 + seed % 3, "pages": pages}
    world = screened(clock, seed, model, most, faults=Faults(faults, jumps=faults), **how)
    link = world.attach()
    if breaks:
        world.script = [*[lambda: None] * 30, lambda: world.detach(link), *[lambda: None] * 20, world.attach]
    names = [world.open(prompt, 40, stop=[seed % VOCAB]) for prompt in prompts(world.rng, 5)]
    world.run_and_check_greedy(names, aborted)
    check_kv(world)
    world.check_nothing_left()


def test_log_probabilities_are_told_of_each_confirmed_token_by_dense_attention(clock: Clock) -> None:
    """Those of the prompt are told once."""
    world = screened(clock, 2, Screens(screening=3))
    world.attach()
    name = world.open([7] * 40, 30, logprobs=2, echo=True)
    world.run()
    record, told = world.ledger.records[name], []
    for commit in world.commits[name]:
        assert len(commit.logprobs) == len(commit.tokens)
        told += commit.logprobs
    assert world.verifier.counters["screened_tokens"] > 0
    for place, logprob in enumerate(told):
        logits = torch.from_numpy(world.model.target(record.tokens[: 40 + place]))
        wanted = logits.log_softmax(0)[record.generated[place]]
        assert logprob.logprob == pytest.approx(float(wanted), abs=1e-5)
    assert sum(len(commit.prompt_logprobs) for commit in world.commits[name]) == 39


RULED = [
    Sampling(0.0, presence_penalty=0.5, frequency_penalty=0.3),
    Sampling(0.0, repetition_penalty=1.4),
    Sampling(0.0, logit_bias={3: 1.0, 5: -2.0}),
    Sampling(0.0, min_tokens=12),
]


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    screening=st.integers(0, 4),
    agreement=st.integers(1, 4),
    sampling=st.sampled_from(RULED),
    follows_grammar=st.booleans(),
    breaks=st.booleans(),
)
def test_whatever_happens_rules_follow_confirmed_tokens_alone(
    clock: Clock, seed: int, screening: int, agreement: int, sampling: Sampling, follows_grammar: bool, breaks: bool
) -> None:
    """Lost drafts, misplaced frames, and sessions that give way, against two levels with nothing of that."""
    model, source = Screens(agreement=agreement, screening=screening), WORDS if follows_grammar else ""

    def said(most: int, **how: Any) -> list[list[int]]:
        world = screened(clock, seed, model, most, grammars=GRAMMARS, **how)
        link = world.attach()
        if breaks and most:
            wait = [lambda: None] * 25
            world.script = [*wait, lambda: world.detach(link), *wait, lambda: bool(world.attach())]
        prompts = ([7 + n] * 30 for n in range(4))
        names = [world.open(prompt, 40, sampling, stop=[END], grammar=source) for prompt in prompts]
        world.finish()
        return [world.ledger.records[name].generated for name in names]

    assert said(11, pages=40, branches=3, faults=Faults(6, jumps=6)) == said(0)


def test_the_target_chooses_how_many_are_drafted_too(clock: Clock) -> None:
    world = screened(clock, 1, Screens(screening=3, agreement=3), None, gamma=None, weight_tokens=10.0)
    world.attach()
    names = [world.open([3 + i] * 200, 100) for i in range(3)]
    while world.happen():
        check_kv(world)
    for name in names:
        world.check_greedy(name)
    counted = world.verifier.counters
    assert 0 < counted["confirmed_tokens"] < counted["screened_tokens"]
    assert sum(counted[f"rounds_gamma_{gamma}"] > 0 for gamma in (0, 1, 2, 4)) > 1
    world.check_nothing_left()


@pytest.mark.parametrize(("screening", "weights"), [(4, 10.0), (2, 10.0), (4, 1e6)])
def test_the_target_chooses_how_many_it_holds(clock: Clock, screening: int, weights: float) -> None:
    """As many as there is room for where all are confirmed, none where most are not, or reading KV costs nothing."""
    world = screened(clock, 1, Screens(screening=screening), most=None, weight_tokens=weights)
    world.attach()
    name = world.open([3] * 120, 370)
    world.finish(name)
    counted, held = world.verifier.counters, [each.screened for each in world.commits[name]]
    if screening == 4 and weights == 10.0:
        assert max(held) > 6 and counted["screened_tokens"] > 80
    else:
        assert counted["screened_tokens"] < 60 and not any(held[len(held) // 2 :])


@pytest.mark.parametrize("exactness", m.Exactness)
def test_what_is_confirmed_is_offered_to_later_sessions(clock: Clock, exactness: m.Exactness) -> None:
    """All KV of an exact session is dense once it ends, but for the tokens of its last round."""
    world = screened(clock, 6, Screens(screening=3))
    world.attach()
    name = world.open([5] * 170, 60, exactness=exactness)
    world.run()
    assert world.offered(name) == (160 if exactness is m.Exactness.APPROXIMATE else 224)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"draft": "self"}, "draft self, where sparse attention proposes"),
    ({"draft": "auto"}, "draft auto, where sparse attention proposes"),
    ({"draft": "none"}, "draft none, where nothing is proposed"),
    ({"gamma": None}, "a gamma of null; give both, or neither"),
    ({"hold": 4}, "from 5"),
    ({"hold": 28}, "to 27"),
    ({"hold": 8, "gamma": 30}, "null takes a gamma of at most 13"),
    ({"hold": 0, "screening_quantization": "fp8"}, "is 0: nothing is screened"),
]


@pytest.mark.parametrize(("wrong", "named"), REFUSED)
def test_settings_that_do_not_fit_are_refused_by_name(wrong: dict[str, Any], named: str) -> None:
    assert target_settings(hold=8).widest_round == 13
    by_auto = target_settings(hold=None), target_settings(hold=None, host_kv_memory=1.0)
    assert [(each.most_held, each.widest_round) for each in by_auto] == [(14, 16), (27, 32)]
    assert target_settings(hold=None, host_kv_memory=1.0, gamma=15).widest_round == 32
    assert target_settings(hold=None, gamma=14).most_held == 0  # it would not fit beside 14 tokens
    assert target_settings(hold=None, host_kv_memory=1.0, deterministic=True).widest_round == 16
    assert target_settings(hold=8, deterministic=True).widest_round == 16
    with pytest.raises(SettingsError, match=f"hold .*{named}"):
        target_settings(**{"hold": 8, **wrong})


class Circles(Screens):
    """A text that goes round in a circle, of which sparse attention now and then has another opinion."""

    def target(self, tokens: list[int]) -> np.ndarray:
        return np.eye(VOCAB, dtype=np.float32)[(tokens[-1] + (len(tokens) % 70 == 0)) % 20 + 1]

    def sparse(self, tokens: list[int]) -> np.ndarray:
        agrees = hashed(tokens, salt=2) % 8 < 2 * self.screening
        return self.target(tokens) if agrees else np.roll(self.target(tokens), 2)


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    screening=st.integers(1, 4),
    agreement=st.integers(0, 4),
    most=st.sampled_from([None, 6, 11]),
    pages=st.sampled_from([40, 200]),
    aborted=st.sets(st.integers(0, 4), max_size=2),
    faults=st.integers(0, 8),
)
def test_what_is_looked_up_first_is_judged_by_a_dense_pass(
    clock: Clock,
    seed: int,
    screening: int,
    agreement: int,
    most: int | None,
    pages: int,
    aborted: set[int],
    faults: int,
) -> None:
    """Where nothing is held, beside sessions that hold tokens; whoever leaves, gives way or is lost meanwhile."""
    model = Circles(agreement=agreement, screening=screening)
    world = screened(clock, seed, model, most, pages=pages, lookup=True, faults=Faults(faults, jumps=faults))
    world.attach()
    judged: list[bool] = []
    execute = world.verifier.execute

    def note(step: VerifyStep) -> VerifyResult:
        guessed = [item for item in step.rounds if item.is_guessed]
        judged.extend(not item.screens and not item.held for item in guessed)
        return execute(step)

    with patch.object(world.verifier, "execute", note):
        texts = ([n + i for i in range(1, 12)] for n in range(5))
        names = [world.open(text, 80) for text in texts]
        world.run_and_check_greedy(names, aborted)
    assert judged and all(judged)
    check_kv(world)
    world.check_nothing_left()


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    screening=st.integers(0, 4),
    gamma=st.integers(1, 4),
    most=st.sampled_from([None, 6, 11]),
    pages=st.sampled_from([40, 200]),
    aborted=st.sets(st.integers(0, 4), max_size=2),
)
def test_what_is_looked_up_without_a_draft_is_screened(
    clock: Clock, seed: int, screening: int, gamma: int, most: int | None, pages: int, aborted: set[int]
) -> None:
    """Sessions that repeat themselves now and then, in the same steps; some give way for room, some are aborted."""
    model = Circles(screening=screening)
    world = screened(clock, seed, model, most, gamma=gamma, pages=pages, proposer="lookup")
    execute = world.verifier.execute

    def check(step: VerifyStep) -> VerifyResult:
        for session in step.sessions:
            assert session.lookup._indexed <= session.confirmed, "what is indexed is never taken back"
        return execute(step)

    with patch.object(world.verifier, "execute", check):
        names = [world.open([n + i for i in range(1, 12)], 150) for n in range(5)]
        world.run_and_check_greedy(names, aborted)
    counted = world.verifier.counters
    assert counted["rounds"] == counted["lookup_rounds"]
    assert most is None or counted["screened_tokens"] > 50
    if screening == 4:
        assert counted["confirmed_tokens"] == counted["screened_tokens"]
    check_kv(world)
    world.check_nothing_left()
