"""How rounds are made: what is chosen by which figures, and what that costs on a machine whose costs are given."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specahead.engine.steps.rounds.requests import gammas
from target_service.acceptance import Acceptance
from target_service.controller import FIRST_PAUSE, MARGIN, ODD_ROUNDS, PLAIN_MARGIN, Controller, Pace, RoundSeen, choose
from target_service.round_costs import PLAIN, SETTLED, STALE, TRIED_IN, Choice, Load, RoundCosts, sessions_of

CHOICES = [PLAIN, *(Choice(gamma, sparse) for gamma in (1, 2, 4) for sparse in (False, True))]
LOAD = (1, 10)


@dataclass
class Machine:
    """A target with one load, on virtual time: all its sessions go round by round, each as the controller says.

    plain, dense, sparse: seconds of a round's step, by how it is made. a_pass: of the draft, γ + 1 of which a drafted
    round waits for. chance: of a drafted token to be accepted, given how many tokens were generated. now: of all
    sessions together.
    """

    plain: float
    dense: float
    sparse: float
    a_pass: float
    chance: Callable[[int], float]
    announces: bool = False
    most: int = 4
    adaptive: bool = True
    sessions: int = 1
    noise: float = 0.0
    random: Random = field(default_factory=lambda: Random(1))
    now: float = 0.0
    drafted: int = 0
    kinds: list[Choice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self.load = self.sessions.bit_length(), 10
        self.controller = Controller(self.most, self.adaptive, self.counters)

    def seconds(self, kind: Choice) -> float:
        """What a round takes."""
        step = self.plain if not kind.gamma else self.sparse if kind.sparse else self.dense
        drafting = (kind.gamma + 1) * self.a_pass if kind.gamma else 0.0
        return (step + drafting) * self.random.uniform(1 - self.noise, 1 + self.noise)

    def generate(self, tokens: int) -> float:
        """Generate so many tokens in each session, and return how many times as fast that was as plain decoding."""
        began, first = self.now, 100
        paces = [self.controller.first_pace(first, self.announces) for _ in range(self.sessions)]
        committed = [first] * self.sessions
        while min(committed) < first + tokens:
            others = Counter(pace.kind for pace in paces if pace.kind)
            kinds = [self.controller.effective(pace, done) for pace, done in zip(paces, committed, strict=True)]
            spent = [self.seconds(kind) for kind in kinds]
            for i, kind in enumerate(kinds):
                chance = self.chance(committed[i] - first)
                accepted = next((n for n in range(kind.gamma) if self.random.random() >= chance), kind.gamma)
                committed[i] += accepted + 1
                drafting, step = (kind.gamma + 1) * self.a_pass, self.seconds(Choice(kind.gamma, kind.sparse))
                seen = RoundSeen(kind, accepted, committed[i], spent[i], drafting, step - drafting, self.announces)
                paces[i] = self.controller.after_round(paces[i], seen, self.load, others)
                self.drafted += kind.gamma
            self.now += sum(spent) / self.sessions
            self.kinds.append(kinds[0])
        generated = sum(committed) / self.sessions - first
        return generated * self.plain / (self.now - began)


def test_a_step_of_many_sessions_is_decided_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a decision takes grows with all that is known, so the rounds of a step share one."""
    machine = Machine(plain=1.0, dense=1.1, sparse=1.1, a_pass=0.05, chance=lambda _: 0.8, sessions=16)
    decided: list[Load] = []
    decide = Controller._decide_for_all

    def count(controller: Controller, load: Load, announces: bool) -> None:
        decided.append(load)
        decide(controller, load, announces)

    monkeypatch.setattr(Controller, "_decide_for_all", count)
    machine.generate(200)
    # In the first step no session is known to be beside another.
    assert 0.25 * len(machine.kinds) < len(decided) <= len(machine.kinds) + machine.sessions


rates = st.dictionaries(st.sampled_from(CHOICES), st.floats(0.1, 1000), min_size=1)


