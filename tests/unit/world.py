"""Drafter and verifier in one process, over fake models with real paged KV and a link that may misbehave."""

import random
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from orchestrator.sessions.ledger import Ledger, Record
from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.grammars import Grammars
from specahead.sparsity.plan import Plan
from specahead.wire import convert
from specahead.wire import messages as m
from target_service.hooks import NO_HOOKS, Hooks
from target_service.session import DraftPeer, TargetSession
from target_service.verifier import Verifier
from tests.settings import draft_settings, target_settings
from tests.unit.clock import Clock
from tests.unit.fake_models import DRAFT_HEADS, DRAFT_LAYERS, GREEDY, LAYERS, PLAN, VOCAB, FakeModel, FakeRunner


class Link:
    """A stream between draft and target. Events travel as protobuf bytes."""

    def __init__(self, number: int) -> None:
        self.to_draft: list[m.TargetEvent] = []
        self.to_target: list[m.DraftEvent] = []
        self.target_end = DraftPeer(f"draft-{number}", self.to_draft.append)
        self.draft_end = TargetPeer(self.to_target.append)


def as_draft_event(event: m.DraftEvent) -> m.DraftEvent:
    frame = convert.draft_events_to_pb([event])
    return convert.draft_event_from_pb(type(frame).FromString(frame.SerializeToString()).batch.events[0])


def as_target_event(event: m.TargetEvent) -> m.TargetEvent:
    frame = convert.target_events_to_pb([event])
    return convert.target_event_from_pb(type(frame).FromString(frame.SerializeToString()).batch.events[0])


@dataclass
class Faults:
    """How many times in all the link may do something wrong, and how far it may put an event back."""

    left: int = 0
    window: int = 4
    jumps: int = 0  # of the clock, beyond the verifier's patience


@dataclass
class Side:
    """A drafter or a verifier and the step that it is in. `dirty`: something has happened since it found nothing."""

    actor: Any
    step: Any = None
    result: Any = None
    dirty: bool = True

    def advance(self, rng: random.Random) -> None:
        """Plan, or finish; the model runs at either end, since events may arrive before or after it does."""
        if self.step is None:
            self.step, self.result = self.actor.plan_step(), None
            self.dirty = self.step is not None
            if self.step is not None and rng.random() < 0.5:
                self.result = self.actor.execute(self.step)
        else:
            result = self.actor.execute(self.step) if self.result is None else self.result
            self.actor.finish_step(self.step, result)
            self.step = None


