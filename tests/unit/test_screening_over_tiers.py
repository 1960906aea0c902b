"""Three levels over KV in tiers: lists are fetched to screen, and a dense pass brings whole sequences to confirm."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.loading.model import load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.steps.model_runner import ModelRunner
from specahead.sparsity.plan import uniform_plan
from specahead.wire import messages as m
from target_service.session import DraftPeer
from target_service.verifier import Verifier
from target_service.verify_step import VerifyStep
from tests.settings import draft_settings, target_settings
from tests.unit.fake_models import GREEDY
from tests.unit.steps import decode, take_step
from tests.unit.test_graphs import DEVICE, tokens
from tests.unit.test_self_rounds import folder, runner, runner_of

__all__ = ["folder", "runner"]

PLAN = uniform_plan(3, 2, 3, 2, group_size=64)
CONTEXT, GPU_PAGES, PAGES = 400, 24, 100


class Served:
    """A target over tiers and its draft, whose weights are a little off; one random thing happens after another.

    kinds: how many rounds of sessions whose KV had left the GPU screened, confirmed, or did neither. beside: how many
    steps had rounds that screened beside such that confirmed.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        gpu_pages: int,
        pages: int = PAGES,
        every: int = 11,
        share: float = 0.5,
        deterministic: bool = False,
    ) -> None:
        limits: dict[str, Any] = {"max_sessions": 4, "max_context": CONTEXT, "prefill_chunk": 48}
        settings = target_settings(
            **limits,
            hold=every,
            self_read_share=share,
            host_kv_memory=1.0 if gpu_pages < PAGES else 0.0,
            deterministic=deterministic,
        )
        self.runner = runner_of(
            folder,
            gpu_pages,
            pages if gpu_pages < PAGES else 0,
            most_queries=settings.widest_round,
            deterministic=deterministic,
        )
        self.kv, self.rng = self.runner.kv, random.Random(seed)
        self.verifier = Verifier(self.runner, PLAN, settings)
        loaded = load_model(str(folder), torch.float32, DEVICE)
        torch.manual_seed(1)
        with torch.inference_mode():
            for layer in loaded.decoder.layers:
                for weight in layer.linears:
                    weight.values.mul_(1 + 0.01 * torch.randn_like(weight.values))
        self.drafter = Drafter(make_runner(loaded, 4000), PLAN, draft_settings(**limits))
        self.to_target: list[m.DraftEvent] = []
        self.to_draft: list[m.TargetEvent] = []
        self.commits: dict[str, list[m.Commit]] = {}
        self.kinds, self.beside = Counter[str](), 0
        self._target, self._draft = DraftPeer("draft", self.to_draft.append), TargetPeer(self.to_target.append)

    def attach(self) -> None:
        self.verifier.protocol.attach(self._target)
        self.drafter.attach(self._draft)

    def detach(self) -> None:
        self.verifier.protocol.detach(self._target)
        self.drafter.detach(self._draft)
        self.to_target.clear()
        self.to_draft.clear()

    def open(self, name: str, prompt: list[int], most: int, sampling: Sampling = GREEDY) -> None:
        self.commits[name] = []
        opened = m.Open(name, prompt, len(prompt), most, [], sampling, m.Exactness.EXACT)
        self.verifier.admission.open(opened, self._emit)

    def _emit(self, event: m.ServedEvent) -> None:
        self.commits[event.at.session].append(event)

    def said(self, name: str) -> list[int]:
        return [token for commit in self.commits[name] for token in commit.tokens]

    def turn(self) -> bool:
        """Have target or draft take a step, with what the other has sent so far; False if all is over."""
        if self.rng.random() < 0.5:
            take_step(self.drafter)
        else:
            step = self.verifier.plan_step()
            if step is not None:
                self._note(step)
                self.verifier.finish_step(step, self.verifier.execute(step))
                if isinstance(self.kv, TieredKV):
                    self.kv.check_integrity()
        while self.to_draft:
            self.drafter.receive(self._draft, self.to_draft.pop(0))
        while self.to_target:
            self.verifier.protocol.receive(self._target, self.to_target.pop(0))
        return not self.verifier.is_idle

    def _note(self, step: VerifyStep) -> None:
        self.beside += any(item.screens for item in step.rounds) and any(item.held for item in step.rounds)
        for item in step.rounds:
            assert item.session.kv.settled == item.session.confirmed - 1, "what is confirmed may be stored"
            if not self.kv.is_resident(item.session.kv):
                self.kinds["screens" if item.screens else "confirms" if item.held else "dense"] += 1

    def run(self) -> None:
        while self.turn():
            pass


