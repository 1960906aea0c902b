"""`/dashboard`, a page that anyone may load, and the data that it asks for with a key."""

import asyncio
import base64
import hashlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse

from orchestrator.cluster.service_status import gauges_of_targets
from orchestrator.requests.callers import Caller, current_caller
from orchestrator.sessions.generation import Frontend
from specahead.config.speculation import WITHOUT_DRAFT
from specahead.wire.messages import ServiceStatus
from specahead.wire.plan_words import plan_in_words

PAGE = Path(__file__).parent / "page.html"
TICK_SECONDS = 0.25
STATUS_TICKS = 4  # from one status of the services to the next

router = APIRouter(include_in_schema=False)


@router.get("/")
async def lead_to_page() -> Response:
    """Lead to the page."""
    return RedirectResponse("dashboard")


@router.get("/dashboard")
async def show_page() -> Response:
    """Give the page."""
    text, policy = _page()
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return HTMLResponse(text, headers=headers | {"X-Content-Type-Options": "nosniff"})


@cache
def _page() -> tuple[str, str]:
    """Return the page and its security policy, which allows its own script and style, and calls of this server."""
    text = PAGE.read_text(encoding="utf-8")
    script, style = (_hash_of(text, tag) for tag in ("script", "style"))
    policy = f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:"
    return text, f"{policy}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _hash_of(page: str, tag: str) -> str:
    """Return the name of a page's one inline script or style in a policy."""
    (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


@router.get("/dashboard/events")
async def follow(request: Request) -> Response:
    """Stream what happens as server-sent events until the client leaves."""
    state = request.app.state
    state.frontend.observer.feed.check_room()  # before the stream begins, so that a refusal has an HTTP status
    events = _events(current_caller(), state.frontend, state.read_status)
    texts = (f"data: {json.dumps(event)}\n\n" async for event in events)
    return StreamingResponse(texts, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _events(
    caller: Caller, frontend: Frontend, read_status: Callable[[], Awaitable[Mapping[str, ServiceStatus | None]]]
) -> AsyncIterator[dict[str, Any]]:
    yield {"type": "hello", "model": frontend.name, "draft": frontend.draft_name}
    feed = frontend.observer.feed
    with feed.viewer(caller.name) as viewer:
        for tick in itertools.count():
            if not caller.allowed:
                return
            if tick % STATUS_TICKS == 0:
                yield _status(frontend, await read_status())
            event = feed.take(viewer)
            if event is not None:
                yield event
            await asyncio.sleep(TICK_SECONDS)


def _status(frontend: Frontend, services: Mapping[str, ServiceStatus | None]) -> dict[str, Any]:
    gauges, running = gauges_of_targets(services), frontend.router.running
    attached = any(status is not None and status.attached for status in services.values())
    waiting = min(running, int(gauges.get("queued_sessions", 0)))
    return {
        "type": "status",
        "running": running - waiting,
        "waiting": waiting,
        "kv_held": gauges.get("kv_pages_held", 0),
        "kv_pages": gauges.get("kv_pages", 0),
        "target": frontend.router.connected,
        "plans": {name: plan for name, each in services.items() if each and (plan := plan_in_words(each.gauges))},
        "draft": attached or frontend.draft_name in WITHOUT_DRAFT,
    }


def _is_drafted(frontend: Frontend, services: Mapping[str, ServiceStatus | None]) -> bool:
    attached = any(status is not None and status.attached for status in services.values())
    return attached or frontend.draft_name in WITHOUT_DRAFT
