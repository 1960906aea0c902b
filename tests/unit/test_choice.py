"""Where the draft runs and how many targets there are, over machines and models."""

import logging

import pytest

from orchestrator.cluster.choice import Machine, PairSizes, choose, machine_of, with_choice
from tests.launch_settings import launch_settings

GIB = 2**30
SMALL = PairSizes(16 * GIB, 2 * GIB, 128 << 10, 32 << 10)  # 8B and 1B in 16 bits
LARGE = PairSizes(65 * GIB, 3 * GIB, 256 << 10, 28 << 10)  # 32B and 1.5B
H100, H200 = 80 * GIB, 141 * GIB
SCALES = ("--autoscaling", '{"max_targets": 4}')

# Machine, models, flags; whether target and draft are together, targets, drafts.
CHOICES = [
    (Machine(0), SMALL, (), (False, 1, 1)),
    (Machine(0), SMALL, ("--targets", "3"), (False, 3, 1)),
    (Machine(1, H100), SMALL, (), (True, 1, 0)),
    (Machine(1, H100), LARGE, (), (True, 1, 0)),  # one GPU holds both in either shape
    (Machine(2, H100), SMALL, (), (True, 2, 0)),
    (Machine(2), LARGE, (), (True, 2, 0)),  # memory is not known
    (Machine(8, H100), SMALL, (), (True, 8, 0)),
    (Machine(2, H100), LARGE, (), (False, 1, 1)),  # no longest context fits beside both
    (Machine(4, H100), LARGE, (), (False, 3, 1)),
    (Machine(8, H100), LARGE, (), (False, 6, 2)),
    (Machine(8, H100), LARGE, ("--targets", "4"), (False, 4, 2)),
    (Machine(8, H100), LARGE, ("--drafts", "1"), (False, 1, 1)),
    (Machine(8, H200), LARGE, (), (True, 8, 0)),
    (Machine(4, H100), LARGE, ("--max-model-len", "8192"), (True, 4, 0)),
    (Machine(2, H100), SMALL, ("--targets", "1"), (True, 1, 0)),
    (Machine(4, H100), SMALL, ("--targets", "3", "--drafts", "1"), (False, 3, 1)),
    (Machine(2, H100), SMALL, ("--host-kv-memory", "100"), (False, 1, 1)),
    (Machine(2, H100), SMALL, ("--node-resources", '{"draft": "small"}'), (False, 1, 1)),
    (Machine(2, H100), SMALL, ("--device", "cpu"), (False, 1, 1)),
    (Machine(4, H100), SMALL, SCALES, (True, 1, 0)),
    (Machine(4, H100), LARGE, SCALES, (False, 1, 1)),
    (Machine(2, H100), SMALL, ("--placement", "apart"), (False, 1, 1)),
    (Machine(4, H100), SMALL, ("--placement", "apart"), (False, 3, 1)),
    (Machine(2, H100), LARGE, ("--placement", "together"), (True, 2, 0)),
    (Machine(0), SMALL, ("--placement", "together"), (True, 1, 0)),
    (Machine(4, H100), LARGE, ("--tensor-parallel-size", "2"), (True, 2, 0)),
    (Machine(2, H100), LARGE, ("--tensor-parallel-size", "2"), (True, 1, 0)),
    (Machine(8, H100), LARGE, ("--tensor-parallel-size", "2", "--placement", "apart"), (False, 3, 1 + 1)),
    (Machine(8, H100), None, ("--tensor-parallel-size", "4"), (False, 2, 0)),
    (Machine(2, H100), None, (), (False, 2, 0)),
    (Machine(0), None, (), (False, 1, 0)),
]


@pytest.mark.parametrize(("machine", "sizes", "flags", "chosen"), CHOICES)
def test_where_the_draft_runs(machine: Machine, sizes: PairSizes | None, flags: tuple[str, ...], chosen: tuple) -> None:
    config = launch_settings(("--max-model-len", "32768", *flags), {})
    choice = choose(config, machine, sizes)
    assert (choice.together, choice.targets, choice.drafts) == chosen, choice.why
    assert choice.why


def test_the_choice_is_said_in_one_line_and_reaches_the_services(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config, choice = with_choice(launch_settings((), {}), Machine(2, H100))
    (record,) = caplog.records
    assert record.getMessage() == "placement: together" and record.__dict__["targets"] == 2
    assert "tokens of KV" in record.__dict__["why"]
    assert (config.target.draft_in_target, config.has_draft, config.cluster.targets) == (True, False, 2)
    assert choice.in_words.startswith("2 targets with a draft each, since ")
    apart, choice = with_choice(launch_settings((), {}), Machine(0))
    assert choice.in_words.startswith("1 target and 1 draft apart, since there is no GPU")
    assert (apart.target.draft_in_target, apart.has_draft, apart.cluster.targets) == (False, True, 1)


def test_what_ray_says_of_its_gpus() -> None:
    assert machine_of({"CPU": 8.0}) == Machine(0)
    assert machine_of({"GPU": 2.0, "accelerator_type:H100": 1.0}) == Machine(2, H100)
    mixed = {"GPU": 4.0, "accelerator_type:H100": 1.0, "accelerator_type:H200": 1.0}
    assert machine_of(mixed) == Machine(4, H100)
    assert machine_of({"GPU": 1.0, "accelerator_type:Z9": 1.0}) == Machine(1)
