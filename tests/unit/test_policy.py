"""Which plan is chosen by which figures, and what that costs on machines whose costs are given.

The machines run on virtual time. What a round takes on them differs from what sizes say, by random factors.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specahead.engine.steps.requests import gammas
from target_service.policy import (
    PLAIN,
    Acceptance,
    CostTable,
    Ended,
    Load,
    Measured,
    Options,
    Pace,
    Policy,
    Proposer,
    RoundKind,
    RoundPlan,
    Sizes,
    Verified,
)
from target_service.policy.choice import MOST_UNDECIDED
from target_service.policy.gains import kinds_of
from target_service.policy.lookup import Judged
from target_service.policy.reading import USUAL_ANSWER, DraftReading

FOUND = 15  # tokens that prompt lookup always finds
A_TOKEN = 3.25e-8  # seconds to read one of KV
WEIGHTS = 120_000.0  # of an 8B model, in tokens of its KV
DENSE, SPARSE, SCREENS, CONFIRMS = Verified
PLAIN_KIND = RoundKind(Proposer.NOBODY, 0, DENSE)
Factors = dict[tuple[Proposer, Verified], float]


@dataclass
class Client:
    """A session, and how much of what is proposed to it is accepted."""

    tokens: float
    chance: float
    ends: float
    announces: bool
    pace: Pace = field(default_factory=Pace)
    found: float | None = None
    """The chance of each token that prompt lookup proposes where nobody else does; None: it proposes nothing."""


@dataclass
class Machine:
    """A target on virtual time, whose sessions make their rounds all in one step."""

    policy: Policy
    true: Sizes
    """What rounds take, but for the factors."""
    factors: Factors
    random: Random
    noise: float = 0.05
    now: float = 0.0
    tokens: float = 0.0
    """Expected tokens that were generated so far."""
    plain_tokens: float = 0.0
    """Tokens that plain decoding would have generated meanwhile."""
    clients: list[Client] = field(default_factory=list)
    fixed: RoundPlan | None = None
    """What is done in place of what the policy says."""
    plans: list[tuple[float, RoundPlan]] = field(default_factory=list)

    def add(self, client: Client) -> None:
        self.clients.append(client)
        if self.fixed is not None:
            return
        self.policy.choose(self.load, beginning=1)
        client.pace.acceptance = self.policy.new_acceptance()
        client.pace.next_round = self.policy.plan_of(client.pace, int(client.tokens), client.announces)

    @property
    def load(self) -> Load:
        announcing = sum(int(each.tokens) for each in self.clients if each.announces)
        pausing = sum(each.pace.pause.lasts(int(each.tokens)) for each in self.clients)
        tokens = sum(int(each.tokens) for each in self.clients)
        guessing = sum(each.found is not None for each in self.clients)
        return Load(len(self.clients), tokens, announcing, pausing=pausing, guessing=guessing)

    def seconds(self, kind: RoundKind) -> float:
        factor = self.factors.get((kind.proposer, kind.verified), 1.0)
        return self.true.round(kind, self.load) * A_TOKEN * factor

    def rate_of(self, client: Client, plan: RoundPlan) -> float:
        """Return the tokens a second that a plan brings a session under the present load."""
        chance, proposed = client.chance, plan.gamma
        if client.found is not None and not plan.gamma:
            chance, proposed = client.found, FOUND
        return sum(chance**n for n in range(proposed + 1)) / self.seconds(kinds_of(plan, self.load)[0])

    def run(self, until: float) -> None:
        while self.now < until:
            if self.fixed is None:
                self.step()
            else:
                self.go_on(min(0.25, until - self.now), self.fixed)

    def go_on(self, seconds: float, plan: RoundPlan) -> None:
        """Make all rounds by one plan, for so long."""
        rounds = seconds / self.seconds(kinds_of(plan, self.load)[0])
        for client in self.clients:
            tokens = rounds * sum(client.chance**n for n in range(plan.gamma + 1))
            self.tokens += tokens
            client.tokens += tokens
        self.now += seconds

    def step(self) -> None:
        load = self.load
        plans = [each.pace.next_round for each in self.clients]
        drafted = max(plans, key=lambda plan: (plan.gamma, plan.sparse))
        kind = kinds_of(drafted, load)[0]
        seconds = self.seconds(kind) * self.random.uniform(1 - self.noise, 1 + self.noise)
        self.now += seconds
        self.plain_tokens += len(self.clients) * seconds / self.seconds(PLAIN_KIND)
        took: list[float] = []
        for client, plan in zip(self.clients, plans, strict=True):
            self._round(client, plan, kind, seconds, took)
        self.plans.append((self.now, drafted))
        alike = sum(plan.gamma == kind.gamma for plan in plans)
        measured: tuple[Measured, ...] = ()
        if took and alike >= (7 / 8 if kind.gamma else 1) * len(plans):
            measured = (Measured(kind, sum(took) / len(took), len(took)),)
        if kind.proposer is Proposer.DRAFT:
            step = self.true.step(kind, load) * A_TOKEN
            self.policy.costs.sizes.note_drafting(seconds - step, step, kind, load)
        self.policy.note_step(Ended(self.now, len(plans), load, measured))
        for client in self.clients:
            client.pace.next_round = self.policy.plan_of(client.pace, int(client.tokens), client.announces)

    def _round(self, client: Client, plan: RoundPlan, kind: RoundKind, seconds: float, took: list[float]) -> None:
        """Make a session's round; what it is expected to bring counts."""
        chance, proposed, pace = client.chance, plan.gamma, client.pace
        if client.found is not None and not plan.gamma:
            chance, proposed = client.found, FOUND
        accepted = next((n for n in range(proposed) if self.random.random() >= chance), proposed)
        expected = sum(chance**n for n in range(proposed + 1))
        if client.found is not None:
            found, brought = client.found, accepted + 1
            right = next((n for n in range(brought) if self.random.random() >= found), brought)
            right = right if plan.gamma else accepted
            judged = Judged(right, right < brought, FOUND - right if right == brought else 0)
            self.policy.gains.note_lookup(judged, False, brought)
        self.tokens += expected
        client.tokens += accepted + 1
        if pace.last_gamma == plan.gamma:
            took.append(seconds)
        pace.last_gamma = plan.gamma
        if plan.gamma:
            self.policy.note_round(pace, plan.gamma, accepted)
            self.policy.pause_if_useless(pace, plan.gamma, int(client.tokens))