class World:
    """One target, its drafts, their links; one random thing after another happens until nothing is left to do."""

    def __init__(
        self,
        clock: Clock,
        seed: int = 0,
        model: FakeModel | None = None,
        plan: Plan = PLAN,
        gamma: int = 4,
        ahead: bool = True,
        branches: int = 1,
        pages: int = 200,
        draft_pages: int = 200,
        prefill_chunk: int = 24,
        faults: Faults | None = None,
        max_sessions: int = 64,
        weight_tokens: float = 0.0,
        hooks: Hooks = NO_HOOKS,
        draft_context: int = 500,
        draft_reads: int = 0,
        runner: type[FakeRunner] = FakeRunner,
        grammars: Grammars | None = None,
        proposer: str = "none",
        hold: int | None = 0,
        max_context: int = 500,
        screening_quantization: str = "none",
        lookup: bool = False,
        audits: dict[str, Any] | None = None,
    ) -> None:
        """proposer: what proposes while no draft is attached, as --draft says. draft_reads: the last tokens of a prompt
        that its draft reads at least; 0: all. audits: keys of `speculation`; None: nothing is audited.
        """
        self.clock, self.rng = clock, random.Random(seed)
        self.model = model or FakeModel()
        self.faults = faults or Faults()
        self.target = runner(self.model.target, self.model.ends, LAYERS, 1, pages, self.model.recent)
        self.target.own_draft, self.target.weight_tokens = self.model.draft, weight_tokens
        self.verifier = Verifier(
            self.target,
            plan,
            target_settings(
                gamma=gamma,
                prefill_chunk=prefill_chunk,
                max_sessions=max_sessions,
                max_queued=5000,
                max_context=max_context,
                draft=str(models.DRAFT) if proposer == "none" and (hold != 0 or lookup) else proposer,
                lookup=lookup,
                hold=hold,
                screening_quantization=screening_quantization,
                deterministic=runner.deterministic,
                **(audits or {}),
            ),
            hooks,
            grammars,
        )
        self.draft = FakeRunner(self.model.draft, False, DRAFT_LAYERS, DRAFT_HEADS, draft_pages)
        settings = draft_settings(
            gamma=gamma,
            branches=branches if ahead else 0,
            prefill_chunk=prefill_chunk,
            max_context=draft_context,
            draft_context=draft_reads,
        )
        self.drafter = Drafter(self.draft, plan, settings, grammars)
        self.target_side, self.draft_side = Side(self.verifier), Side(self.drafter)
        self.links: list[Link] = []
        self.attached = 0
        self.history: list[tuple[list[Any], Any]] = []
        self.ledger = Ledger()
        self.commits: dict[str, list[m.Commit]] = {}
        self.requests: dict[str, m.Open] = {}
        self.closed: list[m.Closed] = []
        self.script: list[Callable[[], None]] = []  # what happens from outside, in this order, at random times

    # From outside.

    def open(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        stop: list[int] | None = None,
        exactness: m.Exactness = m.Exactness.EXACT,
        done: list[int] | None = None,
        name: str = "",
        logprobs: int | None = None,
        echo: bool = False,
        grammar: str = "",
    ) -> str:
        """`done`: tokens generated before, as when a session is opened again."""
        name = name or f"s{len(self.requests)}"
        tokens = prompt + (done or [])
        asked = m.Open(
            name,
            tokens,
            len(prompt),
            max_tokens,
            stop or [],
            sampling,
            exactness,
            wants_logprobs=logprobs is not None,
            wants_prompt_logprobs=echo,
            alternatives=logprobs or 0,
            grammar=grammar,
        )
        record = Record(asked)
        self.ledger.open(record)
        self.commits[name], self.requests[name] = [], record.to_open()
        self.verifier.admission.open(record.to_open(), self._emit)
        self.target_side.dirty = True
        return name

    def _emit(self, event: m.ServedEvent) -> None:
        if isinstance(event, m.Closed):
            self.closed.append(event)
            return
        assert not self.ended(event.at.session)
        assert self.ledger.apply(event) is not None
        self.commits[event.at.session].append(event)
        session = self.sessions[event.at.session]
        kept = [*session.draft.proposals, *session.draft.announced]
        assert all(epoch == session.epoch and round_ >= session.round for epoch, round_ in kept)

    def ended(self, name: str) -> bool:
        return self.ledger.records[name].finish_reason is not m.FinishReason.NONE

    def abort(self, name: str) -> None:
        self.verifier.abort(name)
        self.target_side.dirty = True

    def attach(self) -> Link:
        link = Link(self.attached)
        self.attached += 1
        self.links.append(link)
        self.verifier.protocol.attach(link.target_end)
        self.drafter.attach(link.draft_end)
        self.target_side.dirty = True
        return link

    def detach(self, link: Link) -> None:
        """The stream breaks; what was on its way is lost."""
        self.links.remove(link)
        self.verifier.protocol.detach(link.target_end)
        self.drafter.detach(link.draft_end)
        self.target_side.dirty = self.draft_side.dirty = True

    @property
    def sessions(self) -> dict[str, TargetSession]:
        """Those that run on the target, by name."""
        return self.verifier.admission.running

    # What happens.

    def run(self) -> None:
        for _ in range(60_000):
            if not self.happen():
                return
        raise AssertionError("the sessions do not come to an end")

    def happen(self) -> bool:
        """One thing, or if there is none the end of the verifier's patience; False if all is over."""
        choices = list(self._choices())
        if choices:
            self.rng.choice(choices)()
        elif self.busy():
            patience = self.verifier.next_deadline()
            assert patience is not None, "sessions are open, and nothing will ever happen again"
            self.clock.now += patience
            self.target_side.dirty = True
        return bool(choices) or self.busy()

    def busy(self) -> bool:
        return bool(self.verifier.gauges["sessions"] or self.verifier.gauges["queued_sessions"])

    def _choices(self) -> Iterator[Callable[[], None]]:
        for side in (self.target_side, self.draft_side):
            if side.dirty or side.step is not None:
                yield lambda side=side: self._advance(side)
        for link in self.links:
            if link.to_target:
                yield lambda link=link: self._deliver(link, link.to_target)
            if link.to_draft:
                yield lambda link=link: self._deliver(link, link.to_draft)
        if self.script:
            yield lambda: self.script.pop(0)()
        if self.faults.jumps and self.busy():
            yield self._jump

    def _advance(self, side: Side) -> None:
        side.advance(self.rng)
        if side.step is None:
            self.check_kv()

    def check_kv(self) -> None:
        """Between steps every session's KV is that of its own tokens, on both sides."""
        if self.target_side.step is None:
            sessions = self.sessions.values()
            assert all(len(session.tokens) >= session.kv.length for session in sessions)
            assert self.target.holds([(session.kv, session.tokens[: session.kv.length]) for session in sessions])
        if self.draft_side.step is None:
            expected = []
            for drafted in (drafted for link in self.links for drafted in link.draft_end.sessions.values()):
                in_place = drafted.kv.length if drafted.moved is None else drafted.moved.target
                assert len(drafted.tokens) >= in_place
                expected.append((drafted.kv, drafted.tokens[:in_place]))
            assert self.draft.holds(expected)

    def _jump(self) -> None:
        if self.rng.random() < 0.05:
            self.faults.jumps -= 1
            self.clock.now += 1.5
            self.target_side.dirty = True

    def _deliver(self, link: Link, queue: list[Any]) -> None:
        event = queue.pop(self._misplaced(len(queue)))
        if queue is link.to_target:
            self.verifier.protocol.receive(link.target_end, as_draft_event(event))
            self.target_side.dirty = True
        else:
            self.drafter.receive(link.draft_end, as_target_event(event))
            self.draft_side.dirty = True
        if self.faults.left:
            self.history.append((queue, event))
            if self._goes_wrong():  # once more, at once or later
                queue.insert(self.rng.randint(0, min(len(queue), self.faults.window)), event)
            if self._goes_wrong():  # something from long ago
                old_queue, old = self.rng.choice(self.history)
                old_queue.insert(0, old)

    def _misplaced(self, waiting: int) -> int:
        return self.rng.randrange(min(waiting, self.faults.window)) if self._goes_wrong() else 0

    def _goes_wrong(self) -> bool:
        wrong = self.faults.left > 0 and self.rng.random() < 0.15
        self.faults.left -= wrong
        return wrong

    # What must hold.

    def check_greedy(self, name: str) -> None:
        request, record = self.requests[name], self.ledger.records[name]
        prompt = request.tokens[: request.prompt_tokens]
        tokens, reason = self.model.plain(prompt, request.max_tokens, request.stop_token_ids)
        assert record.tokens == tokens
        assert record.finish_reason is reason

    def run_and_check_greedy(self, names: list[str], aborted: Container[int]) -> None:
        """Run to the end, with some sessions aborted on the way; the others must say what plain decoding says."""
        for name in (name for number, name in enumerate(names) if number in aborted):
            self.script += [lambda: None] * 20 + [lambda name=name: self.abort(name)]
        self.run()
        for name in (name for number, name in enumerate(names) if number not in aborted):
            self.check_greedy(name)

    def finish(self, *names: str) -> None:
        """Run to the end: these sessions have the tokens of plain decoding, and no session and no page is left."""
        self.run()
        for name in names:
            self.check_greedy(name)
        self.check_nothing_left()

    def offered(self, name: str) -> int:
        """Return of how many of a session's tokens a later session with its text finds KV."""
        later = SequenceKV()
        covered = self.target.kv.reuse_prefix(later, self.ledger.records[name].tokens)
        self.target.kv.release(later)
        return covered

    def check_nothing_left(self) -> None:
        for runner in (self.target, self.draft):
            runner.kv.pool.check_integrity()
            assert runner.kv.pool.held == 0
        assert self.verifier.gauges["sessions"] == self.verifier.gauges["queued_sessions"] == 0
        assert self.drafter.session_count == len(self.drafter.admission.waiting) == 0
        assert all(not link.target_end.sessions and not link.draft_end.sessions for link in self.links)


def prompts(rng: random.Random, count: int, longest: int = 150) -> list[list[int]]:
    """Return prompts of any length, many of which begin with the same pages."""
    common = [rng.randrange(VOCAB) for _ in range(longest)]
    made = []
    for _ in range(count):
        shared = rng.choice([0, 0, 16, 90, longest])
        own = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 17, 60]))]
        made.append(([*common[:shared], *own])[:longest])
    return made


def totals(world: World) -> tuple[int, int]:
    commits = [commit for commits in world.commits.values() for commit in commits]
    return sum(commit.drafted for commit in commits), sum(commit.accepted for commit in commits)
