"""Paged KV and the ledger against a plain model of sessions, through any sequence of what sessions do."""

import zlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.sessions.ledger import LATEST_ROUNDS, Ledger, LedgerError, Record
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, OutOfPages, SequenceKV, pages_for
from specahead.engine.sampling.distributions import Sampling
from specahead.lab.evaluation.forks import fork
from specahead.wire.messages import At, Commit, Exactness, FinishReason, Open

LAYERS, HEADS, PAGES, GAMMA = 2, 2, 24, 12
# Prompts are made of these, so that many share pages and many differ in the middle of one.
BLOCKS = [[kind] * PAGE_SIZE for kind in (1, 2)]
tails = st.lists(st.integers(1, 3), max_size=PAGE_SIZE + 3)
drafts = st.lists(st.integers(1, 3), max_size=GAMMA)


def contents(tokens: list[int]) -> list[float]:
    """What KV at each position holds: it follows from all tokens up to it, as a model's does."""
    chain = accumulate(tokens, lambda crc, token: zlib.crc32(bytes([token]), crc), initial=0)
    return [float(crc) for crc in chain][1:]


@dataclass
class Session:
    """`tokens`: committed; `drafted`: run beyond them, not yet judged; `commits`: all that were applied."""

    tokens: list[int]
    prompt: int
    kv: SequenceKV = field(default_factory=SequenceKV)
    drafted: list[int] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)

    @property
    def run(self) -> list[int]:
        """The tokens that have KV."""
        return (self.tokens + self.drafted)[: self.kv.length]


