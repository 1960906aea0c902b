"""The served models, each with a frontend of its own, found by a request's `model`."""

import asyncio
from collections.abc import Iterator, Sequence

from orchestrator.api.dashboard.feed import Feed
from orchestrator.sessions.generation import Frontend
from orchestrator.sessions.observer import Observer
from specahead.wire.errors import InvalidArgument, NotFound


class ServedModels:
    """The frontends of all models. Their names differ, and their observers share one feed."""

    def __init__(self, frontends: Sequence[Frontend]) -> None:
        self._by_name = {frontend.name: frontend for frontend in frontends}

    def __iter__(self) -> Iterator[Frontend]:
        return iter(self._by_name.values())

    def find(self, name: str | None) -> Frontend:
        """Return the frontend of a model. Raises NotFound for a model that is not served, and InvalidArgument for no
        name where several are."""
        served = ", ".join(self._by_name)
        if not name:
            if len(self._by_name) > 1:
                raise InvalidArgument(f"model: name one of the models served here: {served}", "model")
            return self.first
        if name not in self._by_name:
            raise NotFound(f"The model `{name}` does not exist. Served here: {served}", "model", "model_not_found")
        return self._by_name[name]

    @property
    def first(self) -> Frontend:
        """The model that is listed first."""
        return next(iter(self))

    @property
    def observer(self) -> Observer:
        """The observer of requests that are refused before their model is known: the first model's."""
        return self.first.observer

    @property
    def feed(self) -> Feed:
        """The feed of dashboards."""
        return self.observer.feed

    @property
    def ready(self) -> bool:
        """Whether new requests for some model can be served."""
        return any(frontend.accepting and frontend.router.connected for frontend in self)

    def check_room(self) -> None:
        """Raise ResourceExhausted if every request to every model would be refused now.

        Called before a request is parsed, so that refusing many requests costs the running ones little.
        """
        reasons = [reason for frontend in self if (reason := frontend.router.why_full()) is not None]
        if len(reasons) == len(self._by_name):
            raise min(reasons, key=lambda reason: reason.retry_after)

    def abort(self, request_id: str) -> bool:
        """End the current caller's running requests with this id; return False if there is none."""
        return sum(frontend.abort(request_id) for frontend in self) > 0

    async def drain(self, grace: float) -> None:
        """Refuse new requests, let running ones finish for `grace` seconds, then fail the rest."""
        await asyncio.gather(*(frontend.drain(grace) for frontend in self))