def machine(seed: int, proposer: Proposer = Proposer.DRAFT) -> Machine:
    """Return a machine whose costs differ from what sizes say by up to a quarter, its draft's by up to three times."""
    random = Random(seed)
    sizes = Sizes(WEIGHTS, budget=0.1)
    true = replace(sizes, draft_pass=0.15 * random.choice([0.4, 1.0, 2.0, 3.0]), fetched={})
    factors = {(who, how): random.uniform(0.8, 1.25) for who in Proposer for how in Verified}
    options = Options(proposer, tuple(gammas(4)), adaptive=True, announced=True)
    return Machine(Policy(options, CostTable(sizes), Counter()), true, factors, random)


def timetable(random: Random, seconds: float) -> list[tuple[float, Client]]:
    """Return when which session begins, in order: in each of several places one follows another."""
    chance, places = random.choice([0.05, 0.3, 0.6, 0.8, 0.9]), random.choice([1, 4, 16])
    begins = []
    for _ in range(places):
        now = 0.0
        while now < seconds:
            context, ends = random.choice([500, 2000, 8000, 32_000, 64_000]), now + random.uniform(2, 20)
            accepted = min(0.97, max(0.0, chance + random.uniform(-0.1, 0.1)))
            begins.append((now, Client(context, accepted, ends, random.random() < 0.5)))
            now = ends
    return sorted(begins, key=lambda each: each[0])


def play(machine: Machine, random: Random, seconds: float) -> list[tuple[float, float]]:
    """Have sessions come and go; return when how many tokens were generated, at each of these times."""
    begins, seen = timetable(random, seconds), []
    times = sorted({each.ends for _, each in begins} | set(range(1, int(seconds) + 1)))
    for until in (at for at in times if at <= seconds):
        while begins and begins[0][0] <= machine.now:
            machine.add(begins.pop(0)[1])
        machine.run(until)
        seen.append((machine.now, machine.tokens))
        machine.clients = [each for each in machine.clients if each.ends > machine.now]
    return seen


