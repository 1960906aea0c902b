"""`specahead status`: the state of a running server and of its services, read from its HTTP endpoint."""

import argparse
import json
import sys
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Column, Table

from specahead.cli.server import Server
from specahead.config.speculation import WITHOUT_DRAFT
from specahead.wire.plan_words import plan_in_words

_WIDE = 200  # columns where the output is no terminal


def run(flags: argparse.Namespace) -> None:
    """Print tables, or one JSON object; exit with 1 if the server cannot serve now. Raises ValueError for a
    refusal of the server, OSError if it does not answer."""
    server = Server(flags)
    status = read_status(server)
    if flags.json:
        print(json.dumps(status))
    else:
        _show(status, Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE))
    if not status["ready"]:
        sys.exit(1)


def read_status(server: Server) -> dict[str, Any]:
    """Return the state of a server: its models and their requests, its services, and the services of each node."""
    ready = json.loads(server.read("/ready", refused=True))["status"] == "ok"
    cards = server.get("/v1/models")["data"]
    figures, services = _read_metrics(server.read("/metrics"))
    return {
        "url": server.url,
        "version": server.get("/version")["version"],
        "ready": ready,
        "models": [_model(card, figures[card["id"]]) for card in cards],
        "nodes": _nodes(services),
        "services": services,
    }


def _model(card: dict[str, Any], figures: dict[str, float]) -> dict[str, Any]:
    """Return the state of a model, by its card and its figures."""
    drafted = figures["spec_decode_num_draft_tokens_total"]
    accepted = figures["spec_decode_num_accepted_tokens_total"]
    return {
        "model": card["id"],
        "draft_model": card["draft"],
        "max_model_len": card["max_model_len"],
        "calibrated": card["calibrated"],
        "requests_running": figures["num_requests_running"],
        "requests_waiting": figures["num_requests_waiting"],
        "tokens_generated": figures["generation_tokens_total"],
        "acceptance": accepted / drafted if drafted else None,
    }


def _nodes(services: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the services that each node runs, by the node's address."""
    nodes: dict[str, list[str]] = {}
    for name, values in services.items():
        nodes.setdefault(values["address"].rpartition(":")[0], []).append(name)
    return nodes


def _read_metrics(text: str) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, Any]]]:
    """Return the figures of each model, and each service's state, by name. `model`, `side`, `address`, `version`,
    `up` and `attached` (how many peers it has) are there beside the service's own state; whole numbers are
    ints."""
    figures: dict[str, dict[str, float]] = {}
    services: dict[str, dict[str, Any]] = {}
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    for sample in samples:
        name, labels = sample.name.removeprefix("specahead:"), sample.labels
        value = int(sample.value) if sample.value.is_integer() else sample.value
        if name == "service_info":
            about = {key: labels[key] for key in ("side", "address", "version")}
            services[labels["service"]] = {"model": labels["model_name"]} | about
        elif name in ("service_up", "service_attached"):
            services[labels["service"]][name.removeprefix("service_")] = value
        elif name == "service_state":
            services[labels["service"]][labels["name"]] = value
        elif set(labels) == {"model_name"}:
            figures.setdefault(labels["model_name"], {})[name] = value
    return figures, services


def _show(status: dict[str, Any], console: Console) -> None:
    state = "ready" if status["ready"] else "not ready"
    console.print(f"specahead {status['version']} at {status['url']}: {state}")
    for model in status["models"]:
        _show_model(model, console)
    console.print()
    has_draft = {model["model"]: model["draft_model"] not in WITHOUT_DRAFT for model in status["models"]}
    columns = ("service", "state", "pid", "sessions", "KV pages held", "of", "KV use", "address", "version")
    table = Table(*(Column(name, overflow="fold") for name in columns), box=None)
    for name, values in status["services"].items():
        cells = _cells(values, has_draft[values["model"]])
        table.add_row(name, *cells, values["address"], values["version"])
    console.print(table)
    for name, values in status["services"].items():
        if values["up"] and values.get("sessions") and (plan := plan_in_words(values)):
            console.print(f"{name}: {plan}", soft_wrap=True)


def _show_model(model: dict[str, Any], console: Console) -> None:
    console.print(f"model {model['model']}, {model['max_model_len']} tokens of context, drafted by ", end="")
    console.print(model["draft_model"], soft_wrap=True)
    if not model["calibrated"]:
        console.print("approximate requests run without calibration: make a plan with `specahead calibrate`")
    share = "" if model["acceptance"] is None else f", {model['acceptance']:.0%} of drafted tokens accepted"
    console.print(
        f"requests: {model['requests_running']} running, {model['requests_waiting']} waiting; "
        f"{model['tokens_generated']} tokens generated{share}",
        soft_wrap=True,
    )


def _cells(values: dict[str, Any], has_draft: bool) -> list[str]:
    """Return the cells of a service in the table."""
    if not values["up"]:
        return ["does not answer", *[""] * 5]
    held, pages = values["kv_pages_held"], values["kv_pages"]
    state = "connected" if values["attached"] else "without its peer" if has_draft else "serves"
    state = "drains" if values.get("draining") else state
    return [state, *map(str, (values["pid"], values["sessions"], held, pages)), f"{held / pages:.1%}"]