@given(st.sampled_from(CHOICES), rates)
def test_what_is_chosen_is_never_slower_by_the_figures_there_are(present: Choice, known: dict[Choice, float]) -> None:
    chosen = choose(present, known)
    if present not in known:
        assert chosen == present
        return
    assert known[chosen] >= known[present]
    assert known[chosen] * (1 + MARGIN) >= max(known.values())
    assert known[chosen] * (1 + PLAIN_MARGIN) >= known.get(PLAIN, 0.0)
    if chosen not in (present, PLAIN):  # no change for little
        assert known[chosen] > known[present] * (1 + MARGIN)
    assert choose(chosen, known) == chosen


def test_the_numbers_of_tokens_to_draft() -> None:
    assert [gammas(most) for most in (1, 3, 4, 6)] == [[1], [1, 2, 3], [1, 2, 4], [1, 2, 4, 6]]


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 4))
def test_chances_are_shares_and_more_drafted_tokens_never_promise_fewer(rounds: list[int], proposed: int) -> None:
    known = Acceptance.assumed(4)
    for accepted in rounds:
        known = known.after_round(proposed, min(accepted, proposed))
    assert all(0 <= chance <= 1 for chance in known.chances)
    assert known.tokens(0) == 1 <= known.tokens(1) <= known.tokens(2) <= known.tokens(4) <= 5


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 0.95])
def test_chances_come_near_what_they_are(chance: float) -> None:
    random, known = Random(3), Acceptance.assumed(2)
    seen = []
    for number in range(400):
        known = known.after_round(2, next((n for n in range(2) if random.random() >= chance), 2))
        seen += [known.chances[0]] if number >= 40 else []
    assert sum(seen) / len(seen) == pytest.approx(chance, abs=0.06)


def test_tokens_that_are_not_drafted_are_taken_for_such_as_the_last_that_are() -> None:
    """So a round of few tokens tells whether more would pay."""
    known = Acceptance.assumed(4)
    for _ in range(100):
        known = known.after_round(4, 0)
    assert known.chances[0] < 0.1
    for _ in range(300):
        known = known.after_round(1, 1)
    assert all(chance > 0.8 for chance in known.chances) and known.judged[1] == 0


def test_proposed_tokens_that_were_not_judged_say_nothing() -> None:
    """Those for which there was no room beside held tokens are neither accepted nor rejected."""
    before = Acceptance.assumed(4)
    after = before.after_round(4, 2, left_out=2)
    assert after.judged == (1, 1, 0, 0)
    assert after.chances[1] > before.chances[1] and after.chances[2:] == before.chances[2:]
    assert before.after_round(4, 2).judged == (1, 1, 1, 0)


def note_enough(costs: RoundCosts, load: Load, choice: Choice, seconds: float, drafting: float, step: float) -> None:
    """Take note of just as many rounds as a figure needs to count."""
    for _ in range(SETTLED * sessions_of(load) + 1):
        costs.add(load, choice, seconds, drafting, step)


def test_costs_of_what_was_not_measured_follow_from_the_passes_of_the_draft() -> None:
    costs = RoundCosts()
    assert costs.seconds(LOAD, Choice(4)) is None
    for _ in range(SETTLED):
        costs.add(LOAD, Choice(4), 0.020, 0.010, 0.008)
    assert costs.seconds(LOAD, Choice(4)) is None  # these may have been held up
    costs.add(LOAD, Choice(4), 0.020, 0.010, 0.008)
    assert costs.seconds(LOAD, Choice(4)) == pytest.approx(0.020)
    assert costs.seconds(LOAD, Choice(2)) == pytest.approx(0.016)
    assert costs.seconds(LOAD, Choice(2, sparse=True)) is costs.seconds(LOAD, PLAIN) is None
    assert costs.least_plain_seconds(LOAD) == pytest.approx(0.6 * 0.008)
    assert costs.seconds((2, 10), Choice(4)) is None