@pytest.mark.parametrize(
    ("gpu_pages", "every", "share", "deterministic"), [(GPU_PAGES, 8, 0.2, True), (20, 16, 0.5, False)]
)
def test_greedy_tokens_are_those_of_plain_decoding_without_tiers(
    runner: ModelRunner, folder: Path, gpu_pages: int, every: int, share: float, deterministic: bool
) -> None:
    """Whatever each level rejects, whoever shares a prefix, is aborted, gives way, or loses the draft in between."""
    served = Served(folder, every, gpu_pages, 45, every, share, deterministic)
    served.attach()
    prompts = [tokens(n, n) for n in (300, 150, 200)]
    prompts.append([*prompts[0][:260], *tokens(20, 5)])
    for name, prompt in enumerate(prompts[:3]):
        served.open(str(name), prompt, 36)
    turns = 0
    while served.turn():
        turns += 1
        if "3" not in served.commits and served.said("0"):
            served.open("3", prompts[3], 36)
        if len(served.said("2")) > 20:
            served.verifier.abort("2")
        if turns in (150, 180):
            served.detach()
            served.attach()
    counted = served.verifier.counters
    assert 0 < counted["confirmed_tokens"] < counted["screened_tokens"]
    assert counted["preemptions"] > 0 and min(served.kinds.values()) > 10
    totals = served.verifier.totals
    assert totals["kv_fetched_pages"] > 0
    # What lists everything is never fetched; half of three texts is more than 20 pages hold.
    assert (totals["kv_overflow_pages"] > 0) == (gpu_pages == 20)
    for name, prompt in enumerate(prompts):
        said = served.said(str(name))
        assert len(said) == 36 or (name == 2 and len(said) > 20)
        assert [*prompt, *said] == decode(runner, prompt, len(said))


SAMPLED = Sampling(0.1, seed=3, top_k=60)


@pytest.mark.parametrize("sampling", [SAMPLED, replace(SAMPLED, logit_bias={5: -1e9})], ids=["plain", "ruled"])
def test_sampled_tokens_are_those_without_tiers(folder: Path, sampling: Sampling) -> None:
    """By the same draws of each level. What came over the link is told, of rounds that screened as well."""
    prompt, said = tokens(300, 4), []
    for gpu_pages in (PAGES, 16):
        served = Served(folder, 1, gpu_pages, every=8)
        served.attach()
        served.open("0", prompt, 60, sampling)
        served.run()
        said.append(served.said("0"))
        counted, commits = served.verifier.counters, served.commits["0"]
        assert 0 < counted["confirmed_tokens"] < counted["screened_tokens"]
        fetched = sum(commit.figures.kv_tokens_fetched for commit in commits)
        assert (fetched > 0) == (gpu_pages < PAGES)
        read = sum(commit.figures.kv_tokens_read for commit in commits)
        assert fetched < 0.9 * read, "most of what is screened lies on the GPU"
        if isinstance(served.kv, TieredKV):
            came = served.kv.counters.fetched_pages + served.kv.counters.staged_pages
            assert fetched <= PAGE_SIZE * came  # means are made of what was brought for that
    assert said[0] == said[1]


def test_each_session_confirms_by_itself_where_its_kv_has_left_the_gpu(folder: Path) -> None:
    """Where no KV has left the GPU all sessions confirm together."""
    beside = []
    for gpu_pages in (PAGES, GPU_PAGES):
        served = Served(folder, 1, gpu_pages, every=16)
        served.attach()
        for name, length in enumerate((300, 150, 200)):
            served.open(str(name), tokens(length, length), 40)
        served.run()
        beside.append(served.beside)
    assert beside[0] == 0 < beside[1]
