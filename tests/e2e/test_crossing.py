"""Draft and target as far apart as two machines: what each says is still under way while the other speaks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.client import APPROXIMATE, EXACT, Result, generate, metric, read_by_rounds, wait_until_idle
from tests.lines import Line, lines
from tests.stack import Stack, start_gateway, start_services

ONE_WAY = 0.02  # seconds; a round of the bundled pair takes less


@pytest.fixture
def distant() -> Iterator[tuple[Stack, Line]]:
    """Services whose draft dials its target over a line."""
    with lines() as opened:
        used: list[Line] = []

        def dial(address: str) -> str:
            used.append(opened.to(address))
            return used[0].address

        services = start_services(dial=dial)
        gateway = start_gateway(services)
        yield gateway, used[0]
        gateway.stop()
        services.stop()


def test_announcements_and_verdicts_that_cross_lose_nothing(
    distant: tuple[Stack, Line], books: list[str], tokenizer: Any
) -> None:
    """The draft announces rounds against selections whose verdict it does not know yet; the target knows them all."""
    gateway, line = distant
    prompts = [tokenizer.encode(book[5000:35_000])[:1500] for book in books]
    cases = [(prompt, exactness) for exactness in (EXACT, APPROXIMATE) for prompt in prompts]

    def run(case: tuple[list[int], int]) -> Result:
        return generate(gateway.stub(), case[0], max_tokens=80, ignore_eos=True, exactness=case[1])

    def events(name: str) -> float:
        return metric(gateway.http, "service_events_total", service="target", name=name)

    near = [run(case) for case in cases]
    before = {name: events(name) for name in ("foreseen_rounds", "stale_frames")}
    line.delay = ONE_WAY
    with ThreadPoolExecutor(len(cases)) as pool:
        results = list(pool.map(run, cases))
    for (_, exactness), result, reference in zip(cases, results, near, strict=True):
        assert len(result.tokens) == 80
        speculation = result.speculation
        if exactness == EXACT:
            assert result.tokens == reference.tokens
        else:
            assert speculation.announced_bytes > 0
            assert read_by_rounds(speculation) <= 0.12
    for name, count in before.items():  # said while the verdict was under way: what met it, and what did not
        assert events(name) > count, name
    assert events("refused_frames") == 0, "the target knows each selection that an announcement is made against"
    assert events("rejected_events") == 0
    wait_until_idle(gateway.http)