def rate_after(seen: list[tuple[float, float]], begin: float) -> float:
    """Return the tokens a second after a time."""
    first = next(each for each in seen if each[0] >= begin)
    return (seen[-1][1] - first[1]) / (seen[-1][0] - first[0])


SECONDS, SETTLED = 20, 10


def compare(seed: int, proposer: Proposer = Proposer.DRAFT) -> tuple[float, float]:
    """Return the policy's rate by that of the best fixed plan, from the beginning and after ten seconds."""
    made = machine(seed, proposer)
    own = play(made, Random(seed), SECONDS)
    best = {}
    for plan in made.policy.options.plans(Load(8, 10_000, announcing=5_000)):
        other = machine(seed, proposer)
        other.fixed = plan
        best[plan] = play(other, Random(seed), SECONDS)
    whole, late = (max(rate_after(seen, begin) for seen in best.values()) for begin in (0, SETTLED))
    return rate_after(own, 0) / whole, rate_after(own, SETTLED) / late


@pytest.mark.parametrize(("proposer", "seeds"), [(Proposer.DRAFT, range(5)), (Proposer.SELF, range(3))])
def test_no_fixed_plan_is_much_faster_whatever_comes_and_goes(proposer: Proposer, seeds: range) -> None:
    """On machines whose costs nobody has told: with what is tried in the first seconds, and without."""
    for seed in seeds:
        whole, late = compare(seed, proposer)
        assert whole >= 0.97 and late >= 0.975, seed


@pytest.mark.long
@pytest.mark.parametrize(("proposer", "loads"), [(Proposer.DRAFT, 500), (Proposer.SELF, 100)])
def test_over_many_loads_the_policy_is_as_fast_as_the_best_fixed_plan(proposer: Proposer, loads: int) -> None:
    compared = [compare(1000 + seed, proposer) for seed in range(loads)]
    whole, late = ([each[part] for each in compared] for part in (0, 1))
    print(
        f"{proposer.name}: {min(whole):.3f} at least, {sum(whole) / loads:.3f} on average; after {SETTLED} s "
        f"{min(late):.3f}, {sum(late) / loads:.3f}; {sum(each >= 0.99 for each in late)} of {loads} above 0.99"
    )
    assert min(whole) >= 0.98 and sum(late) / loads >= 0.998
    assert min(late) >= 0.98 and sum(each < 0.99 for each in late) <= loads / 50


def alone(
    acceptance: float, seed: int = 1, sessions: int = 1, context: int = 2000, announces: bool = False, **true: float
) -> Machine:
    """Return a machine with sessions that stay."""
    made = machine(seed)
    made.factors, made.true = {}, replace(made.true, **({"draft_pass": 0.15} | true))
    for _ in range(sessions):
        made.add(Client(context, acceptance, 1e9, announces))
    return made


def gain(made: Machine, seconds: float) -> float:
    """Return how many times as many tokens a second are generated, for so long from now, as by plain decoding."""
    tokens, plain_tokens = made.tokens, made.plain_tokens
    made.run(made.now + seconds)
    return (made.tokens - tokens) / (made.plain_tokens - plain_tokens)


def share(made: Machine, wanted: Callable[[RoundPlan], bool], since: float = 0.0) -> float:
    """Return how much of the rounds since a time were made as is wanted."""
    plans = [plan for at, plan in made.plans if at >= since]
    return sum(map(wanted, plans)) / len(plans)


def test_the_first_request_is_served_as_the_thousandth() -> None:
    """What is announced is read at once, by sizes: everything would take 2.6 times as long, and is never tried."""
    made = alone(0.8, sessions=8, context=32_768, announces=True)
    assert made.clients[0].pace.next_round.sparse
    early = gain(made, 1.0)
    assert early > 0.93 * gain(made, 5.0)
    assert share(made, lambda plan: plan.sparse) > 0.99 and share(made, lambda plan: plan.gamma == 4) > 0.95


