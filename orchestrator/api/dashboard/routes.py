"""`/dashboard`, a page that anyone may load, and the data that it asks for with a key."""

import asyncio
import base64
import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, StreamingResponse

from orchestrator.api.dashboard.feed import ROUND_FIELDS
from orchestrator.api.dashboard.history import BUCKETS, SAMPLE_FIELDS, SAMPLE_SECONDS
from orchestrator.cluster.service_status import Statuses, StatusReader, gauges_of_targets
from orchestrator.requests.callers import Caller, current_caller
from orchestrator.sessions.generation import Frontend
from specahead import models
from specahead.config.speculation import WITHOUT_DRAFT
from specahead.wire.plan_words import plan_in_words

FOLDER = Path(__file__).parent
SCRIPTS = ("charts.js", "sessions.js", "trial.js", "page.js")
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
    """Return the page with its style and scripts inside, and its security policy, which allows these and calls of this
    server.
    """
    page, style = (_read(name) for name in ("page.html", "page.css"))
    script = "".join(map(_read, SCRIPTS))
    text = page.replace("<style></style>", f"<style>{style}</style>").replace(
        "<script></script>", f"<script>{script}</script>"
    )
    policy = f"default-src 'none'; script-src {_hash_of(script)}; style-src {_hash_of(style)}; connect-src 'self'"
    return text, f"{policy}; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash_of(inline: str) -> str:
    """Return the name of an inline script or style in a policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


@router.get("/dashboard/story")
async def tell_story() -> Response:
    """Give the text that long prompts for trials are made of."""
    return PlainTextResponse(models.DEMO_TEXT.read_text(encoding="utf-8"))


@router.get("/dashboard/events")
async def follow(request: Request) -> Response:
    """Stream what happens as server-sent events until the client leaves."""
    state = request.app.state
    state.frontend.observer.feed.check_room()  # before the stream begins, so that a refusal has an HTTP status
    events = _events(current_caller(), state.frontend, state.read_status)
    texts = (f"data: {json.dumps(event)}\n\n" async for event in events)
    return StreamingResponse(texts, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _events(caller: Caller, frontend: Frontend, read_status: StatusReader) -> AsyncIterator[dict[str, Any]]:
    limits, feed, history = frontend.limits, frontend.observer.feed, frontend.observer.history
    hello = {"model": frontend.name, "draft": frontend.draft_name, "longest": limits.longest}
    names = {"round_fields": ROUND_FIELDS, "sample_fields": SAMPLE_FIELDS, "sample_seconds": SAMPLE_SECONDS}
    yield {"type": "hello", **hello, **names, "buckets": BUCKETS}
    seen = 0  # when the newest sample began that was sent
    with feed.viewer(caller.name) as viewer:
        for tick in itertools.count():
            if not caller.allowed:
                return
            if tick % STATUS_TICKS == 0:
                samples = history.since(seen)  # the last one sent may have grown
                seen = samples[-1].time if samples else seen
                yield _status(frontend, await read_status()) | {"samples": [[*vars(each).values()] for each in samples]}
            event = feed.take(viewer)
            if event is not None:
                yield event
            await asyncio.sleep(TICK_SECONDS)


def _status(frontend: Frontend, services: Statuses) -> dict[str, Any]:
    gauges, running = gauges_of_targets(services), frontend.router.running
    attached = any(status is not None and status.attached for status in services.values())
    waiting = min(running, int(gauges.get("queued_sessions", 0)))
    return {
        "type": "status",
        "time": time.time(),
        "running": running - waiting,
        "waiting": waiting,
        "kv_held": gauges.get("kv_pages_held", 0),
        "kv_pages": gauges.get("kv_pages", 0),
        "target": frontend.router.connected,
        "plans": {name: plan for name, each in services.items() if each and (plan := plan_in_words(each.gauges))},
        "draft": attached or frontend.draft_name in WITHOUT_DRAFT,
    }
