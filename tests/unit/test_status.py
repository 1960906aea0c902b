"""What /metrics and `specahead status` tell of a launch of several services."""

from orchestrator.sessions.metrics import Metrics
from orchestrator.sessions.router import TargetState
from specahead.cli.status import _nodes, _read_metrics
from specahead.wire.messages import ServiceStatus
from specahead.wire.plan_words import plan_in_words
from target_service.policy.choice import Choice
from target_service.policy.plans import PLAIN, Proposer, RoundPlan

ADDRESSES = {"target-1": "10.0.0.1:7", "target-2": "10.0.0.2:7", "draft": "10.0.0.1:8"}


def _service(pid: int, attached: list[str], sessions: int, held: int) -> ServiceStatus:
    gauges = {"pid": pid, "sessions": sessions, "kv_pages_held": held, "kv_pages": 100, "queued_sessions": 1}
    return ServiceStatus("any", pid, attached, "", {"rounds": 5.0}, gauges, "1.2")


STATUSES = {"target-1": _service(11, ["draft"], 2, 30), "target-2": None, "draft": _service(13, ["target-1"], 2, 5)}


def test_each_service_is_told_with_its_side_its_address_and_its_version() -> None:
    text = Metrics("tiny").exposition(3, STATUSES, ADDRESSES, {}).decode()
    figures, services = _read_metrics(text)
    assert list(services) == ["target-1", "target-2", "draft"]
    assert services["target-1"].items() >= {"side": "target", "version": "1.2", "sessions": 2, "up": 1}.items()
    silent = {"model": "tiny", "side": "target", "address": "10.0.0.2:7", "version": "", "up": 0, "attached": 0}
    assert services["target-2"] == silent
    assert _nodes(services) == {"10.0.0.1": ["target-1", "draft"], "10.0.0.2": ["target-2"]}
    assert (figures["tiny"]["num_requests_waiting"], figures["tiny"]["num_requests_running"]) == (1, 2)


def test_what_targets_hold_and_have_waiting_is_summed_over_them() -> None:
    both = STATUSES | {"target-2": _service(12, ["draft"], 1, 60)}
    figures, _ = _read_metrics(Metrics("tiny").exposition(9, both, ADDRESSES, {}).decode())
    assert (figures["tiny"]["num_requests_waiting"], figures["tiny"]["num_requests_running"]) == (2, 7)
    assert figures["tiny"]["kv_cache_usage_perc"] == 0.45


def test_the_choice_of_a_plan_is_explained_in_words() -> None:
    drafted = RoundPlan(Proposer.DRAFT, 4, sparse=True, held=16)
    assert plan_in_words(Choice(drafted, 2342.4, PLAIN, 910.0).gauges) == (
        "the draft model proposes 4 tokens a round, approximate requests read announced blocks, exact requests hold up "
        "to 16 tokens for one dense pass; 2,342 tokens a second expected; next best: plain decoding, 910"
    )
    assert plan_in_words(Choice(PLAIN, 910.0, None, 0.0).gauges) == "plain decoding; 910 tokens a second expected"
    assert plan_in_words({"pid": 7}) == ""
    services = {"target-1": _service(11, [], 2, 30)}
    services["target-1"].gauges.update(Choice(drafted, 2342.4, PLAIN, 910.0).gauges)
    _, told = _read_metrics(Metrics("tiny").exposition(3, services, ADDRESSES, {}).decode())
    assert plan_in_words(told["target-1"]).endswith("next best: plain decoding, 910")


def test_what_a_router_does_with_each_target_is_told() -> None:
    targets = {"target-1": TargetState(True, 2, 40), "target-2": TargetState(False, 0, 7)}
    lines = Metrics("tiny").exposition(2, STATUSES, ADDRESSES, targets).decode().splitlines()
    figures = {"target_serving": (1, 0), "target_sessions": (2, 0), "routed_requests_total": (40, 7)}
    for name, values in figures.items():
        for target, value in zip(targets, values, strict=True):
            assert f'specahead:{name}{{model_name="tiny",target="{target}"}} {value}.0' in lines