@pytest.mark.parametrize("sessions", [1, 8])
def test_a_draft_that_is_of_no_use_costs_next_to_nothing(sessions: int) -> None:
    made = alone(0.005, sessions=sessions)
    assert gain(made, 1.0) > 0.9 and gain(made, 10.0) > 0.985


def test_a_few_unlucky_rounds_do_not_end_proposing() -> None:
    """A round with a proposed token takes 1.45 times as long as a plain one. After 200 more unlucky rounds it ends."""
    made = alone(0.6)
    policy, load = made.policy, made.load
    policy.gains.acceptance = Acceptance([0.5], judged=6)
    for accepted in (0, 0, 0, 1, 0, 0, 1, 0):
        policy.gains.acceptance.note(1, accepted)
    plan = policy.options.plans(load)[1]
    assert plan.gamma == 1
    for _ in range(20):
        policy.costs.note(kinds_of(plan, load)[0], load, 0.0145, 1)
        policy.costs.note(PLAIN_KIND, load, 0.0100, 1)
    policy.options, policy._present = replace(policy.options, gammas=(1,)), plan
    policy.choose(load)
    assert policy.choice.plan == plan
    for _ in range(200):
        policy.gains.acceptance.note(1, 0)
    policy.choose(load)
    assert policy.choice.plan == PLAIN


def test_a_trial_in_vain_is_no_pause() -> None:
    """Only a choice makes its plan the present one."""
    policy, load = machine(1).policy, Load(1, 2000)
    tried = policy.options.plans(load)[-1]
    for kind, seconds in ((kinds_of(tried, load)[0], 0.05), (PLAIN_KIND, 0.01)):
        for _ in range(20):
            policy.costs.note(kind, load, seconds, 1)
    policy.gains.acceptance = Acceptance([0.3] * 4, judged=99)
    policy.choose(load)
    assert policy.plan == PLAIN
    policy.counters.clear()
    for now, rate in ((1.0, 1e9), (2.0, 0.0)):  # the tried plan turns out slower than plain rounds, then much faster
        policy._trials._held_in_vain = 3
        policy._trials._begin(tried := replace(tried, held=8), load)
        policy.gains.rates = lambda plans, at, rate=rate: {PLAIN: rate, tried: 1.0}
        policy.note_step(Ended(now, 1, replace(load, tokens=9000)))  # of another bucket
        assert policy.plan == (PLAIN if rate else tried) and policy._trials._held_in_vain == (3 if rate else 0)
    assert policy.counters == {"drafting_probes": 2, "drafting_pauses": 0}


@given(st.floats(0, 1), st.integers(1, 100))
def test_the_standard_error_of_one_token_is_that_of_a_coin(chance: float, judged: int) -> None:
    error = Acceptance([chance], judged=judged, prior_rounds=0).standard_error(1)
    assert error == pytest.approx((chance * (1 - chance) / judged) ** 0.5 / (1 + chance), abs=1e-6)


def test_useless_proposals_go_on_where_their_announcements_save_reading() -> None:
    """A session that paused would read everything, and the others, which draft anyway, would wait for it."""
    made = alone(0.8, sessions=2, context=64_000)
    for _ in range(2):
        made.add(Client(64_000, 0.005, 1e9, announces=True))
    made.run(2.0)
    assert share(made, lambda plan: plan.sparse, since=1.0) > 0.95
    assert not any(each.pace.pause.lasts(int(each.tokens)) for each in made.clients)


def test_a_draft_that_is_far_too_slow_costs_a_hundredth_at_most() -> None:
    made = alone(0.8, draft_pass=2.5)
    gain(made, 2.0)
    assert gain(made, 10.0) > 0.98


@pytest.mark.parametrize("sessions", [1, 8])
def test_lookup_alone_proposes_as_long_as_it_brings_more_than_a_draft(sessions: int) -> None:
    made = alone(0.6, sessions=sessions, context=8000)
    for found, is_chosen in ((0.75, lambda plan: not plan.gamma), (0.1, lambda plan: plan.gamma), (0.75, None)):
        for client in made.clients:
            client.found = found
        made.run(made.now + 3)
        since = made.now
        made.run(since + 3)
        assert share(made, is_chosen or (lambda plan: not plan.gamma), since) > 0.9, found


