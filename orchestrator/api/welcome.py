"""The lines that a launch prints once it serves: where to ask, what was chosen, how many sessions KV has room for."""

import json
import shlex
from collections.abc import Iterable

from orchestrator.cluster.directory import side_of
from orchestrator.cluster.service_status import Statuses
from orchestrator.requests.records import Limits
from specahead.config.launch import ClientSettings
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.wire.plan_words import plan_in_words

_SHORT = 1024  # tokens of a short session


def welcome(
    url: str,
    clients: ClientSettings,
    limits: Limits,
    sessions: int,
    has_template: bool,
    services: Statuses,
    placement: str,
) -> Iterable[str]:
    """Yield the lines.

    sessions: that a target runs at once. has_template: whether the model can chat. services: the status of each, by
    name. placement: how they are placed and why, empty if this launch has not placed them.
    """
    targets = [status for name, status in services.items() if side_of(name) == "target" and status is not None]
    yield f"dashboard: {url}/dashboard"
    if placement:
        yield f"placement: {placement}"
    for plan in {plan_in_words(status.gauges) for status in targets} - {""}:
        yield f"policy: {plan}"
    if targets:
        rooms = [round(status.gauges.get("kv_pages", 0)) * PAGE_SIZE for status in targets]
        yield room_in_words(min(rooms), len(rooms), sessions, limits.longest)
    yield f"try: {curl_line(url, clients, has_template)}"


def room_in_words(tokens: int, targets: int, sessions: int, longest: int) -> str:
    """Return for how many long and short sessions KV has room. tokens: of KV in the smallest target."""
    each = f" in each of {targets} targets" if targets > 1 else ""
    lengths = sorted({longest, min(_SHORT, longest)}, reverse=True)
    counts = [f"{min(sessions, tokens // length)} of {length:,} tokens" for length in lengths]
    return f"KV room: {tokens:,} tokens{each}; sessions at once: {', or '.join(counts)}"


def curl_line(url: str, clients: ClientSettings, has_template: bool) -> str:
    """Return a command that asks the server a question. A key is taken from the environment."""
    body: dict[str, object] = {"max_tokens": 32}
    if has_template:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Tell me of the sea."}]
    else:
        path, body["prompt"] = "completions", "The old man looked at the sea and"
    key = ' -H "Authorization: Bearer $SPECAHEAD_API_KEY"' if clients.api_key or clients.api_keys_file else ""
    signed = f" --cacert {shlex.quote(clients.tls.cert)}" if clients.tls.cert else ""
    json_header = "-H 'Content-Type: application/json'"
    return f"curl{signed} {url}/v1/{path}{key} {json_header} -d {shlex.quote(json.dumps(body))}"
