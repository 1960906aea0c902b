"""Bugs that are put into the product one at a time: the simulator must find each of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from orchestrator.cluster.supervision import Supervisor
from orchestrator.sessions.ledger import Ledger, Record
from orchestrator.sessions.router import Router
from orchestrator.sessions.routing import TargetView
from orchestrator.sessions.target_stream import TargetStream
from specahead.wire.errors import error_from_code
from specahead.wire.messages import At, Closed, Commit
from target_service.admission import Admission
from target_service.servicer import ControlServicer
from target_service.session import TargetSession
from tests.simulation.runs import run_seed


def hung_services_stay() -> AbstractContextManager[Any]:
    """Services that die are started again, but services that hang are not replaced."""

    async def replace(self: Supervisor, name: str) -> bool:
        return True

    return patch.object(Supervisor, "_replace", replace)


def sessions_of_a_lost_gateway_stay() -> AbstractContextManager[Any]:
    """When a Serve stream breaks, its sessions continue though nobody reads them."""
    return patch.object(ControlServicer, "_leave", lambda self, account: None)


def stopping_targets_fail_requests() -> AbstractContextManager[Any]:
    """When a target stops, the router fails its requests at once and does not wait for the next target."""
    real = Router.receive

    def receive(self: Any, session: Any, event: Any) -> None:
        real(self, session, event)
        if isinstance(event, Closed):
            self._tell(session, error_from_code(event.code, event.message))

    return patch.object(Router, "receive", receive)


def pages_are_freed_during_steps() -> AbstractContextManager[Any]:
    """An aborted session frees its pages while the step that writes them still runs."""
    real = Admission.close

    def close(self: Any, session: TargetSession) -> None:
        real(self, session)
        self.release_closed()

    return patch.object(Admission, "close", close)


def repeats_are_written_down_again() -> AbstractContextManager[Any]:
    """The ledger applies a commit twice."""
    real = Ledger.apply

    def apply(self: Ledger, commit: Commit) -> Record | None:
        record = self.records.get(commit.at.session)
        if record is not None and commit.at.base < len(record.tokens):
            commit = Commit(At(record.session, *commit.at[1:3], len(record.tokens)), commit.tokens)
        return real(self, commit)

    return patch.object(Ledger, "apply", apply)


def lost_targets_are_not_resumed_on() -> AbstractContextManager[Any]:
    """Sessions of a lost target are not opened again."""
    return patch.object(Router, "_lives", lambda self, stream: False)


def what_targets_evict_is_remembered() -> AbstractContextManager[Any]:
    """A router believes that its target still holds prefixes which it evicted."""
    real = TargetView.take
    return patch.object(TargetView, "take", lambda self, report: real(self, replace(report, evicted=[])))


def other_orchestrators_sessions_have_the_same_names() -> AbstractContextManager[Any]:
    """Two gateways give their sessions the same names, and one is told that its session is open already."""
    real = TargetStream.open
    return patch.object(TargetStream, "open", lambda self, record, number: real(_without_origin(self), record, 0))


def what_a_lost_target_had_accepted_is_refused() -> AbstractContextManager[Any]:
    """Sessions of a lost target are opened elsewhere as new ones, for which a full queue has no place."""
    real = Record.to_open
    return patch.object(Record, "to_open", lambda self: replace(real(self), resumed=False))


def what_a_lost_target_had_accepted_is_evicted() -> AbstractContextManager[Any]:
    """Sessions of a lost target give their places in the queue to new sessions of another peer."""
    return patch.object(Admission, "_evictable", lambda self: list(self.queue))


def _without_origin(stream: TargetStream) -> TargetStream:
    stream._origin = ""
    return stream


OLD_BUGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    bug.__name__: bug
    for bug in (
        hung_services_stay,
        sessions_of_a_lost_gateway_stay,
        stopping_targets_fail_requests,
        pages_are_freed_during_steps,
        repeats_are_written_down_again,
        lost_targets_are_not_resumed_on,
        what_targets_evict_is_remembered,
        other_orchestrators_sessions_have_the_same_names,
    )
}

# Scenario.full finds these: one of two targets is killed while the other one is full.
BUGS_OF_FULL_TARGETS = (what_a_lost_target_had_accepted_is_refused, what_a_lost_target_had_accepted_is_evicted)


def find(bug: str, seeds: range) -> tuple[int, str] | None:
    """Return the first seed that finds a bug, and its violation; None if no seed does."""
    for seed in seeds:
        with OLD_BUGS[bug]():
            world = run_seed(seed)
        if world.violations:
            return seed, world.violations[0]
    return None