def test_each_text_is_soon_served_by_the_plan_that_is_best_for_it() -> None:
    """Answers of 400 tokens, one after another, of texts that differ in what is accepted and in what lookup finds."""
    texts = {"an edited file": (0.8, 0.85), "tool calls": (0.87, 0.6), "chat": (0.86, 0.03), "prose": (0.72, 0.1)}
    made, random = alone(0.8, sessions=0, draft_pass=0.28), Random(1)
    reached = {text: list[float]() for text in texts}
    for number in range(80):
        text = random.choice(list(texts))
        chance, found = texts[text]
        client, began, tokens = Client(8000, chance, 1e9, False, found=found), made.now, made.tokens
        made.clients = []
        made.add(client)
        while client.tokens < 8400:
            made.step()
        best = max(made.rate_of(client, plan) for plan in made.policy.options.plans(made.load))
        reached[text] += [(made.tokens - tokens) / (made.now - began) / best] * (number >= 10)
    means = {text: sum(each) / len(each) for text, each in reached.items()}
    assert min(means.values()) > 0.93 and sum(means.values()) / len(means) > 0.96, means


def test_it_follows_an_acceptance_that_changes() -> None:
    made = alone(0.01)
    made.run(5)
    made.clients[0].chance = 0.9
    made.run(15)
    assert share(made, lambda plan: plan.gamma == 4, since=12) > 0.9
    made.clients[0].chance = 0.01
    made.run(20)
    assert share(made, lambda plan: not plan.gamma, since=17) > 0.9


def test_a_session_whose_draft_is_of_no_use_pauses_while_others_go_on() -> None:
    made = alone(0.9, sessions=7)
    made.add(Client(2000, 0.0, 1e9, False))
    made.run(3)
    odd = made.clients[-1].pace
    assert odd.pause.next > 64 and odd.pause.lasts(int(made.clients[-1].tokens)) == (odd.next_round == PLAIN)
    assert all(each.pace.next_round.gamma for each in made.clients[:-1])


def test_a_plan_that_the_settings_give_is_made_but_for_sessions_that_it_does_not_help() -> None:
    counters: Counter[str] = Counter()
    policy = Policy(Options(Proposer.DRAFT, (4,), announced=True), CostTable(Sizes(WEIGHTS)), counters)
    load = Load(2, 1000, announcing=500)
    policy.choose(load)
    assert policy.options.plans(load) == [policy.plan] == [RoundPlan(Proposer.DRAFT, 4, sparse=True)]
    good, bad = Pace(policy.new_acceptance()), Pace(policy.new_acceptance())
    for _ in range(20):
        for pace, accepted in ((good, 4), (bad, 0)):
            policy.note_round(pace, 4, accepted)
            policy.pause_if_useless(pace, 4, 100)
    assert policy.plan_of(good, 100, announces=False) == RoundPlan(Proposer.DRAFT, 4)
    assert policy.plan_of(bad, 100, announces=True) == PLAIN and counters["drafting_pauses"] > 0
    assert policy.plan_of(bad, 100 + bad.pause.until, announces=True).gamma == 4


def test_what_is_chosen_is_explained() -> None:
    made = alone(0.8, sessions=2)
    made.run(3)
    said = made.policy.choice
    assert said.plan == made.policy.plan and said.runner_up != said.plan
    assert said.tokens_a_second > said.runner_up_tokens > 0
    assert str(said).startswith("draft, 4 tokens") and "tokens a second expected; next " in str(said)
    measured = made.tokens
    made.run(4)
    assert said.tokens_a_second == pytest.approx(made.tokens - measured, rel=0.1)


