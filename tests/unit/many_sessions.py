"""Many sessions at once, of a model that looks at the last token alone: tens of thousands of draws in seconds.

Draft and target are the product's, in lockstep: a step of the one runs all sessions, then one of the other. The model
reads no KV, which other tests do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.grammars import unpack_mask
from specahead.engine.steps import drafting
from specahead.engine.steps.inputs import SequenceInput, SequenceOutput
from specahead.engine.steps.requests import DraftedTokens, RoundOutput, RoundRequest
from specahead.engine.steps.rules import ChangedLogits
from tests.unit.distributions import Draws, changed_logits, cut_probs
from tests.unit.fake_models import DRAFT_HEADS, DRAFT_LAYERS, TABLE, VOCAB, FakeModel, FakeRunner
from tests.unit.steps import take_step
from tests.unit.world import World

DRAFT, SPARSE, DENSE = 0, 1, 2  # levels


def behind(tokens: Tensor, level: int) -> Tensor:
    """Return the logits behind each token, near those of the other levels: [...] int64 to [..., VOCAB] float32."""
    table = torch.from_numpy(TABLE)
    return 0.8 * table[tokens] + 0.2 * table[(tokens + 31 * level) % len(table)]


class Scripted(FakeRunner):
    """The logits behind a token are those of a level (`behind`), in a draft as the session's rules change them."""

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        self.kv.begin_pass([(item.kv, len(item.tokens)) for item in inputs])
        outputs = [SequenceOutput(blocks_read=0) for _ in inputs]
        tokens = torch.tensor([token for item in inputs for token in item.tokens])
        counts = [len(item.tokens) for item in inputs]
        dense, sparse = (behind(tokens, level).split(counts) for level in (DENSE, SPARSE))
        for i, (item, out) in enumerate(zip(inputs, outputs, strict=True)):
            if item.drafted is not None:
                out.logits = (dense if item.read is None or item.read.reads_all else sparse)[i][-item.logits_rows :]
            item.kv.length += len(item.tokens)
        self._judge(inputs, outputs)
        return outputs

    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        assert self._rounds is not None and not any(item.branches for item in requests)
        settings, gamma = self._rounds, requests[0].gamma or self._rounds.gamma
        for item in requests:
            self.kv.grow(item.kv, item.kv.length + item.tokens_written(gamma))
        how = [torch.tensor([getattr(item, name) for item in requests]) for name in ("temperature", "top_p", "min_p")]
        least = how.pop()[:, None].repeat(1, VOCAB)
        for row, item in zip(least, requests, strict=True):
            row[item.top_k or VOCAB :] = 2  # as specahead.engine.steps.buffers has it
        uniforms = torch.from_numpy(np.stack([item.uniforms for item in requests], 1))
        draws = drafting.Draws(*how, least, uniforms, VOCAB)
        token, rules = torch.tensor([item.tokens[-1] for item in requests]), rules_of_rounds(requests)
        drawn: list[tuple[Tensor, Tensor, Tensor]] = []
        for index in range(gamma + settings.runs_last):
            logits = behind(token, DRAFT) if rules is None else rules.change(behind(token, DRAFT))
            for i, item in enumerate(requests):
                if item.allowed is not None:
                    mask = torch.from_numpy(item.allowed(0, [int(each[0][i]) for each in drawn]))
                    logits[i, ~unpack_mask(mask, VOCAB)] = -torch.inf
            drawn.append(draws.draw(logits, logits.argmax(1), index))
            token = drawn[-1][0]
            if rules is not None:
                rules.count(token)
        tokens, ids, probs = (torch.stack(each, 1) for each in zip(*drawn, strict=True))
        of_rounds = zip(tokens.tolist(), ids.numpy(), probs.numpy(), map(self._announced, requests), strict=True)
        return [
            RoundOutput([DraftedTokens(*each, runs_last=settings.runs_last)], bitmap) for *each, bitmap in of_rounds
        ]

    def _announced(self, item: RoundRequest) -> np.ndarray | None:
        if item.announce is None or self._rounds is None or self._rounds.announcer is None:
            return None
        return np.zeros((len(self._rounds.announcer.heads), item.announce.words), np.uint64)


def rules_of_rounds(requests: list[RoundRequest]) -> ChangedLogits | None:
    """Return what changes the logits of rounds, None where no round has rules."""
    if not any(item.rules for item in requests):
        return None
    rules, penalties = torch.zeros(3, len(requests), VOCAB), torch.tensor([[1.0], [0], [0]]).repeat(1, len(requests))
    for i, item in enumerate(requests):
        if item.rules is not None:
            assert not any(item.rules.guessed)
            sampling = item.rules.session.sampling
            rules[0, i], rules[1:, i] = item.rules.session.update(item.rules.committed, VOCAB, rules.device)
            of_session = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
            penalties[:, i] = torch.tensor(of_session)
    guessed = torch.full((len(requests), 1), -1)
    return ChangedLogits({"rules": rules, "penalties": penalties, "guessed": guessed}, branches=1)


class ManySessions(World):
    """One target and one draft, all of whose sessions run in each of their steps."""

    def __init__(self, clock: Any, sessions: int, **how: Any) -> None:
        pages = 24 * sessions
        sizes = {"gamma": 5, "prefill_chunk": 512, "max_sessions": sessions, "pages": pages}
        super().__init__(clock, 0, FakeModel(), runner=Scripted, **sizes, **how)
        self.draft = Scripted(self.model.draft, False, DRAFT_LAYERS, DRAFT_HEADS, pages)
        self.drafter = type(self.drafter)(self.draft, self.verifier.plan, self.drafter._settings, how.get("grammars"))
        self.attach()

    def run(self) -> None:
        while self._advance_wholly(self.verifier) | self._advance_wholly(self.drafter):
            pass
        assert not self.busy(), "sessions are open, and nothing happens any more"

    def _advance_wholly(self, actor: Any) -> bool:
        step = take_step(actor)
        (link,) = self.links
        for event in link.to_target:
            self.verifier.protocol.receive(link.target_end, event)
        for sent in link.to_draft:
            self.drafter.receive(link.draft_end, sent)
        moved = step is not None or bool(link.to_target or link.to_draft)
        link.to_target.clear()
        link.to_draft.clear()
        return moved


def draws_of(
    texts: Sequence[Sequence[int]],
    prompt: list[int],
    sampling: Sampling,
    stops: Sequence[int],
    allowed: Callable[[int], Sequence[int]] | None = None,
    known: int = 0,
    level: int = DENSE,
) -> Draws:
    """Return what was drawn in texts behind one prompt, and what should be. allowed: the tokens at each place. known:
    how many of each text's first tokens were there before. level: whose distributions these should be.
    """
    tokens, before, counts, masks = list[int](), list[int](), [], []
    for text in texts:
        each = torch.nn.functional.one_hot(torch.tensor(text), VOCAB)
        counts.append((each.cumsum(0) - each)[known:])
        tokens += text[known:]
        before += [prompt[-1], *text[:-1]][known:]
        for place in range(known, len(text)) if allowed is not None else ():
            masks.append(torch.isin(torch.arange(VOCAB), torch.tensor(allowed(place))))
    in_prompt = torch.isin(torch.arange(VOCAB), torch.tensor(prompt))
    logits = changed_logits(behind(torch.tensor(before), level), torch.cat(counts), in_prompt, sampling, stops)
    if masks:
        logits[~torch.stack(masks)] = -torch.inf
    return Draws(cut_probs(logits, sampling), torch.tensor(tokens))
