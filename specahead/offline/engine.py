"""The services and what prepares requests for them, on an event loop in a thread of this process.

They are the services that `specahead serve` places, and speak gRPC on loopback with a token of their own.
"""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import uvloop

from draft_service.service import run as run_draft
from orchestrator.api.endpoints import connect, make_frontend, resolve_context
from orchestrator.cluster.directory import Directory
from orchestrator.cluster.placement import addresses_in
from orchestrator.cluster.service_status import Lines
from orchestrator.launch import with_token
from orchestrator.sessions.generation import Frontend
from orchestrator.sessions.router import Router
from specahead.config import Config
from specahead.wire.access import read_peer_access
from specahead.wire.errors import Unavailable
from specahead.wire.server import OnReady
from specahead.wire.tasks import end_tasks, run_together
from target_service.service import run as run_target

_END_SECONDS = 10.0  # that services take to end, at most
_SETTLE_SECONDS = 0.1  # in which a call ends whose client has left; gRPC reports one that ends with its server
Result = TypeVar("Result")
Run = Callable[[OnReady], Coroutine[Any, Any, None]]


class Engine:
    """Loads the models and serves until it is closed. Raises what loading raises."""

    def __init__(self, config: Config) -> None:
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Frontend]] = Future()
        self._ended: Future[None] = Future()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(config,), name="specahead", daemon=True)
        self._thread.start()
        self._loop, self._stop, self.frontend = self._started.result()

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run work on the event loop, and return what it returns.

        Raises what it raises, and RuntimeError if the services have ended.
        """
        if self._ended.done():
            work.close()
            raise self._ending()
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        awaited: list[Future[Any]] = [asked, self._ended]
        try:
            wait(awaited, return_when=FIRST_COMPLETED)
            if asked.done():
                return asked.result()
        except (CancelledError, Unavailable):  # the services end, or are about to
            if not wait([self._ended], _END_SECONDS).done:
                raise
        except BaseException:  # Ctrl-C, say
            asked.cancel()
            raise
        raise self._ending()

    def _ending(self) -> RuntimeError:
        """Return the error of calls after the end."""
        ending = RuntimeError("this LLM is closed" if self._error is None else f"a service failed: {self._error}")
        ending.__cause__ = self._error
        return ending

    def close(self) -> None:
        """End the services, and free their memory. More calls do nothing."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        gc.unfreeze()  # loaded models are out of garbage collections
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _run(self, config: Config) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(config))
        except BaseException as error:
            self._error = error
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._ended.set_result(None)

    async def _serve(self, config: Config) -> None:
        config = _placed_here(resolve_context(with_token(config)))
        stop, times = asyncio.Event(), config.clients.timeouts
        peers = read_peer_access(config.target)
        async with contextlib.AsyncExitStack() as running:
            at, target = await running.enter_async_context(_running(partial(run_target, config.target)))
            directories = {"target": Directory({"target": at}), "draft": Directory()}
            services = [target]
            if config.has_draft and not config.target.draft_in_target:
                settings = replace(config.draft, targets=(at,))
                at, draft = await running.enter_async_context(_running(partial(run_draft, settings)))
                directories["draft"].put("draft", at)
                services.append(draft)
            router = Router(directories["target"], peers, times.resume)
            frontend = make_frontend(config, router)
            running.push_async_callback(asyncio.sleep, _SETTLE_SECONDS)  # once the router has left the services
            await running.enter_async_context(router.connected_to_targets())
            await connect(config, frontend, Lines(directories.values(), peers), partial(addresses_in, directories))
            self._started.set_result((asyncio.get_running_loop(), stop, frontend))
            await run_together(stop.wait(), *map(asyncio.shield, services))


def _placed_here(config: Config) -> Config:
    """Return the settings of services on loopback; a draft joins the target unless KV in host memory forbids that."""
    target = config.target
    placement = target.placement
    if placement == "auto":
        placement = "together" if config.draft.has_draft and not target.host_kv_memory else "apart"
    where: dict[str, Any] = {"host": "127.0.0.1", "port": 0}
    placed = replace(target, placement=placement, name="target", **where)
    return replace(config, target=placed, draft=replace(config.draft, name="draft", **where))


@contextlib.asynccontextmanager
async def _running(run: Run) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """Run a service while the context lasts; yield where it listens, and its task. Raises what it raises."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(run(lambda server: ready.set_result(server.address)))
    waited: list[asyncio.Future[Any]] = [task, ready]
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            task.result()
        yield ready.result(), task
    finally:
        await end_tasks(task)
