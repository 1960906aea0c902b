"""What the process of a service does when the service fails; Ray is played by the test."""

import logging
from concurrent.futures import Future
from typing import Any

import pytest

import target_service.service
from orchestrator.cluster import service_actor
from orchestrator.cluster.service_actor import ServiceActor, share_of_cores
from specahead.config.logs import log_once
from tests.settings import target_settings


class Ended(BaseException):
    """Instead of the process's end."""


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> ServiceActor:
    """An actor whose service fails as soon as it is run."""

    async def fail(settings: Any, on_ready: Any) -> None:
        raise ValueError("there is no such model")

    def end(status: int) -> None:
        assert status == 1
        raise Ended

    monkeypatch.setattr(target_service.service, "run", fail)
    monkeypatch.setattr(service_actor.os, "_exit", end)
    made = ServiceActor.__new__(ServiceActor)
    made._listening, made._served_before = Future(), False
    return made


@pytest.mark.parametrize(
    ("cores", "neighbours", "threads"), [(2, 2, 1), (16, 2, 8), (16, 1, 16), (16, 3, 5), (2, 5, 1)]
)
def test_the_services_of_a_node_share_out_all_its_cores(
    cores: int, neighbours: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_actor.os, "sched_getaffinity", lambda _: set(range(cores)))
    assert share_of_cores(neighbours) == threads


def test_a_service_that_fails_before_it_ever_served_says_why(
    actor: ServiceActor, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: its log, which the launch shows as well, has nothing of it."""
    actor._run(target_settings())
    with pytest.raises(RuntimeError, match="there is no such model"):
        actor.where()
    assert not caplog.records


@pytest.mark.parametrize("served", ["before it was started again", "now"])
def test_a_service_that_has_served_and_fails_ends_its_process(actor: ServiceActor, served: str) -> None:
    """So that Ray starts it again, also where it was started again and fails before it serves."""
    if served == "now":
        actor._listening.set_result(("127.0.0.1:1", 1))
    else:
        actor._served_before = True
    with pytest.raises(Ended):
        actor._run(target_settings())


def test_what_services_say_alike_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    logged: set[str] = set()
    alike = (logging.WARNING, "a", "low priority", {"nice": 5})
    own = (logging.WARNING, "a", "loading", {"model": "x"})
    log_once({"target": [alike, own], "draft": [alike]}, logged)
    log_once({"target": [own], "draft": [alike]}, logged)
    said = [(record.getMessage(), vars(record)["service"]) for record in caplog.records]
    assert said == [("low priority", "target, draft"), ("loading", "target")]