def test_choices_are_apart_by_time_and_by_rounds() -> None:
    """A choice takes the host a tenth of a short step; where steps take no time, rounds say that one is due."""
    policy = machine(1).policy
    chosen: list[float] = []

    def choose(load: Load) -> None:
        policy._since = 0
        chosen.append(policy._ended)

    policy.choose = choose
    for step in range(1, 101):
        policy.note_step(Ended(0.01 * step, 6, Load(6, 6_000)))
    assert all(0.029 < later - earlier < 0.05 for earlier, later in itertools.pairwise(chosen)) and len(chosen) > 20
    chosen.clear()
    for _ in range(16):
        policy.note_step(Ended(1.0, 16, Load(16, 16_000)))
    assert len(chosen) == 16 * 16 // MOST_UNDECIDED


# Acceptance


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 4))
def test_chances_are_shares_and_more_proposed_tokens_never_promise_fewer(rounds: list[int], proposed: int) -> None:
    known = Acceptance([0.6] * 4)
    for accepted in rounds:
        known.note(proposed, min(accepted, proposed))
    assert all(0 <= chance <= 1 for chance in known.chances)
    assert known.tokens(0) == 1 <= known.tokens(1) <= known.tokens(2) <= known.tokens(4) <= 5


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 0.8, 0.95])
def test_chances_come_near_what_they_are(chance: float) -> None:
    random, known = Random(3), Acceptance([0.6] * 2)
    seen = []
    for number in range(400):
        known.note(2, next((n for n in range(2) if random.random() >= chance), 2))
        seen += [known.chances[0]] if number >= 40 else []
    assert sum(seen) / len(seen) == pytest.approx(chance, abs=0.06)


# Costs


def costs_of(load: Load, *figures: tuple[RoundKind, float]) -> CostTable:
    table = CostTable(Sizes(WEIGHTS, budget=0.1))
    for kind, seconds in figures:
        for _ in range(4):
            table.note(kind, load, seconds, load.sessions)
    return table


DRAFT_4 = RoundKind(Proposer.DRAFT, 4, DENSE)
SCREENS_4, CONFIRMS_4, SPARSE_4 = (RoundKind(Proposer.DRAFT, 4, how) for how in (SCREENS, CONFIRMS, SPARSE))
LOAD = Load(4, 80_000, announcing=80_000)


def test_what_was_not_measured_follows_from_sizes_and_what_was() -> None:
    sizes = Sizes(WEIGHTS, budget=0.1)
    at = costs_of(LOAD, (DRAFT_4, 0.02)).at(LOAD)
    assert at.seconds(DRAFT_4) == pytest.approx(0.02)
    for other in (PLAIN_KIND, DRAFT_4._replace(gamma=2), DRAFT_4._replace(verified=SPARSE)):
        assert at.seconds(other) == pytest.approx(0.02 * sizes.round(other, LOAD) / sizes.round(DRAFT_4, LOAD))
    assert at.doubt(DRAFT_4) == 1.0 < at.doubt(DRAFT_4._replace(gamma=2)) < at.doubt(PLAIN_KIND)


def test_how_a_kind_differs_from_its_size_is_known_under_other_loads_too() -> None:
    table = costs_of(LOAD, (DRAFT_4, 0.02), (PLAIN_KIND, 0.002))
    far = Load(15, 1_000_000)
    ratio = table.sizes.round(PLAIN_KIND, far) / table.sizes.round(DRAFT_4, far)
    known = table.sizes.round(PLAIN_KIND, LOAD) / table.sizes.round(DRAFT_4, LOAD)
    at = table.at(far)
    assert at.seconds(PLAIN_KIND) / at.seconds(DRAFT_4) == pytest.approx(0.1 * ratio / known)
    assert not at.known and at.doubt(PLAIN_KIND) > 1
    many = Load(64, 1_000_000)  # whose rows may take the time, where few sessions wait for memory
    at = table.at(many)
    ratio = table.sizes.round(PLAIN_KIND, many) / table.sizes.round(DRAFT_4, many)
    assert at.seconds(PLAIN_KIND) / at.seconds(DRAFT_4) == pytest.approx(ratio)
    assert at.seconds(PLAIN_KIND) < 1, "in seconds, since other costs are"