def test_a_figure_that_is_not_renewed_is_forgotten_and_an_outlier_counts_little() -> None:
    costs = RoundCosts()
    note_enough(costs, LOAD, PLAIN, 0.010, 0.0, 0.010)
    for _ in range(STALE - 1):
        costs.add(LOAD, Choice(4), 0.020, 0.010, 0.008)
    assert costs.rounds(LOAD, PLAIN) == SETTLED + 1
    costs.add(LOAD, Choice(4), 10.0, 0.010, 0.008)
    assert costs.rounds(LOAD, PLAIN) == 0 and costs.seconds(LOAD, PLAIN) is None
    assert costs.seconds(LOAD, Choice(4)) == pytest.approx(0.020 * (1 + 2 / 16))


def test_first_rounds_in_which_a_graph_was_captured_are_no_figure() -> None:
    """All sessions waited for it in the same step, and one by one in the next."""
    costs, load = RoundCosts(), (4, 19)  # 8 sessions
    for seconds in (*[2.2] * 8, *[0.3] * 4, *[0.013] * 20):
        costs.add(load, Choice(4), seconds, 0.006, 0.1 * seconds)
    assert costs.seconds(load, Choice(4)) == pytest.approx(0.013)
    assert costs.rounds(load, Choice(4)) == 20
    costs.add(load, Choice(4), 0.004, 0.006, 0.0013)  # once settled, one that is quick says nothing of the others
    assert costs.rounds(load, Choice(4)) == 21


def test_a_figure_is_forgotten_the_later_the_more_trying_it_again_costs() -> None:
    load: Load = (6, 16)  # 32 sessions
    costs = RoundCosts()
    note_enough(costs, load, Choice(4), 0.040, 0.010, 0.010)
    for _ in range(2 * STALE):
        costs.add(load, PLAIN, 0.010, 0.0, 0.010)
    assert costs.rounds(load, Choice(4))  # four times as long: six rounds of each cost 24 plain ones
    for _ in range(TRIED_IN * 32 * 4):
        costs.add(load, PLAIN, 0.010, 0.0, 0.010)
    assert costs.rounds(load, Choice(4)) == 0


def test_a_figure_counts_rounds_of_all_sessions_alike() -> None:
    """A step whose 32 rounds took long is one of many, not as many as 32."""
    costs, load = RoundCosts(), (6, 16)
    for seconds in [*[0.010] * 320, *[0.020] * 32]:
        costs.add(load, PLAIN, seconds, 0.0, seconds)
    assert 0.0105 < (costs.seconds(load, PLAIN) or 0) < 0.0111


def test_what_is_not_known_at_a_load_is_estimated_by_one_beside_it() -> None:
    costs = RoundCosts()
    note_enough(costs, (6, 16), PLAIN, 0.010, 0.0, 0.010)
    note_enough(costs, (6, 16), Choice(4), 0.030, 0.010, 0.010)
    assert costs.estimate((5, 16), Choice(4)) is None  # nothing is known there that says how they differ
    note_enough(costs, (5, 16), PLAIN, 0.008, 0.0, 0.008)
    assert costs.estimate((5, 16), Choice(4)) == pytest.approx(0.024)
    assert costs.estimate((5, 15), Choice(4)) is costs.estimate((3, 16), Choice(4)) is None
    note_enough(costs, (5, 16), Choice(4), 0.020, 0.010, 0.010)
    assert costs.estimate((5, 16), Choice(4)) == pytest.approx(0.020)


def test_a_round_with_alternatives_is_expected_to_commit_more() -> None:
    """By hand: half of the tokens are accepted, and of those rejected among the first two half have a right one."""
    known = Acceptance((0.5, 0.5, 0.5), (9, 9, 9))
    assert known.tokens(3) == 1 + 0.5 + 0.25 + 0.125
    assert known.tokens(3, beside=2, right=0.5) == known.tokens(3) + 0.5 * (0.5 + 0.25)
    assert known.tokens(1, beside=2, right=0.5) == known.tokens(1) + 0.25


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_alternatives_count_by_how_often_they_run_and_are_right(share: float) -> None:
    """Of rounds that reject their first token; what was drafted is no better for it."""
    controller, rng = Controller(4, True, Counter(), beside=lambda gamma: 3), random.Random(0)
    pace = controller.first_pace(100, announces=False)
    for _ in range(400):
        right = rng.random() < share
        seen = RoundSeen(Choice(4), int(right), 101, None, 0.1, 1.0, False, alternative=right)
        pace = controller.after_round(pace, seen, LOAD, Counter({Choice(4): 1}))
    assert pace.acceptance.chances[0] < 0.01
    assert controller._tokens(pace.acceptance, 4) == pytest.approx(1 + share, abs=0.1)


