"""Models for tests of sessions: logits follow from the tokens that they read back out of the KV pages.

So a page that is wrong, stale, shared or missing changes the outcome or trips an assertion.
"""

import functools
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV, pages_for
from specahead.engine.sampling.distributions import USE_DRAFT, USE_TARGET, Sampling, Support, uniforms
from specahead.engine.sampling.grammars import unpack_mask
from specahead.engine.sampling.judging import (
    Drafted,
    cut_logits,
    cuts_of,
    judge,
    judge_by_rules,
    lay_out_verdicts,
    support_of,
    verdict_layout,
)
from specahead.engine.sampling.logit_rules import rules_of
from specahead.engine.staging import Staging
from specahead.engine.steps.announcing import announce_blocks
from specahead.engine.steps.inputs import ReadMemory, SequenceInput, SequenceOutput, SharedBudget, SparseRead
from specahead.engine.steps.requests import (
    AnnouncementRequest,
    Branch,
    DraftedTokens,
    MovedKV,
    RoundOutput,
    RoundRequest,
    RoundSettings,
)
from specahead.engine.steps.rules import RoundRules
from specahead.kernels.backends import default_backend
from specahead.kernels.rejection import race, truncated_probs
from specahead.kernels.selection import Remembered, score_blocks, select_over_rows
from specahead.sparsity.plan import uniform_plan
from specahead.wire import messages as m
from target_service.session import TargetSession
from tests.chaining import ChainingRunner

VOCAB, LAYERS, KV_HEADS = 32, 3, 2
DRAFT_LAYERS, DRAFT_HEADS = 2, 3
UNSEEN = 254
RECENT = 8  # tokens that a model that sees only the ends looks back
PLAN = uniform_plan(
    *(LAYERS, KV_HEADS, DRAFT_LAYERS, DRAFT_HEADS), budget=0.6, sink_blocks=1, window_blocks=2, dense_layers=(0,)
)
GREEDY = Sampling(temperature=0.0)
TABLE = np.random.default_rng(0).normal(size=(97, VOCAB)).astype(np.float32) * 2

Logits = Callable[[list[int]], np.ndarray]
# By layer: the blocks that each KV head reads, None for all.
Lists = list[list[np.ndarray] | None]


def hashed(tokens: list[int], salt: int = 0) -> int:
    return zlib.crc32(bytes(tokens), salt)


