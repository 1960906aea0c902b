"""The checks of a run: who may get which error, that nothing is left of any request, and that counters add up."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from draft_service.drafter import Drafter
from orchestrator.sessions.generation import Frontend
from orchestrator.sessions.metrics import OURS
from target_service.patience import LEAST_SECONDS
from target_service.verifier import Verifier
from tests.simulation.clients import Client
from tests.simulation.faults import Faults
from tests.simulation.process import Process
from tests.simulation.scenario import DRAFT, Scenario

# A session is given up at the third loss of its target without a token in between (Router).
_LOSSES = 3


def is_connected(processes: Iterable[Process], made: Mapping[Process, Any], scenario: Scenario) -> bool:
    """Return whether all processes run, every router has its targets, and every target all drafts."""
    for process in processes:
        actor = made.get(process)
        if not process.alive or actor is None:
            return False
        if isinstance(actor, Frontend) and not all(stream.connected for stream in actor.router.targets.values()):
            return False
        drafts = 1 if scenario.draft_in_target else scenario.draft_services
        if isinstance(actor, Verifier) and len(actor.protocol.drafts) != drafts:
            return False
        if isinstance(actor, Drafter) and len(actor._peers) != scenario.targets:
            return False
    return True


def left_over(process: Process, actor: Any, tasks_at_rest: int) -> Iterator[str]:
    """Yield descriptions of what a process still holds although no request is open."""
    held: dict[str, int] = {}
    if isinstance(actor, Verifier):
        admission = actor.admission
        held = _sizes(admission) | {"pages": actor.runner.kv.pool.held}
        held |= {f"sessions of {draft.name}": len(draft.sessions) for draft in actor.protocol.drafts}
    elif isinstance(actor, Drafter):
        held = _sizes(actor.admission) | {"pages": actor.runner.kv.pool.held, "sessions": actor.session_count}
    elif isinstance(actor, Frontend):
        held = {"records": len(actor.router.ledger.records), "readers": actor.router.running}
        held |= {f"sessions on {name}": stream.sessions for name, stream in actor.router.targets.items()}
    for name, count in held.items():
        if count:
            yield f"{process.name} is left with {count} {name}"
    if isinstance(actor, Verifier | Drafter):
        actor.runner.kv.pool.check_integrity()
        if actor.runner.unprepared:
            yield f"{process.name} is not ready for {actor.runner.unprepared} kinds of steps, though nobody asks"
    tasks = process.running
    if len(tasks) != tasks_at_rest:
        names = Counter(getattr(task.get_coro(), "__qualname__", "generator") for task in tasks)
        yield f"{process.name} has {len(tasks)} tasks, {tasks_at_rest} at the beginning: {dict(names)}"


def _sizes(owner: Any) -> dict[str, int]:
    """Return the size of each collection of an object that holds requests."""
    collections = {name: value for name, value in vars(owner).items() if hasattr(value, "__len__")}
    others = "_counters", "_methods", "_peers"
    return {name: len(value) for name, value in collections.items() if name not in others}


def unowned_sessions(processes: Mapping[str, Process], made: Mapping[Process, Any]) -> list[tuple[str, str]]:
    """Return the sessions, by target, that run although the stream that opened them has ended."""
    running = [(name, process) for name, process in processes.items() if process.alive and not process.stopped]
    actors = [(name, made.get(process)) for name, process in running]
    targets = [(name, actor) for name, actor in actors if isinstance(actor, Verifier)]
    everyone = [(name, session) for name, target in targets for session in target.admission.everyone()]
    return [(name, session.id) for name, session in everyone if session.asked.emit.__self__._closed]  # type: ignore[attr-defined]


def wrong_views(processes: Mapping[str, Process], made: Mapping[Process, Any]) -> Iterator[str]:
    """Yield where a router does not know what its target holds."""
    for name, process in processes.items():
        frontend = made.get(process)
        for stream in frontend.router.targets.values() if isinstance(frontend, Frontend) else ():
            target = made.get(processes[stream.view.name])
            view = stream.view
            if isinstance(target, Verifier) and view.prefixes != set(target.runner.kv.pool.prefixes.hashes):
                yield f"{name} does not know which prefixes {view.name} holds"
            if view.unreported or view.report.sessions:
                yield f"{name} counts {view.report.sessions} + {len(view.unreported)} sessions of {view.name}"


def refused_after_all(clients: list[Client], accepted: set[str]) -> Iterator[str]:
    """Yield which clients were refused for lack of a place after a target had accepted their request.

    accepted: names of the sessions that targets had when they ended. Requests with several choices are left out, since
    some of the choices may have been refused at first.
    """
    names = Counter(client.request.name for client in clients)
    for client in clients:
        request = client.request
        was_there = request.name in accepted and client.attempts == names[request.name] == 1
        is_refused = client.outcome == "RESOURCE_EXHAUSTED" and request.choices == 1
        if is_refused and (was_there or any(client.got.values())):
            yield f"client {request.name}: accepted, got {client.got}, and refused then: {client.details}"


def wrong_outcomes(clients: list[Client], faults: Faults, scenario: Scenario) -> Iterator[str]:
    """Yield which clients got an error that no fault explains."""
    asked = [(client, {client.request.gateway, client.gateway}) for client in clients]
    names = Counter((gateway, client.request.name) for client, gateways in asked for gateway in gateways)
    is_crowded = sum(client.request.choices for client in clients) > scenario.max_queued
    for client in clients:
        is_only = names[client.gateway, client.request.name] == 1 and client.attempts == 1
        if not _may_end_so(client, faults, scenario, is_only, is_crowded):
            yield (
                f"client {client.request.name} of gateway-{client.gateway} got {client.outcome} "
                f"({client.details}) at {client.ended:.3f} s without a reason"
            )


def _may_end_so(client: Client, faults: Faults, scenario: Scenario, is_only: bool, is_crowded: bool) -> bool:
    request, took = client.request, client.ended - client.started
    gateway, targets = f"gateway-{client.gateway}", scenario.targets_of(client.gateway)
    match client.outcome:
        case "stop" | "length" | "abort" | "left":
            return True
        case "DEADLINE_EXCEEDED":
            limits = [limit for limit in (request.timeout, scenario.request_timeout or None) if limit is not None]
            return any(took > limit - 1e-6 for limit in limits)
        case "RESOURCE_EXHAUSTED":
            return is_crowded
        case "INVALID_ARGUMENT":
            return not is_only
        case "INTERNAL":
            kinds = ("failing target steps", "no numbers")
            return any(faults.count(set(targets), 0, client.ended, kind) for kind in kinds)
        case "UNAVAILABLE":
            return _may_be_unavailable(client, faults, gateway, targets, scenario)
    return False


def _may_be_unavailable(client: Client, faults: Faults, gateway: str, targets: list[str], scenario: Scenario) -> bool:
    """Return whether faults explain UNAVAILABLE: each target must have had some.

    A lost Ray takes several targets with it, one after the other, but is no explanation by itself.
    """
    details, end = client.details, client.ended
    if "again and again" in details:
        concerned = faults.concerning({gateway, *targets}, client.started - 10, end)
        return len(concerned) > 1 and sum(max(1, len({*fault.names} & {*targets})) for fault in concerned) >= _LOSSES
    if "did not come back" in details:
        return all(faults.count({gateway, target}, 0, end - scenario.resume_timeout) > 0 for target in targets)
    if "no target is connected" in details:
        return not any(client.got.values()) and all(faults.count({gateway, target}, 0, end) > 0 for target in targets)
    return faults.count({gateway}, 0, end) > 0


def wrong_counters(clients: list[Client], frontends: list[Frontend], verifiers: list[Verifier]) -> Iterator[str]:
    """Yield where the tokens that clients got, gateways counted and targets committed do not add up."""
    got = sum(len(tokens) for client in clients for tokens in client.got.values())
    counted = sum(_metric(frontend, f"{OURS}generation_tokens_total") for frontend in frontends)
    committed, retold = (
        sum(verifier.counters[name] for verifier in verifiers) for name in ("committed_tokens", "retold_tokens")
    )
    if not got <= counted <= committed + retold:
        yield f"clients got {got} tokens, gateways counted {counted:g}, targets told {committed} and {retold} again"
    if all(client.outcome in ("stop", "length") and client.attempts == 1 for client in clients) and got != counted:
        yield f"all clients came to their end with {got} tokens, gateways counted {counted:g}"
    for verifier in verifiers:
        counters = verifier.counters
        if counters["aborted_sessions"] + counters["failed_sessions"] > counters["opened_sessions"]:
            yield f"a target ended more sessions than it opened: {dict(counters)}"


def useless_drafts(clients: list[Client], verifiers: list[Verifier], scenario: Scenario) -> Iterator[str]:
    """Yield a violation if many rounds were plain although the drafts are mostly right and nothing went wrong.

    Shared drafts may read prompts for longer than a target waits for them. Where the services choose γ, plain rounds
    may be the fastest. Such runs are left out.
    """
    prompts = sum(len(client.request.prompt) * client.request.choices for client in clients)
    readers = scenario.draft_services or scenario.targets
    reading_seconds = prompts / scenario.prefill_chunk * scenario.step_seconds / readers
    is_fit = (
        scenario.gamma_setting is not None
        and scenario.hold == 0  # whose rounds that take tokens back are plain
        and not scenario.lookup  # behind whose guesses a draft begins anew
        and scenario.draft == DRAFT
        and scenario.draft_pages >= 400
        and scenario.draft_errs <= 4
        and scenario.step_seconds < 0.4
    )
    if scenario.faults or scenario.repeated or not is_fit or reading_seconds > LEAST_SECONDS:
        return
    drafted = sum(verifier.counters["rounds"] for verifier in verifiers)
    plain = sum(verifier.counters["plain_rounds"] for verifier in verifiers)
    if 20 * plain > drafted:
        yield f"{plain} rounds were plain and {drafted} drafted, though nothing went wrong"


def _metric(frontend: Frontend, name: str) -> float:
    families = frontend.observer.metrics.registry.restricted_registry([name]).collect()
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)