def test_a_session_begins_as_the_others_go_on_and_drafted_where_nothing_is_known() -> None:
    controller = Controller(4, True, Counter())
    assert not controller.first_pace(100, announces=False).is_paused(100)
    note_enough(controller.costs, LOAD, PLAIN, 1.0, 0.0, 1.0)
    note_enough(controller.costs, LOAD, Choice(4), 4.0, 1.0, 1.0)
    seen = RoundSeen(Choice(4), 0, 101, 4.0, 1.0, 1.0, False)
    paces = [controller.first_pace(100, announces=False) for _ in range(2)]
    paused = controller.after_round(paces[0], seen, LOAD, Counter({Choice(4): 2}))
    assert paused.is_paused(101) and not paused.alone
    begun = controller.first_pace(100, announces=False)
    assert begun.is_paused(100) and not begun.alone
    assert not controller.first_pace(100, announces=True).is_paused(100)  # of these nothing is decided yet


def test_sessions_go_without_a_draft_together_and_draft_again_together() -> None:
    controller = Controller(4, True, Counter())

    def after(pace: Pace, kind: Choice) -> Pace:
        seen = RoundSeen(kind, kind.gamma, 101, 1.0, 0.1, 1.0, False)
        return controller.after_round(pace, seen, LOAD, Counter({kind: 2}))

    note_enough(controller.costs, LOAD, PLAIN, 1.0, 0.0, 1.0)
    note_enough(controller.costs, LOAD, Choice(4), 9.0, 1.0, 1.0)
    paces = [after(controller.first_pace(100, announces=False), Choice(4)) for _ in range(3)]
    assert all(pace.is_paused(101) for pace in paces)
    paces = [after(pace, PLAIN) for pace in paces]
    assert all(pace.is_paused(101 + FIRST_PAUSE - 1) for pace in paces)  # it lasts on
    for _ in range(200):
        controller.costs.add(LOAD, Choice(4), 1.0, 0.1, 1.0)
    paces = [after(pace, PLAIN) for pace in paces]
    assert not any(pace.is_paused(101) for pace in paces)


def test_a_session_that_differs_from_the_others_decides_by_itself() -> None:
    controller = Controller(4, True, Counter())
    note_enough(controller.costs, LOAD, PLAIN, 1.0, 0.0, 1.0)
    note_enough(controller.costs, LOAD, Choice(4), 2.0, 0.1, 1.0)
    others = Counter({Choice(4): 8})
    odd, usual = (controller.first_pace(100, announces=False) for _ in range(2))
    for _ in range(3 * ODD_ROUNDS):
        for _ in range(7):
            usual = controller.after_round(usual, RoundSeen(Choice(4), 4, 101, None, 0.1, 1.0, False), LOAD, others)
        if not odd.is_paused(101):
            odd = controller.after_round(odd, RoundSeen(Choice(4), 0, 101, None, 0.1, 1.0, False), LOAD, others)
    assert not usual.is_paused(101)
    assert odd.is_paused(101) and odd.alone


# On a machine.


def test_a_draft_that_is_of_no_use_is_left_out_after_few_rounds() -> None:
    """One token of 183 was accepted where 48 were generated: that was SmolLM2-135M with a poor draft."""
    machine = Machine(0.010, 0.011, 0.011, 0.002, lambda place: 1 / 183)
    machine.generate(48)
    assert machine.drafted <= 32
    fixed = Machine(0.010, 0.011, 0.011, 0.002, lambda place: 1 / 183, adaptive=False)
    fixed.generate(48)
    assert fixed.drafted <= 80
    machine = Machine(0.010, 0.011, 0.011, 0.002, lambda place: 1 / 183)
    assert machine.generate(2000) >= 0.98
    assert machine.controller.first_pace(100, announces=False).is_paused(100)  # the next begins as this one ended
    assert machine.generate(2000) >= 0.98


