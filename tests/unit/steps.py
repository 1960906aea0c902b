"""What several tests have an actor or a runner do: take steps, read a prompt, decode."""

from collections.abc import Sequence
from typing import Any

from specahead.engine.kv.pages import SequenceKV
from specahead.engine.steps.inputs import SequenceInput


def take_step(actor: Any) -> Any:
    """Have a verifier or drafter plan, run and finish a step; return the step, None if there is nothing to do."""
    step = actor.plan_step()
    if step is not None:
        actor.finish_step(step, actor.execute(step))
    return step


def run_steps(actor: Any, most: int = 60_000) -> None:
    """Have a verifier or drafter take steps until there is nothing to do. Fails if that takes more than so many."""
    for _ in range(most):
        if take_step(actor) is None:
            return
    raise AssertionError(f"there is something to do after {most} steps")


def read_prompt(runner: Any, tokens: Sequence[int], part: int = 64) -> SequenceKV:
    """Return the KV of a text, which a runner reads in parts of so many tokens."""
    kv = SequenceKV()
    for start in range(0, len(tokens), part):
        runner.forward([SequenceInput(kv, list(tokens[start : start + part]))])
    return kv


def decode(runner: Any, prompt: list[int], count: int) -> list[int]:
    """Return a prompt and so many tokens after it, each of which is the likeliest, by passes over one token."""
    kv, found = SequenceKV(), list(prompt)
    runner.forward([SequenceInput(kv, prompt[:-1])])
    for _ in range(count):
        (output,) = runner.forward([SequenceInput(kv, found[-1:], "last")])
        found.append(int(output.logits.argmax()))
    runner.kv.release(kv)
    return found
