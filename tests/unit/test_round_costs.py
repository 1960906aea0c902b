"""Which rounds of a target count in what its rounds take (target_service/policy/costs.py)."""

from typing import Any
from unittest.mock import patch

import pytest

from specahead import models
from target_service.verifier import Verifier
from tests.unit.clock import Clock
from tests.unit.fake_models import FakeModel
from tests.unit.world import World


@pytest.mark.parametrize(("captured_steps", "counts"), [(0, True), (3, True), (10**6, False)])
def test_a_step_beside_which_a_graph_is_captured_is_no_figure(clock: Clock, captured_steps: int, counts: bool) -> None:
    world = World(clock, 3, FakeModel(), gamma=None, proposer=str(models.DRAFT))
    finish_step, steps = Verifier.finish_step, 0

    def finish(verifier: Verifier, *of_step: Any) -> None:
        nonlocal steps
        steps += 1
        clock.now += 0.01
        world.target.captures_made += steps <= captured_steps
        finish_step(verifier, *of_step)

    world.attach()
    name = world.open([5] * 40, 60)
    with patch.object(Verifier, "finish_step", finish), patch.object(world.verifier.policy.costs, "note") as note:
        world.run()
    world.check_greedy(name)
    assert note.called == counts