@settings(max_examples=25)
@given(
    st.floats(0.0, 0.95),
    st.floats(0.02, 0.4),
    st.floats(1.0, 1.4),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([1, 4]),
    st.integers(0, 1000),
)
def test_it_is_never_slower_than_plain_decoding(
    chance: float, a_pass: float, dense: float, most: int, sessions: int, seed: int
) -> None:
    """Whatever the draft costs and is worth; and it comes near what is the fastest."""
    machine = Machine(
        1.0, dense, dense, a_pass, lambda place: chance, most=most, sessions=sessions, noise=0.05, random=Random(seed)
    )
    assert machine.generate(2000) >= 0.97
    fastest = max(
        sum(chance**i for i in range(gamma + 1)) / (dense + (gamma + 1) * a_pass * (gamma > 0) if gamma else 1)
        for gamma in [0, *gammas(most)]
    )
    assert machine.generate(2000) >= max(0.98, 0.85 * fastest)


@pytest.mark.parametrize(("dense", "sparse"), [(3.0, 1.0), (1.0, 1.3)])
def test_a_sparse_step_is_chosen_where_it_is_faster(dense: float, sparse: float) -> None:
    machine = Machine(dense, dense * 1.05, sparse, 0.05, lambda place: 0.8, announces=True, noise=0.05)
    machine.generate(3000)
    late = Counter(kind.sparse for kind in machine.kinds[-200:])
    assert late[sparse < dense] > 180


def test_a_draft_that_is_far_too_slow_costs_a_hundredth_at_most() -> None:
    machine = Machine(1.0, 1.2, 1.2, 2.5, lambda place: 0.8)
    machine.generate(1000)
    assert machine.generate(5000) >= 0.98


def test_it_follows_an_acceptance_that_changes_within_few_rounds() -> None:
    """From of no use to good at the 1,000th token, and back at the 3,000th."""
    machine = Machine(1.0, 1.1, 1.1, 0.1, lambda place: 0.9 if 1000 <= place < 3000 else 0.02)
    machine.generate(1000)
    assert Counter(kind.gamma for kind in machine.kinds[-100:])[0] > 80
    machine = Machine(1.0, 1.1, 1.1, 0.1, lambda place: 0.9 if 1000 <= place < 3000 else 0.02)
    machine.generate(5000)
    by_gamma = Counter(kind.gamma for kind in machine.kinds)
    assert by_gamma[4] > 300  # 2,000 tokens take 490 rounds, and a pause lasts up to 512 tokens
    assert Counter(kind.gamma for kind in machine.kinds[-500:])[0] > 450


def test_one_of_the_sessions_that_rest_speaks_for_all_in_a_step() -> None:
    """Their rounds count as if each had spoken. One that pauses alone, and all while something is tried, speak."""
    controller, load = Controller(4, True, Counter()), (3, 10)
    sessions = sessions_of(load)
    controller._plain[False] = True
    pace = replace(controller.first_pace(100, False), kind=PLAIN)
    seen, others = RoundSeen(PLAIN, 0, 101, 1.0, 0.0, 1.0, False), Counter({PLAIN: sessions})
    spoke = []
    for _ in range(5 * sessions):
        speaks = not controller.goes_on_resting(pace, False)
        if speaks:
            pace = controller.after_round(pace, seen, load, others)
        spoke.append(speaks)
    assert spoke == [True, *[False] * (sessions - 1)] * 5
    assert controller.costs.rounds(load, PLAIN) == 1 + 4 * sessions
    assert controller._rested[False] == pytest.approx(4 + 1 / sessions)
    assert not controller.goes_on_resting(pace.paused(101), False)
    controller.probe = Choice(4)
    assert not controller.goes_on_resting(pace, False)