class Sessions(RuleBasedStateMachine):
    """Sessions are opened, read their prompts, run drafts, and are judged, as the verifier does it."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache(LAYERS, HEADS, 1, PAGES, torch.float64)
        self.ledger = Ledger()
        self.live: dict[str, Session] = {}
        self.opened = 0
        self.repeats = 0

    @initialize()
    def start(self) -> None:
        assert self.kv.pool.available == PAGES

    def pick(self, data: st.DataObject) -> tuple[str, Session]:
        name = data.draw(st.sampled_from(sorted(self.live)))
        return name, self.live[name]

    def write(self, session: Session, count: int) -> bool:
        """Run the next `count` of the session's tokens; False if there are no pages, and then nothing has changed."""
        kv, tokens = session.kv, session.tokens + session.drafted
        pages, available = list(kv.pages), self.kv.pool.available
        try:
            self.kv.grow(kv, kv.length + count)
        except OutOfPages:
            assert (kv.pages, self.kv.pool.available) == (pages, available)
            assert pages_for(kv.length + count) - len(pages) > available
            return False
        at = torch.arange(kv.length, kv.length + count)
        pages_of, offsets = torch.tensor(kv.pages)[at // PAGE_SIZE], at % PAGE_SIZE
        written = torch.tensor(contents(tokens), dtype=torch.float64)[at]
        for layer in range(LAYERS):
            for head in range(HEADS):
                value = (written + layer + head / 2)[:, None]
                self.kv.k_pages[layer][pages_of, head, offsets] = value
                self.kv.v_pages[layer][pages_of, head, offsets] = -value
        kv.length += count
        return True

    @rule(blocks=st.lists(st.sampled_from(BLOCKS), max_size=3), tail=tails)
    def open(self, blocks: list[list[int]], tail: list[int]) -> None:
        tokens = [*(t for block in blocks for t in block), *tail] or [1]
        name = f"s{self.opened}"
        self.opened += 1
        self.ledger.open(Record(Open(name, list(tokens), len(tokens), 99, [], Sampling(), Exactness.EXACT)))
        session = self.live[name] = Session(tokens, len(tokens))
        covered = self.kv.reuse_prefix(session.kv, tokens[:-1])
        assert covered == session.kv.length <= len(tokens) - 1
        assert covered % PAGE_SIZE == 0

    def unread(self) -> list[str]:
        return [name for name, s in self.live.items() if s.kv.length < len(s.tokens) - 1]

    def judged(self) -> list[str]:
        return [name for name, s in self.live.items() if s.kv.length == len(s.tokens) - 1]

    def running(self) -> list[str]:
        return [name for name, s in self.live.items() if s.kv.length >= len(s.tokens)]

    @precondition(lambda self: self.unread())
    @rule(data=st.data())
    def read_prompt(self, data: st.DataObject) -> None:
        session = self.live[data.draw(st.sampled_from(self.unread()))]
        most = len(session.tokens) - 1 - session.kv.length
        if self.write(session, data.draw(st.integers(1, most) | st.just(most))):
            self.kv.index_prefix(session.kv, session.tokens[: session.kv.length])

    @precondition(lambda self: self.judged())
    @rule(data=st.data(), drafted=drafts)
    def run_draft(self, data: st.DataObject, drafted: list[int]) -> None:
        session = self.live[data.draw(st.sampled_from(self.judged()))]
        session.drafted = drafted
        if not self.write(session, 1 + len(drafted)):
            session.drafted = []

    @precondition(lambda self: self.running())
    @rule(data=st.data(), following=st.integers(1, 3))
    def judge(self, data: st.DataObject, following: int) -> None:
        """Some or none of the draft is accepted and one token added; what was rejected is rolled back."""
        name = data.draw(st.sampled_from(self.running()))
        session = self.live[name]
        accepted = data.draw(st.integers(0, len(session.drafted)))
        tokens = [*session.drafted[:accepted], following]
        at = At(name, 0, len(session.commits), len(session.tokens))
        commit = Commit(at, tokens, drafted=len(session.drafted), accepted=accepted)
        record = self.ledger.apply(commit)
        assert record is self.ledger.records[name]
        session.tokens += tokens
        session.drafted = []
        session.commits.append(commit)
        self.kv.truncate(session.kv, len(session.tokens) - 1)
        assert len(session.kv.pages) == pages_for(session.kv.length)
        self.kv.index_prefix(session.kv, session.tokens[: session.kv.length])

    @precondition(lambda self: any(s.commits for s in self.live.values()))
    @rule(data=st.data())
    def repeat_a_commit(self, data: st.DataObject) -> None:
        """Any earlier one, once more: nothing but the count of repeats changes."""
        name = data.draw(st.sampled_from([n for n, s in self.live.items() if s.commits]))
        record = self.ledger.records[name]
        before = list(record.tokens), list(record.latest), vars(record.totals).copy()
        assert self.ledger.apply(data.draw(st.sampled_from(self.live[name].commits))) is None
        assert (record.tokens, list(record.latest), vars(record.totals)) == before
        self.repeats += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), gap=st.integers(1, 5))
    def leave_a_gap(self, data: st.DataObject, gap: int) -> None:
        name, session = self.pick(data)
        with pytest.raises(LedgerError, match=f"the ledger holds {len(session.tokens)}"):
            self.ledger.apply(Commit(At(name, 0, 9, len(session.tokens) + gap), [1]))

    @precondition(lambda self: any(s.commits for s in self.live.values()))
    @rule(data=st.data())
    def contradict(self, data: st.DataObject) -> None:
        """A repeat with another token, or one that goes on beyond what is held, is no repeat."""
        name = data.draw(st.sampled_from([n for n, s in self.live.items() if s.commits]))
        commit = data.draw(st.sampled_from(self.live[name].commits))
        changed = [*commit.tokens[:-1], commit.tokens[-1] % 3 + 1]
        longer = [*self.live[name].tokens[commit.at.base :], 1]
        for tokens in (changed, longer):
            with pytest.raises(LedgerError, match="differ"):
                self.ledger.apply(Commit(commit.at, tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        name, session = self.pick(data)
        self.kv.release(session.kv)
        assert (session.kv.pages, session.kv.length) == ([], 0)
        record = self.ledger.close(name)
        assert record.generated == session.tokens[session.prompt :]
        del self.live[name]
        assert self.ledger.apply(Commit(At(name, 0, 0, len(session.tokens)), [1])) is None

    @rule(share=st.integers(1, 4))
    def press(self, share: int) -> None:
        """Take pages and give them back: reusable ones are evicted on the way."""
        pool = self.kv.pool
        pages = pool.allocate(pool.available // share)
        assert len(set(pages)) == len(pages)
        assert not any(page in session.kv.pages for session in self.live.values() for page in pages)
        with pytest.raises(OutOfPages):
            pool.allocate(pool.available + 1)
        pool.release(pages)

    @precondition(lambda self: self.kv.pool._reusable)
    @rule()
    def evict(self) -> None:
        available = self.kv.pool.available
        self.kv.pool.evict_one()
        assert self.kv.pool.available == available

    @invariant()
    def pages_have_one_owner_each(self) -> None:
        pool = self.kv.pool
        pool.check_integrity()
        held = Counter(page for session in self.live.values() for page in session.kv.pages)
        assert [held[page] for page in range(PAGES)] == pool.references
        assert pool.held == len(held)

    @invariant()
    def lengths_fit(self) -> None:
        for session in self.live.values():
            kv = session.kv
            assert kv.length <= len(kv.pages) * PAGE_SIZE
            assert kv.indexed * PAGE_SIZE <= min(kv.length, len(session.tokens))
            assert kv.length <= len(session.tokens) + len(session.drafted)
            assert len(set(kv.pages)) == len(kv.pages)
            assert kv.table().tolist() == kv.pages

    @invariant()
    def contents_are_each_sessions_own(self) -> None:
        """Every position that has KV reads back, through the block table, what this session's tokens give."""
        for session in self.live.values():
            tokens = session.run
            if not tokens:
                continue
            wanted = torch.tensor(contents(tokens), dtype=torch.float64)
            for layer in range(LAYERS):
                for head in range(HEADS):
                    k = self.kv.k_pages[layer][session.kv.pages, head].flatten()[: len(tokens)]
                    v = self.kv.v_pages[layer][session.kv.pages, head].flatten()[: len(tokens)]
                    assert torch.equal(k, wanted + layer + head / 2)
                    assert torch.equal(v, -k)

    @invariant()
    def only_common_prefixes_are_shared(self) -> None:
        """A page of two sessions has the same index in both, is indexed by both, behind the same tokens."""
        users_of: dict[int, list[tuple[Session, int]]] = {}
        for session in self.live.values():
            for index, page in enumerate(session.kv.pages):
                users_of.setdefault(page, []).append((session, index))
        for users in users_of.values():
            first, at = users[0]
            for other, index in users[1:]:
                end = (at + 1) * PAGE_SIZE
                assert index == at
                assert at < min(first.kv.indexed, other.kv.indexed)
                assert first.tokens[:end] == other.tokens[:end]

    @invariant()
    def the_ledger_holds_what_was_committed(self) -> None:
        assert set(self.ledger.records) == set(self.live)
        for name, session in self.live.items():
            record = self.ledger.records[name]
            assert record.tokens == session.tokens
            assert list(record.latest) == session.commits[-LATEST_ROUNDS:]
            assert sum(len(commit.tokens) for commit in session.commits) == len(record.generated)
            assert record.totals.accepted == sum(commit.accepted for commit in session.commits)
            assert sum(record.totals.accepted_per_position) == record.totals.accepted
        assert self.ledger.counters["repeated_commits"] == self.repeats

    def teardown(self) -> None:
        for session in self.live.values():
            self.kv.release(session.kv)
        assert self.kv.pool.held == 0
        self.kv.pool.check_integrity()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=50, stateful_step_count=50)


# What the machine reaches only now and then


def filled(kv: KVCache, tokens: list[int]) -> SequenceKV:
    """A sequence that has read `tokens` and offers them."""
    sequence = SequenceKV()
    kv.grow(sequence, len(tokens))
    sequence.length = len(tokens)
    kv.index_prefix(sequence, tokens)
    return sequence


def small() -> KVCache:
    return KVCache(1, 1, 1, 8)


def test_kv_that_was_scrubbed_meets_nobody() -> None:
    """Nobody finds it by its prefix or in the memory of its pages; what another sequence holds as well stays."""
    kv = small()
    tokens = list(range(3 * PAGE_SIZE))
    first = filled(kv, tokens[:PAGE_SIZE])
    bad = SequenceKV()
    kv.reuse_prefix(bad, tokens)
    kv.grow(bad, len(tokens))
    bad.length = len(tokens)
    for pages in (*kv.k_pages, *kv.v_pages):
        pages[bad.pages[1:]] = float("nan")
    kv.index_prefix(bad, tokens)
    held = kv.k_pages[0][first.pages].clone()
    kv.scrub(bad)
    kv.release(bad)
    assert all(pages.isfinite().all() for pages in (*kv.k_pages, *kv.v_pages))
    assert torch.equal(kv.k_pages[0][first.pages], held)
    assert kv.reuse_prefix(SequenceKV(), tokens) == 0
    kv.release(first)
    kv.pool.check_integrity()
    assert kv.pool.held == 0


def test_the_page_released_longest_ago_is_evicted_first() -> None:
    kv = small()
    for kind in (1, 2, 3):
        kv.release(filled(kv, [kind] * 16))
    kv.release(filled(kv, [1] * 16))  # the same again: no second page is offered
    reused = SequenceKV()
    assert kv.reuse_prefix(reused, [2] * 16) == 16
    kv.release(reused)  # now the youngest
    kv.pool.evict_one()
    kv.pool.evict_one()
    found = [kv.reuse_prefix(SequenceKV(), [kind] * 16) for kind in (1, 2, 3)]
    assert found == [0, 16, 0]


def test_an_evicted_beginning_hides_what_followed_it() -> None:
    """Pages whose beginning is gone are not found, nor does a new beginning of another page bring them back."""
    kv = small()
    tokens = [5] * 32
    for page in filled(kv, tokens).pages:  # the beginning first, other than a sequence is released
        kv.pool.release([page])
    kv.pool.evict_one()
    fresh = filled(kv, tokens[:16])
    assert kv.reuse_prefix(SequenceKV(), tokens) == 16
    assert len(fresh.pages) == 1
    kv.pool.check_integrity()


@pytest.mark.parametrize("length", [17, 24, 32, 33, 47, 48])
def test_what_is_taken_back_of_indexed_pages_meets_nobody(length: int) -> None:
    """Whole pages behind it are found by those who say the same; the page that it ends in is written anew."""
    kv = small()
    tokens = list(range(48))
    sequence = filled(kv, tokens)
    kv.take_back(sequence, length)
    kv.truncate(sequence, length)
    whole = length // 16
    assert sequence.indexed == whole and sequence.length == length
    other = SequenceKV()
    assert kv.reuse_prefix(other, tokens) == (16 * whole if length % 16 else 48)
    kv.release(other)
    anew = [*tokens[:length], *range(100, 148 - length)]
    kv.grow(sequence, 48)
    sequence.length = 48
    kv.index_prefix(sequence, anew)
    assert kv.reuse_prefix(SequenceKV(), anew) == 48
    kv.pool.check_integrity()


# Forks and group means


def test_a_twin_offers_its_prefix_as_the_original_does() -> None:
    """What is indexed of the original is so of the twin, and the pages behind it are offered by either."""
    kv = small()
    tokens = list(range(40))
    sequence = filled(kv, tokens)
    twin = fork(kv, sequence)
    assert (twin.indexed, twin.serial) == (sequence.indexed, sequence.serial)
    with pytest.raises(ValueError, match="2 pages are indexed"):
        kv.truncate(twin, 31)
    kv.grow(twin, 48)
    twin.length = 48
    longer = [*tokens, *range(100, 108)]
    kv.index_prefix(twin, longer)
    found = SequenceKV()
    assert kv.reuse_prefix(found, longer) == 48
    assert found.pages == twin.pages
    for held in (sequence, twin, found):
        kv.release(held)
    kv.pool.check_integrity()


def test_room_for_a_pass_is_taken_wholly_or_not_at_all() -> None:
    """Pages for all its sequences, and slots for the means of those that are not always read wholly."""
    kv = small()
    kv.keep_group_means(16, slots=3)
    first, second = filled(kv, [1] * 32), filled(kv, [2] * 32)
    second.dense = True
    available = kv.pool.available
    assert not kv.reserve([(first, 16), (second, PAGE_SIZE * available)])
    assert (len(first.pages), len(second.pages), kv.pool.available) == (2, 2, available)
    assert kv.reserve([(first, 16), (second, PAGE_SIZE * (available - 1))])
    assert (len(first.pages), len(second.pages), kv.pool.available) == (3, 1 + available, 0)
    assert kv.reserve([(first, 16), (second, 1)]), "it is there already"
    second.dense = False
    assert not kv.reserve([(first, 1), (second, 1)]), "four groups, three slots"


# The ledger alone


def record(name: str = "a") -> Record:
    return Record(Open(name, [1, 2], 2, 9, [7], Sampling(seed=3), Exactness.APPROXIMATE))


def test_a_record_opens_its_session_again_where_it_stands() -> None:
    ledger = Ledger()
    ledger.open(record())
    ledger.apply(Commit(At("a", 0, 0, 2), [3, 4], drafted=4, accepted=1))
    ledger.apply(Commit(At("a", 1, 1, 4), [7], finish_reason=FinishReason.STOP))
    held = ledger.records["a"]
    opening = held.to_open()
    assert (opening.tokens, opening.prompt_tokens, opening.max_tokens) == ([1, 2, 3, 4, 7], 2, 9)
    assert (opening.stop_token_ids, opening.sampling) == ([7], Sampling(seed=3))
    assert opening.exactness is Exactness.APPROXIMATE
    assert held.finish_reason is FinishReason.STOP
    opening.tokens.append(5)
    assert held.generated == [3, 4, 7]