def test_what_comes_over_the_link_is_part_of_what_a_step_takes() -> None:
    cold = Load(4, 80_000, screened=4, away=60_000)
    sizes = Sizes(WEIGHTS)
    screens = DRAFT_4._replace(verified=SCREENS)
    assert sizes.step(DRAFT_4, cold) > 10 * sizes.step(DRAFT_4, Load(4, 80_000)) > 10 * 80_000
    assert sizes.step(screens, cold) < 0.2 * sizes.step(DRAFT_4, cold), "it lists little of what is cold"
    for _ in range(50):
        sizes.note_fetched(SCREENS, 0.75)
        sizes.note_fetched(DENSE, 0.75)
    assert sizes.step(screens, cold) > 0.8 * sizes.step(DRAFT_4, cold), "until it brings as much"


def test_a_mixtures_rows_read_experts_of_their_own() -> None:
    """So more tokens of a round cost more weights, and sessions that are alone read few."""
    dense, mixture = Sizes(WEIGHTS), Sizes(WEIGHTS, read_share=lambda rows: 1 - 0.9 * 0.94**rows)
    alone, many = Load(1, 0), Load(40, 0)
    assert dense.step(DRAFT_4, alone) == dense.plain(alone) == WEIGHTS
    assert mixture.plain(alone) == pytest.approx(0.154 * WEIGHTS)
    assert mixture.step(DRAFT_4, alone) == pytest.approx(0.3395 * WEIGHTS, rel=1e-3)
    assert mixture.step(DRAFT_4, many) < 1.1 * mixture.plain(many) * 200 / 160


# Held tokens


def held_tokens(load: Load, chance: float, measured: float = 1.0, **how: float) -> int:
    """Return how many tokens are held under a load. chance: of each to be confirmed. measured: how many times as long
    as its size says a pass takes that confirms.
    """
    sizes = Sizes(WEIGHTS, **how)
    options = Options(Proposer.DRAFT, (4,), holds=(0, *range(5, 25)))
    policy = Policy(options, CostTable(sizes), Counter(), prior=0.8)
    policy.gains.held = Acceptance([chance])
    for kind, times in ((DRAFT_4, 1.0), (DRAFT_4._replace(verified=CONFIRMS), measured)):
        for _ in range(60):
            policy.costs.note(kind, load, times * sizes.round(kind, load), load.sessions)
    policy.choose(load)
    return policy.choice.plan.held


def test_tokens_are_held_where_contexts_are_long_and_most_are_confirmed() -> None:
    long = Load(4, 400_000, screened=4)
    assert held_tokens(long, 0.99) > 12 > held_tokens(long, 0.95) > 0
    assert held_tokens(long, 0.5) == 0 == held_tokens(Load(4, 8_000, screened=4), 0.98)
    assert held_tokens(replace(long, screened=0), 0.99) == 0, "no session may hold any"


def test_what_passes_that_confirm_take_decides_over_how_many_are_held() -> None:
    long = Load(4, 400_000, screened=4)
    at_best = [held_tokens(long, 0.97, slower) for slower in (0.8, 1.3, 4.0)]
    assert 0 < at_best[0] <= at_best[1] and at_best[2] == 0
    middle = Load(1, 30_000, screened=1)
    assert held_tokens(middle, 0.98, screening_weights=0.5) > 0, "weights in 8 bits have it pay sooner"
    cold = replace(middle, away=20_000)
    assert held_tokens(cold, 0.98) > 16, "what comes over the link has more held"


def test_holding_is_tried_again_where_it_did_not_pay() -> None:
    options = Options(Proposer.DRAFT, (4,), holds=(0, 11))
    policy = Policy(options, CostTable(Sizes(WEIGHTS)), Counter(), prior=0.8)
    load, rounds = Load(4, 400_000, screened=4), 0
    policy.gains.held = Acceptance([0.3])
    policy.choose(load)
    assert policy.plan.held == 0
    while not policy.plan.held and rounds < 20_000:
        policy.note_step(Ended(0.02 * rounds, 4, load, (Measured(DRAFT_4, 0.02, 4),)))
        rounds += 1
    assert 500 < rounds < 5_000