def ends_view(tokens: list[int], recent: int) -> list[int]:
    """What `ahead` never leaves out: the sink block, and the last tokens as far as they are of one block."""
    start = max(len(tokens) - recent, (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE, 0)
    return [*tokens[:PAGE_SIZE], 255, *tokens[start:]]


@dataclass(frozen=True)
class FakeModel:
    """Next-token logits as a function of the tokens so far. `ends`: of the first and `recent` last ones alone. `swaps`:
    whether the draft's second best token is the target's where its best is not.
    """

    ends: bool = False
    agreement: int = 4  # quarters of all contexts in which the draft's best token is the target's
    recent: int = RECENT
    swaps: bool = False

    def view(self, tokens: list[int]) -> list[int]:
        return ends_view(tokens, self.recent) if self.ends else tokens

    def target(self, tokens: list[int]) -> np.ndarray:
        return TABLE[hashed(self.view(tokens)) % len(TABLE)]

    def draft(self, tokens: list[int]) -> np.ndarray:
        agrees = hashed(self.view(tokens), salt=1) % 4 < self.agreement
        right = self.target(tokens)
        if agrees or not self.swaps:
            return right if agrees else np.roll(right, 1)
        first, second = np.argsort(-right, kind="stable")[:2]
        swapped = right.copy()
        swapped[[first, second]] = right[[second, first]]
        return swapped

    def plain(self, prompt: list[int], max_tokens: int, stop: list[int]) -> tuple[list[int], m.FinishReason]:
        """Greedy decoding by the target alone."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(int(self.target(tokens).argmax()))
            if tokens[-1] in stop:
                return tokens, m.FinishReason.STOP
        return tokens, m.FinishReason.LENGTH


@functools.cache
def _lasting(layers: int, heads: int) -> np.ndarray:
    """What block weights keep from round to round, [layers, heads, 40 blocks]."""
    return np.random.default_rng(0).random((layers, heads, 40))


class FakeRunner(ChainingRunner):
    """Keys hold (position, token). Logits come from what block tables and block lists lead to.

    heads: of block weights. ends: whether the model looks at the ends alone; then only these must be readable. errors:
    raised by the next calls of draft_rounds or forward, before anything has changed.
    """

    def __init__(self, logits: Logits, ends: bool, layers: int, heads: int, pages: int, recent: int = RECENT) -> None:
        self.kv = KVCache(layers, KV_HEADS, 2, pages)
        self.vocab_size = VOCAB
        self.logits, self.ends, self.heads, self.recent = logits, ends, heads, recent
        self.pages_read: list[int] = []  # by each input that wants all its logits and ends no prompt
        self.errors: list[Exception] = []
        self.own_draft = logits  # how it drafts for itself
        self.sparse_logits = logits  # where it reads by lists
        self.lists_drafted_by: list[Lists] = []  # of each input that it drafted for
        self._memories: dict[int, tuple[ReadMemory, Tensor]] = {}
        self._rounds: RoundSettings | None = None

    def tokens_in(self, kv: SequenceKV) -> list[int]:
        content = self._keys(-1)[kv.pages, 0].reshape(-1, 2)[: kv.length]
        assert (content[:, 0] == np.arange(kv.length)).all()
        return content[:, 1].astype(int).tolist()

    def holds(self, expected: list[tuple[SequenceKV, list[int]]]) -> bool:
        """Whether these sequences' first positions have the KV of just these tokens."""
        pages, rows, tokens, positions, at = list[int](), [], list[int](), [], 0
        for kv, first in expected:
            pages += kv.pages
            assert len(first) <= len(kv.pages) * PAGE_SIZE
            rows.append(np.arange(at, at + len(first)))
            positions.append(np.arange(len(first)))
            tokens += first
            at += len(kv.pages) * PAGE_SIZE
        if not tokens:
            return True
        content = self._keys(-1)[pages, 0].reshape(-1, 2)[np.concatenate(rows)]
        return bool((content[:, 0] == np.concatenate(positions)).all() and (content[:, 1] == tokens).all())

    def _keys(self, layer: int) -> np.ndarray:
        """[pages, heads, rows, 2], not a copy."""
        return self.kv.k_pages[layer].numpy()

    def block_weights(self, history: list[int], block_size: int, heads: int) -> Tensor:
        """Much the same from round to round, so that differences are worth sending, but never quite."""
        shape = (self.kv.num_layers, heads, -(-len(history) // block_size))
        lasting = _lasting(*shape[:2])[..., : shape[2]]
        weights = lasting + 0.2 * np.random.default_rng(hashed(history)).random(shape)
        return torch.from_numpy(weights / weights.sum(-1, keepdims=True)).float()

    # Passes.

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        self._fail()
        assert len({id(item.kv) for item in inputs}) == len(inputs)
        for item in inputs:
            assert item.tokens
        self.kv.begin_pass([(item.kv, len(item.tokens)) for item in inputs])
        for item in inputs:
            if item.read is not None and item.read.drafts:
                self._draft_for_itself(item)
        for item in inputs:
            self._write(item.kv, item.kv.length, item.tokens)
        outputs = [self._run(item) for item in inputs]
        self._judge(inputs, outputs)
        for item in inputs:
            item.kv.length += len(item.tokens)
        return outputs

    def _draft_for_itself(self, item: SequenceInput) -> None:
        """Draft one token after the other by `own_draft`, over lists that a budget gives."""
        length = item.kv.length + len(item.tokens)
        if len(item.tokens) > 1:
            self.lists_drafted_by.append(self._lists_of(item.read, length))
        history = [*self.tokens_in(item.kv), item.tokens[0]]
        sampling = item.drafted.sampling
        use = USE_TARGET if self.deterministic else USE_DRAFT
        picks = uniforms(sampling.seed, item.drafted.base, len(item.tokens), use)
        for index in range(1, len(item.tokens)):
            logits = torch.from_numpy(self.own_draft(history))[None]
            token = int(logits.argmax())
            if not sampling.greedy:
                probs = truncated_probs(logits, torch.tensor([sampling.temperature]), torch.tensor([sampling.top_p]))
                ids, top = limit_support(probs, VOCAB)
                token = int(ids[0, race(top, ids, torch.tensor(picks[index - 1 : index]))[0]])
                item.drafted.supports.append(Support(ids[0].numpy(), top[0].numpy()))
            item.tokens[index] = item.drafted.tokens[index - 1] = token
            history.append(token)

    def _fail(self) -> None:
        if self.errors:
            raise self.errors.pop(0)

    def _write(self, kv: SequenceKV, start: int, tokens: list[int], at: int | None = None) -> None:
        """Write KV from `start` on, of tokens whose positions begin `at` another number if one is given."""
        places = range(start, start + len(tokens))
        pages, rows = [kv.pages[place // PAGE_SIZE] for place in places], [place % PAGE_SIZE for place in places]
        position = start if at is None else at
        written = np.array([*enumerate(tokens, position)], np.float32).reshape(-1, 1, 2)
        for layer in range(self.kv.num_layers):
            self._keys(layer)[pages, :, rows] = written

    def _run(self, item: SequenceInput) -> SequenceOutput:
        length = item.kv.length + len(item.tokens)
        dense = item.read is not None and item.read.drafts
        lists = self._lists_of(None if dense else item.read, length)
        read = self._read_all(item.kv, length, lists)
        pages = sum(len(blocks) for blocks, _ in read)
        if item.logits == "all" and not item.ends_prompt:
            self.pages_read.append(pages)
        first = length - max(1, item.logits_rows)
        history = self._check(read, length, first)
        assert history[length - len(item.tokens) :] == item.tokens
        out = SequenceOutput()
        if item.logits != "none":
            given = self.logits if item.read is None or dense or item.read.reads_all else self.sparse_logits
            out.logits = torch.from_numpy(np.stack([given(history[: p + 1]) for p in range(first, length)]))
        if item.drafted is not None:
            assert out.logits is not None and item.tokens[item.drafted_from :] == item.drafted.tokens
        if item.read is not None:
            self._report(item.read, history, read, out)
        return out

    def _judge(self, inputs: list[SequenceInput], outputs: list[SequenceOutput]) -> None:
        """Judge the rounds of a pass, those with rules apart; of what is judged no logits are left."""
        for plain in (True, False):
            judged = [
                (out, out.logits, item.drafted)
                for item, out in zip(inputs, outputs, strict=True)
                if item.drafted is not None and item.drafted.is_plain == plain and out.logits is not None
            ]
            if not judged:
                continue
            outs, logits, rounds = (list(each) for each in zip(*judged, strict=True))
            for out in outs:
                out.logits = None
            if plain:
                verdicts = judge_rounds(logits, rounds, self.deterministic)
                for out, verdict, rows in zip(outs, verdicts, logits, strict=True):
                    out.verdict, out.finite = verdict, bool(rows.amax(1)[: verdict[0] + 1].isfinite().all())
                continue
            ruled = judge_by_rules(padded_rows(logits, len(rounds)), rounds, self.deterministic)
            for out, found in zip(outs, ruled, strict=True):
                out.verdict, out.finite = found.verdict, found.finite
                out.logprobs, out.supports = found.logprobs, found.supports

    def _report(
        self, given: SparseRead, history: list[int], read: list[tuple[np.ndarray, np.ndarray]], out: SequenceOutput
    ) -> None:
        weights = self.block_weights(history, given.block_size, KV_HEADS)
        chosen = torch.zeros(weights.shape, dtype=torch.bool)
        for row, (blocks, _) in zip(chosen.flatten(0, 1), read, strict=True):
            row[torch.from_numpy(blocks)] = True
        sparse = [layer for layer in range(self.kv.num_layers) if layer not in given.dense_layers]
        if given.report_blocks:
            out.blocks = chosen
        out.blocks_read = int(chosen[sparse].sum())
        memory = given.budget.memory
        faded = self._remembered(memory, weights.shape[-1]) * memory.decay
        read_weights = weights.where(chosen, 0.0)[sparse].flatten(0, 1)
        self._memories[id(memory)] = memory, torch.maximum(read_weights, faded)

    def _lists_of(self, read: SparseRead | None, length: int) -> Lists:
        if read is None:
            return [None] * self.kv.num_layers
        assert read.block_size == PAGE_SIZE
        return self._share_out(read.budget, pages_for(length))

    def _share_out(self, budget: SharedBudget, blocks: int) -> Lists:
        words = torch.zeros(1, len(budget.bitmap), -(-blocks // 64), dtype=torch.int64)
        words[0, :, : budget.bitmap.shape[1]] = torch.tensor(budget.bitmap.view(np.int64))
        first, last, count, room, place = (
            torch.tensor([n], dtype=torch.int32) for n in (budget.first, budget.last, blocks, max(0, budget.room), 0)
        )
        memory = Remembered(self._remembered(budget.memory, blocks)[None], place)
        forced, scores, left = score_blocks(memory, budget.memory.importance, words, (first, last, count), room)
        chosen, counts = select_over_rows(scores, left, forced)
        rows = [blocks_[:n].numpy() for blocks_, n in zip(chosen[0], counts[0], strict=True)]
        lists: Lists = [None] * self.kv.num_layers
        sparse = [layer for layer in range(self.kv.num_layers) if layer not in budget.dense_layers]
        for i, layer in enumerate(sparse):
            lists[layer] = rows[i * KV_HEADS : (i + 1) * KV_HEADS]
        return lists

    def _remembered(self, memory: ReadMemory, blocks: int) -> Tensor:
        kept = self._memories.get(id(memory))
        if kept is None:
            return torch.zeros(len(memory.importance), blocks)
        return torch.nn.functional.pad(kept[1], (0, blocks - kept[1].shape[-1]))

    def _read_all(self, kv: SequenceKV, length: int, lists: Lists) -> list[tuple[np.ndarray, np.ndarray]]:
        """By layer and KV head: the pages that it reads, and the token that it gets to see at each position."""
        read = []
        table, everything = np.array(kv.pages[: pages_for(length)], int), np.arange(pages_for(length))
        for layer, blocks in enumerate(lists):
            keys = self._keys(layer)
            if blocks is None:
                content = keys[table].transpose(1, 0, 2, 3).reshape(KV_HEADS, -1, 2)[:, :length]
                assert (content[..., 0] == np.arange(length)).all()
                read += [(everything, seen) for seen in content[..., 1].astype(int)]
                continue
            for head, pages in enumerate(blocks):
                assert (np.diff(pages) > 0).all()
                assert not len(pages) or pages[-1] < pages_for(length)
                content = keys[table[pages], head].reshape(-1, 2)
                at = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).flatten()
                content, at = content[at < length], at[at < length]
                assert (content[:, 0] == at).all()
                seen = np.full(length, UNSEEN)
                seen[at] = content[:, 1]
                read.append((pages, seen))
        return read

    def _check(self, read: list[tuple[np.ndarray, np.ndarray]], length: int, first: int) -> list[int]:
        """All heads must see the same tokens wherever the model looks; returns what the first of them sees."""
        needed = np.arange(length)
        if self.ends:
            start = max(first - self.recent + 1, first // PAGE_SIZE * PAGE_SIZE)
            needed = needed[(needed < PAGE_SIZE) | (needed >= start)]
        tokens = read[0][1]
        for _, seen in read:
            assert (seen[needed] == tokens[needed]).all()
            assert (seen[needed] != UNSEEN).all()
        return tokens.tolist()

    # Rounds.

    def prepare_rounds(self, settings: RoundSettings) -> None:
        self._rounds = settings

    def draft_rounds(self, requests: list[RoundRequest]) -> list[RoundOutput]:
        self._fail()
        assert len({id(item.kv) for item in requests}) == len(requests)
        for item in requests:
            self.kv.grow(item.kv, item.kv.length + item.tokens_written(self._rounds.gamma))
            if item.moved is not None:
                self._move(item.kv, item.moved)
        return [self._draft(item, self._rounds) for item in requests]

    def _move(self, kv: SequenceKV, moved: MovedKV) -> None:
        for step in range(moved.count):
            at = [(kv.pages[p // PAGE_SIZE], p % PAGE_SIZE) for p in (moved.source + step, moved.target + step)]
            (from_page, from_row), (page, row) = at
            for keys in self.kv.k_pages:
                keys[page, :, row] = keys[from_page, :, from_row]

    def _draft(self, item: RoundRequest, settings: RoundSettings) -> RoundOutput:
        branches, length = item.branches, item.kv.length
        if not branches:
            self._write(item.kv, length, item.tokens[:-1])
            length += len(item.tokens) - 1
            branches = (Branch(length, item.tokens[-1], item.uniforms),)
        blocks = pages_for(min(branch.length for branch in branches) + 1)
        drafted, weights = [], []
        for index, branch in enumerate(branches):
            own = length + index * ((item.gamma or settings.gamma) + 1)
            tokens, seen = self._draft_branch(item, settings, index, branch, own)
            drafted.append(tokens)
            weights += [each[..., :blocks] for each in seen]  # none if they are not asked for
        bitmap = None if item.announce is None else _announce(item.announce, settings, torch.stack(weights))
        return RoundOutput(drafted, bitmap)

    def _draft_branch(
        self, item: RoundRequest, settings: RoundSettings, number: int, branch: Branch, own: int
    ) -> tuple[DraftedTokens, list[Tensor]]:
        """Return what is drafted behind a branch, whose KV goes to positions from `own` on, and its block weights."""
        read = self._read_all(item.kv, branch.length, [None] * self.kv.num_layers)
        history = self._check(read, branch.length, branch.length - 1)
        token, drawn = branch.token, item.temperature > 0
        tokens: list[int] = []
        supports, alternatives, weights = [], [], []
        for index in range((item.gamma or settings.gamma) + settings.runs_last):
            self._write(item.kv, own + index, [token], at=len(history))
            history.append(token)
            if item.announce is not None:
                weights.append(self.block_weights(history, settings.block_size, self.heads))
            logits = changed(self.logits(history), history, item.rules)
            if item.allowed is not None:
                mask = unpack_mask(torch.from_numpy(item.allowed(number, tokens)), VOCAB)
                logits[~mask.numpy()] = -np.inf
            token, support = self._sample(item, settings, logits, index, branch.uniforms)
            tokens.append(token)
            supports.append(support)
            alternatives.append(np.argsort(-logits, kind="stable")[: settings.alternatives])
        ids, probs = (torch.cat(part).numpy() for part in zip(*supports, strict=True))
        likeliest = np.stack(alternatives) if settings.alternatives else None
        drafted = DraftedTokens(tokens, ids if drawn else None, probs if drawn else None, likeliest, settings.runs_last)
        return drafted, weights

    def _sample(
        self, item: RoundRequest, settings: RoundSettings, logits: np.ndarray, index: int, uniforms: np.ndarray
    ) -> tuple[int, tuple[Tensor, Tensor]]:
        if item.temperature == 0:
            return int(logits.argmax()), (torch.zeros(1, 1), torch.zeros(1, 1))
        heat, top_p = torch.tensor([item.temperature]), torch.tensor([item.top_p])
        top_k, min_p = torch.tensor([item.top_k]), torch.tensor([item.min_p])
        row = cut_logits(torch.from_numpy(logits)[None, None], heat, top_k, min_p, max(1, item.top_k))[0]
        probs = truncated_probs(row, heat, top_p)
        ids, top = limit_support(probs, settings.support)
        pick = race(top, ids, torch.from_numpy(uniforms[index : index + 1]))
        return int(ids[0, pick[0]]), (ids, top)


class PinnedFakeRunner(FakeRunner):
    """Deterministic: tokens do not depend on what is drafted.

    Values in the last layer hold whether a token ran in a prompt or in a round, by which a real model's KV may differ.
    """

    deterministic = True

    def forward(self, inputs: list[SequenceInput]) -> list[SequenceOutput]:
        starts = [item.kv.length for item in inputs]
        outputs = super().forward(inputs)
        for item, start in zip(inputs, starts, strict=True):
            at = torch.arange(start, item.kv.length)
            pages = torch.tensor(item.kv.pages)[at // PAGE_SIZE]
            self.kv.v_pages[-1][pages, 0, at % PAGE_SIZE, 0] = 1.0 + (item.drafted is not None)
        return outputs

    def check_runs(self, sessions: Iterable[TargetSession]) -> None:
        """Check that what was read as a prompt has run in one, and what was generated in rounds."""
        for session in sessions:
            kv, prompt = session.kv, min(session.asked.prompt_tokens - 1, session.kv.length)
            runs = self.kv.v_pages[-1][kv.pages, 0, :, 0].flatten()[: kv.length].tolist()
            assert runs == [1] * prompt + [2] * (kv.length - prompt)


def changed(logits: np.ndarray, history: list[int], rules: RoundRules | None) -> np.ndarray:
    """Logits behind `history` as the target's rules change them."""
    changed_row = logits.copy()
    if rules is not None:
        session, row = rules.session, torch.from_numpy(changed_row)[None]
        assert history[: len(rules.committed)] == rules.committed
        for rule in rules_of(session.sampling, session.prompt_tokens, session.stop_token_ids):
            rule.apply(row, history, [])
    return changed_row


def _announce(request: AnnouncementRequest, settings: RoundSettings, weights: Tensor) -> np.ndarray:
    """weights: [queries, layers, heads, blocks], of each query"""
    announcer = settings.announcer
    evidence = weights.mean(0)[None]
    before = torch.zeros(1, len(announcer.heads), -(-evidence.shape[-1] // 64), dtype=torch.int64)
    if request.before is not None:
        before[0] = torch.tensor(request.before.view(np.int64))
    limits = torch.tensor([[request.first], [request.last], [max(0, request.count)]], dtype=torch.int32)
    return announce_blocks(announcer, evidence, before, limits)[0].numpy().view(np.uint64)


def judge_rounds(logits: list[Tensor], rounds: list[Drafted], draws_own: bool = False) -> list[tuple[int, int]]:
    """Judge rounds in one batch: the accepted count and the next token of each.

    logits: [len(tokens) + 1, vocab] each, row i for position base + i
    """
    device = logits[0].device
    gamma, count = max(len(item.tokens) for item in rounds), max(2, len(rounds))  # pinned steps have several rows
    cuts = cuts_of(rounds)
    staging = Staging(verdict_layout(count, gamma, support_of(rounds), cuts), device)
    lay_out_verdicts(staging.host, rounds)
    staging.send()
    accepted, following = judge(padded_rows(logits, count), staging.device, default_backend(device), draws_own, cuts)
    return list(zip(accepted.tolist(), following.tolist(), strict=True))[: len(rounds)]


def padded_rows(logits: list[Tensor], count: int) -> Tensor:
    """`count` rounds' logits in one tensor, [count, places, vocab], with zeros where there are none."""
    padded = logits[0].new_zeros(count, max(len(rows) for rows in logits), logits[0].shape[1])
    for row, rows in zip(padded, logits, strict=False):
        row[: len(rows)] = rows
    return padded


def limit_support(probs: Tensor, support: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest entries of each row, renormalised: ids [rows, support] int64 and their probs float32."""
    top, ids = probs.topk(min(support, probs.shape[-1]), dim=-1)
    return ids, top / top.sum(-1, keepdim=True)
