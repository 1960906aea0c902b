"""Where sessions go: what targets report, followed over time, and the policies over it."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.sessions.routing import ANSWER_TOKENS, TargetView, admit, cached_tokens, choose
from specahead.engine.kv.pages import PAGE_SIZE, OutOfPages, SequenceKV, pages_for
from specahead.engine.kv.pool import PagePool
from specahead.engine.kv.prefix_index import Prefix, blocks_of, prefix_hashes
from specahead.wire.errors import ResourceExhausted
from specahead.wire.messages import Report

ROOMY = Report(number=1, free_places=60, free_kv_pages=10_000, queue_places=1000)


def view(name: str, cached: list[int] | None = None, **load: float) -> TargetView:
    """A target that holds the pages of a text, and has room where nothing else is said."""
    made = TargetView(name)
    made.take(replace(ROOMY, indexed=list(prefix_hashes(cached or [])), **load))
    return made


def text(pages: int, first: int = 0) -> list[int]:
    return list(range(first, first + pages * PAGE_SIZE))


# The tree.

texts = st.lists(st.integers(0, 1), max_size=6).map(lambda pages: [page for page in pages for _ in range(PAGE_SIZE)])


@given(st.lists(st.lists(texts, max_size=5), min_size=1, max_size=4), texts, st.integers(0, PAGE_SIZE - 1))
def test_what_a_target_has_cached_is_the_longest_prefix_of_any_text_that_it_holds(
    held: list[list[list[int]]], pages: list[int], rest: int
) -> None:
    views = [TargetView(str(number)) for number in range(len(held))]
    for target, its_texts in zip(views, held, strict=True):
        for number, each in enumerate(its_texts, 1):
            target.take(replace(ROOMY, number=number, indexed=list(prefix_hashes(each))))

    def common(other: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(pages, other, strict=False)) if a != b), min(map(len, (pages, other)))
        )

    expected = [max([common(each) // PAGE_SIZE * PAGE_SIZE for each in its_texts], default=0) for its_texts in held]
    assert cached_tokens(views, [*pages, *[7] * rest]) == expected


@given(st.lists(st.tuples(st.integers(0, 3), texts), max_size=30), st.integers(1, 9))
def test_a_router_that_follows_the_reports_knows_what_a_pool_of_pages_finds(
    sessions: list[tuple[int, list[int]]], reports_every: int
) -> None:
    """Whatever sessions share, evict and leave: what the hashes say is what a new session would find."""
    pool, changed, target = PagePool(8), set[int](), TargetView("target")
    changed = pool.prefixes.watch()
    open_ones: dict[int, SequenceKV] = {}
    for turn, (place, tokens) in enumerate(sessions):
        if place in open_ones:
            pool.release(open_ones.pop(place).pages[::-1])
            continue
        sequence = open_ones[place] = SequenceKV()
        sequence.pages, sequence.serials = pool.match(blocks_of(tokens))
        try:
            sequence.pages += pool.allocate(len(tokens) // PAGE_SIZE - sequence.indexed)
        except OutOfPages:
            pool.release(open_ones.pop(place).pages[::-1])
            continue
        while (sequence.indexed + 1) * PAGE_SIZE <= len(tokens):
            page = sequence.pages[sequence.indexed]
            sequence.serials.append(pool.index(page, next_prefix(sequence, tokens)))
        pool.check_integrity()
        if turn % reports_every == 0:
            report(pool, changed, target)
    report(pool, changed, target)
    assert target.prefixes == set(pool.prefixes.hashes)
    for _, tokens in sessions:
        assert cached_tokens([target], tokens) == [_found(pool, tokens)]


def next_prefix(sequence: SequenceKV, tokens: list[int]) -> Prefix:
    """The prefix that ends with the first page of a sequence that is not indexed yet."""
    start = sequence.indexed * PAGE_SIZE
    return sequence.serial, next(blocks_of(tokens[start : start + PAGE_SIZE]))


def report(pool: PagePool, changed: set[int], target: TargetView) -> None:
    held = pool.prefixes.hashes
    indexed, evicted = [h for h in changed if h in held], [h for h in changed if h not in held]
    target.take(replace(ROOMY, number=target.report.number + 1, indexed=indexed, evicted=evicted))
    changed.clear()


def _found(pool: PagePool, tokens: list[int]) -> int:
    pages, _ = pool.match(blocks_of(tokens))
    pool.release(pages[::-1])
    return len(pages) * PAGE_SIZE


# What is known of a target.


def test_what_was_sent_counts_until_the_target_reports_it() -> None:
    target = view("target", sessions=2, unread_tokens=100, free_places=2)
    assert target.expected_tokens == 100 + 2 * ANSWER_TOKENS
    target.count_open(500)
    target.count_open(300)
    assert target.expected_tokens == 900 + 4 * ANSWER_TOKENS and not target.has_room(1)
    target.take(replace(ROOMY, number=2, opens=1, sessions=3, unread_tokens=600))
    assert list(target.unreported) == [(300, 300)]
    target.take(Report(number=1, opens=2))  # comes late
    assert list(target.unreported) == [(300, 300)]
    target.forget()
    assert not target.unreported and not target.prefixes


@given(st.integers(0, 3), st.integers(0, 40), st.integers(0, 3), st.lists(st.integers(1, 200), max_size=4))
def test_a_target_is_full_where_a_session_would_neither_run_nor_wait(
    places: int, pages: int, queue: int, sent: list[int]
) -> None:
    target = view("target", free_places=places, free_kv_pages=pages, queue_places=queue)
    for tokens in sent:
        target.count_open(tokens)
    needs = [pages_for(tokens + 2) for tokens in (*sent, 50)]
    running = max(n for n in range(len(needs) + 1) if n <= places and sum(needs[:n]) <= pages)  # the others wait
    assert target.is_full(50) == (len(needs) - running > queue)
    assert not (target.is_full(50) and target.has_room(50))
    if target.is_full(50):
        with pytest.raises(ResourceExhausted, match="full"):
            admit([target], 50)
    else:
        assert admit([target], 50) == [target]


# The choice.


def test_a_session_goes_where_its_prefix_is_unless_more_is_ahead_of_it_there_than_that_saves() -> None:
    prompt = text(40)
    for ahead, chosen in ((0, "warm"), (400, "warm"), (700, "cold")):
        views = [view("cold"), view("warm", prompt[:512], unread_tokens=ahead)]
        assert choose(views, prompt).name == chosen
    views = [view("warm", prompt[:512]), view("warmer", prompt[:560])]
    assert choose(views, prompt).name == "warmer"


def test_sessions_that_come_at_once_go_where_each_ones_prefix_is() -> None:
    """What a target finds in its KV is not ahead of the next one."""
    views = [view("a"), view("b")]
    prompts = [(views[number // 4], text(400, number * 10**5)) for number in range(8)]
    for warm, prompt in prompts:
        warm.prefixes.update(prefix_hashes(prompt))
    assert all(choose(views, prompt) is warm for warm, prompt in prompts)
    assert choose(views, text(400, 10**7)).expected_tokens == 400 * PAGE_SIZE + 5 * ANSWER_TOKENS


def test_a_session_goes_where_it_runs_at_once() -> None:
    prompt = text(40)
    full = view("full", prompt, waiting=1)
    tight = view("tight", prompt, free_kv_pages=40)
    busy = view("busy", sessions=50, unread_tokens=10**5)
    assert choose([full, tight, busy], prompt) is busy


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_load_is_spread_evenly_over_equal_targets(lengths: list[int]) -> None:
    """No target has more ahead of it than another one and the largest session together."""
    views, sent = [view(name) for name in "abcd"], Counter[str]()
    for number, length in enumerate(lengths):
        chosen = choose(views, [1000 + number] * length)
        sent[chosen.name] += length + ANSWER_TOKENS
    loads = [sent[name] for name in "abcd"]
    assert max(loads) - min(loads) <= max(lengths) + ANSWER_TOKENS