def test_approximate_requests_are_served_exactly_unless_sparse_rounds_are_clearly_faster() -> None:
    """By measured costs alone, where there are any; sizes have to say it clearly."""

    def policy_at(context: int, confirmed: float, sparse: float | None = None) -> Policy:
        options = Options(Proposer.DRAFT, (4,), adaptive=True, announced=True, holds=(0, 11))
        policy = Policy(options, CostTable(Sizes(WEIGHTS, screening_weights=0.5)), Counter(), prior=0.8)
        policy.gains.held = Acceptance([confirmed])
        exact = Load(8, 8 * context, screened=8, skippable=8 * (context - 12_000))
        seconds = {kind: policy.costs.at(exact).seconds(kind) * A_TOKEN for kind in (SCREENS_4, CONFIRMS_4)}
        for kind, taken in seconds.items():
            for number in range(8):
                policy.note_step(Ended(0.02 * number, 8, exact, (Measured(kind, taken, 8),)))
        if sparse is not None:
            for number in range(8):
                policy.note_step(Ended(0.02 * number, 8, exact, (Measured(SPARSE_4, sparse * seconds[SCREENS_4], 8),)))
        return policy

    assert Policy(Options(Proposer.DRAFT, (4,)), CostTable(Sizes(WEIGHTS)), Counter()).serves_exactly
    assert policy_at(32_768, 0.989).serves_exactly
    assert not policy_at(100_000, 0.8).serves_exactly, "a dense pass confirms little"
    assert policy_at(32_768, 0.989, sparse=2.2).serves_exactly
    assert not policy_at(32_768, 0.989, sparse=1.2).serves_exactly


def test_what_a_draft_takes_to_read_is_soon_known_though_kernels_are_compiled_first() -> None:
    reading = DraftReading()
    reading.note_read(0.0001, 1)  # a part so short says nothing of long ones
    assert reading.seconds_to_read(1000) == 0.0
    for seconds in (0.6, 0.02, 0.02, 0.8, 0.022, 0.018, 0.3):
        reading.note_read(seconds, 2000)
    assert reading.seconds_to_read(1000) == pytest.approx(0.011)
    for _ in range(9):
        reading.note_read(0.04, 2000)
    assert reading.seconds_to_read(1000) == pytest.approx(0.02), "contexts are longer now"


def test_what_is_read_of_prompts_is_less_where_nothing_is_announced() -> None:
    reading = DraftReading()
    reading.note_read(0.1, 10_000)
    reading.note_answer(10_000, 100, was_cut=False, skippable=8_000)
    exact, approximate = Load(4, 80_000), Load(4, 80_000, announcing=80_000)
    assert reading.seconds_a_token(approximate) == pytest.approx(4 * 0.1 / 100)
    assert reading.seconds_a_token(exact) == pytest.approx(4 * 0.02 / 100)


def test_reading_counts_by_what_sessions_without_a_draft_may_generate() -> None:
    reading = DraftReading()
    reading.note_read(0.1, 10_000)
    load = Load(4, 80_000)
    assert reading.seconds_a_token(load) == 0.0, "all are drafted for, and none has ended"
    begun = replace(load, undrafted=20_000, expected=500)
    assert reading.seconds_a_token(begun) == pytest.approx(0.2 / 500), "20,000 tokens are read while 500 are generated"
    assert reading.seconds_a_token(replace(begun, expected=1000)) == pytest.approx(0.2 / 1000)
    reading.note_answer(10_000, 100, was_cut=False)
    assert reading.seconds_a_token(load) == pytest.approx(4 * 0.1 / 100), "so do the requests that come"
    reading.note_answer(0, 2, was_cut=False)
    assert 95 < reading.typical_answer < 100, "a token that is generated is of a long answer"


def test_an_answer_that_the_clients_limit_ended_says_little_about_the_length_of_answers() -> None:
    """Short answers that warm a service up do not keep later ones from being drafted."""
    reading = DraftReading()
    for _ in range(20):
        reading.note_answer(3000, 24, was_cut=True)
    assert reading.typical_answer == pytest.approx(USUAL_ANSWER)
    for _ in range(40):
        reading.note_answer(3000, 24, was_cut=False)
    assert reading.typical_answer < 50
