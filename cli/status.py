"""`specahead status`: how a running server and its services are, as its HTTP endpoint tells it."""

import argparse
import json
import sys
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Column, Table

from cli.server import Server
from config.sections import WITHOUT_DRAFT

_WIDE = 200  # columns where the output is no terminal


def run(flags: argparse.Namespace) -> None:
    """Print tables, or one JSON object; exit with 1 if the server cannot serve now. Raises ValueError for what the
    server refuses, OSError if it does not answer."""
    server = Server(flags)
    status = read_status(server)
    if flags.json:
        print(json.dumps(status))
    else:
        _show(status, Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE))
    if not status["ready"]:
        sys.exit(1)


def read_status(server: Server) -> dict[str, Any]:
    """Return what is known of a server: its requests, its models, its services by name and which nodes run which."""
    ready = json.loads(server.read("/ready", refused=True))["status"] == "ok"
    model = server.get("/v1/models")["data"][0]
    figures, services = _read_metrics(server.read("/metrics"))
    drafted, accepted = (figures[f"spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted"))
    return {
        "url": server.url,
        "version": server.get("/version")["version"],
        "ready": ready,
        "model": model["id"],
        "draft_model": model["draft"],
        "max_model_len": model["max_model_len"],
        "requests_running": figures["num_requests_running"],
        "requests_waiting": figures["num_requests_waiting"],
        "tokens_generated": figures["generation_tokens_total"],
        "acceptance": accepted / drafted if drafted else None,
        "nodes": _nodes(services),
        "services": services,
    }


def _nodes(services: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the services that each node runs, by the node's address."""
    nodes: dict[str, list[str]] = {}
    for name, values in services.items():
        nodes.setdefault(values["address"].rpartition(":")[0], []).append(name)
    return nodes


def _read_metrics(text: str) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Return the server's own figures by name, and each service's state by name. `side`, `address`, `version`, `up` and
    `attached` (how many peers it has) are there beside what the service tells of itself; whole numbers are ints."""
    figures: dict[str, float] = {}
    services: dict[str, dict[str, Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name, labels = sample.name.removeprefix("specahead:"), sample.labels
            value = int(sample.value) if sample.value.is_integer() else sample.value
            if name == "service_info":
                services[labels["service"]] = {key: labels[key] for key in ("side", "address", "version")}
            elif name == "service_up":
                services[labels["service"]]["up"] = value
            elif name == "service_attached":
                services[labels["service"]]["attached"] = value
            elif name == "service_state":
                services[labels["service"]][labels["name"]] = value
            elif set(labels) == {"model_name"}:
                figures[name] = value
    return figures, services


def _show(status: dict[str, Any], console: Console) -> None:
    state = "ready" if status["ready"] else "not ready"
    console.print(f"specahead {status['version']} at {status['url']}: {state}")
    console.print(f"model {status['model']}, {status['max_model_len']} tokens of context, drafted by ", end="")
    console.print(status["draft_model"], soft_wrap=True)
    share = "" if status["acceptance"] is None else f", {status['acceptance']:.0%} of drafted tokens accepted"
    console.print(
        f"requests: {status['requests_running']} running, {status['requests_waiting']} waiting; "
        f"{status['tokens_generated']} tokens generated{share}\n",
        soft_wrap=True,
    )
    columns = ("service", "state", "pid", "sessions", "KV pages held", "of", "KV use", "address", "version")
    table = Table(*(Column(name, overflow="fold") for name in columns), box=None)
    for name, values in status["services"].items():
        cells = _cells(values, status["draft_model"] not in WITHOUT_DRAFT)
        table.add_row(name, *cells, values["address"], values["version"])
    console.print(table)


def _cells(values: dict[str, Any], has_draft: bool) -> list[str]:
    """Return what a service tells of itself, as the table shows it."""
    if not values["up"]:
        return ["does not answer", *[""] * 5]
    held, pages = values["kv_pages_held"], values["kv_pages"]
    state = "connected" if values["attached"] else "without its peer" if has_draft else "serves"
    return [state, *map(str, (values["pid"], values["sessions"], held, pages)), f"{held / pages:.1%}"]
