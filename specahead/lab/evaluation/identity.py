"""`specahead evaluate identity`: whether tokens are the same with and without KV in tiers, on the device at hand.

Drafter and verifier as the services have them, in one process and without gRPC, in float32: several greedy sessions at
once, whose prompts are read in parts while others already generate. The two take turns, so that what runs in which step
depends on no clock. First all KV lies on the device; then frames get fewer, down to the fewest that a target starts
with. On a GPU both run with the deterministic engine: else a step that is cut in halves, or staged in parts, would
round otherwise than the whole.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from draft_service.drafter import Drafter
from draft_service.sessions import TargetPeer
from specahead.config import DraftSettings, Speculation, TargetSettings
from specahead.engine.kv.pages import PAGE_SIZE, pages_for
from specahead.engine.loading.model import LoadedModel, default_device, load_model
from specahead.engine.loading.runner import make_runner
from specahead.engine.sampling.distributions import Sampling
from specahead.lab.evaluation.cases import tokens_of
from specahead.lab.results import Columns, text_table
from specahead.sparsity.plan import Plan
from specahead.wire.messages import Commit, DraftEvent, Exactness, Open, ServedEvent, TargetEvent
from target_service.session import DraftPeer
from target_service.verifier import Verifier

Event = TypeVar("Event")
PROMPTS = (0.1, 0.55, 1.0)  # lengths, of the context
MIXES = {
    "exact": (Exactness.EXACT,),
    "approximate": (Exactness.APPROXIMATE,),
    "both": (Exactness.EXACT, Exactness.APPROXIMATE),
}


@dataclass(frozen=True)
class Requests:
    """Each prompt once for each exactness of a mix."""

    prompts: list[list[int]]
    generated: int
    """Tokens of each answer."""
    gamma: int
    chunk: int = 64
    """Prompt tokens a step, over all sessions."""

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.generated

    def pages(self, mix: str) -> int:
        """Return the pages of all sessions, with room for a round beyond their ends."""
        each = [pages_for(len(prompt) + self.generated + self.gamma + 1) for prompt in self.prompts]
        return sum(each) * len(MIXES[mix])

    def sessions(self, mix: str) -> int:
        return len(self.prompts) * len(MIXES[mix])

    def least_frames(self, mix: str) -> int:
        """Return the fewest frames that a target starts with: the pages that are written must lie on the device."""
        a_session = pages_for(self.gamma + 1) + 2
        return self.sessions(mix) * a_session + pages_for(self.chunk)


def prompts_of(texts: dict[str, str], tokenizer: Any, context: int) -> list[list[int]]:
    """Return prompts of several lengths, up to `context` tokens, each from another place of the texts in turn."""
    sources = list(texts.values())
    return [
        tokens_of(sources[i % len(sources)], tokenizer, int(share * context), 0.02 + 0.2 * i)
        for i, share in enumerate(PROMPTS)
    ]


@dataclass(frozen=True)
class IdentityRow:
    """One mix with some number of frames, compared with the same sessions without tiers."""

    mix: str
    sessions: int
    frames: int
    pages: int
    """Of all sessions."""
    fetched: int
    """Pages of a layer and KV head; so are the next two."""
    staged: int
    overflow: int
    tokens: int
    """Generated tokens, all of which are compared."""
    difference: str
    """Name of the first session that differs, and the place among its tokens; empty: none differs."""

    @property
    def identical(self) -> bool:
        return not self.difference


def compare(target: str, draft: str, plan: Plan, requests: Requests, hot: list[float]) -> Iterator[IdentityRow]:
    """Yield a row for each mix and share of hot pages, the largest first, and for the fewest frames possible.

    Raises ValueError for shares out of (0, 1), and for one that gives fewer frames.
    """
    if not all(0 < share < 1 for share in hot):
        raise ValueError(f"hot must be shares between 0 and 1, got {hot}")
    for mix in MIXES:
        pages, least = requests.pages(mix), requests.least_frames(mix)
        if hot and min(hot) * pages < least:
            raise ValueError(
                f"{requests.sessions(mix)} sessions have {pages} pages and write up to {least} at once, "
                f"{least / pages:.1%}: hot must be more, got {min(hot):.1%}"
            )
    device = default_device()
    models = load_model(target, torch.float32, device), load_model(draft, torch.float32, device)
    with tqdm(total=len(MIXES) * (len(hot) + 2), desc="generating", unit="run") as progress:
        for mix in MIXES:
            wanted, _ = _generate(*models, plan, requests, mix, None)
            progress.update()
            sizes = sorted((int(share * requests.pages(mix)) for share in hot), reverse=True)
            for frames in (*sizes, requests.least_frames(mix)):
                got, totals = _generate(*models, plan, requests, mix, frames)
                yield IdentityRow(
                    mix=mix,
                    sessions=requests.sessions(mix),
                    frames=frames,
                    pages=requests.pages(mix),
                    fetched=int(totals["kv_fetched_pages"]),
                    staged=int(totals["kv_staged_pages"]),
                    overflow=int(totals["kv_overflow_pages"]),
                    tokens=sum(map(len, got.values())),
                    difference=_first_difference(wanted, got),
                )
                progress.update()


def _first_difference(wanted: dict[str, list[int]], got: dict[str, list[int]]) -> str:
    for name, tokens in wanted.items():
        if got[name] != tokens:
            pairs = enumerate(zip(tokens, got[name], strict=False))
            at = next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(got[name])))
            return f"{name} at {at}"
    return ""


def _generate(
    target: LoadedModel, draft: LoadedModel, plan: Plan, requests: Requests, mix: str, frames: int | None
) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Return the tokens of each session, and the target's counters. frames: None: no tiers."""
    pages = requests.pages(mix)
    runner = make_runner(
        target,
        (frames or pages) * PAGE_SIZE,
        backing_tokens=0 if frames is None else pages * PAGE_SIZE,
        max_context=requests.longest,
        step_queries=requests.gamma + 1,
        deterministic=default_device() == "cuda",
    )
    verifier = Verifier(
        runner,
        plan,
        TargetSettings(
            speculation=Speculation(gamma=requests.gamma, hold=0, audit_share=0.0),
            prefill_chunk=requests.chunk,
            draft_timeout=math.inf,
            max_sessions=requests.sessions(mix),
            max_context=requests.longest,
        ),
    )
    room = pages * PAGE_SIZE + requests.sessions(mix) * (requests.gamma + 1 + PAGE_SIZE)
    settings = DraftSettings(
        speculation=Speculation(gamma=requests.gamma), prefill_chunk=requests.chunk, max_context=requests.longest
    )
    drafter = Drafter(make_runner(draft, room), plan, settings)
    tokens: dict[str, list[int]] = {}

    def emit(event: ServedEvent) -> None:
        assert isinstance(event, Commit)
        tokens[event.at.session] += event.tokens

    openings = []
    for exactness in MIXES[mix]:
        for number, prompt in enumerate(requests.prompts):
            name = f"{exactness.name.lower()} {number}"
            tokens[name] = []
            sizes = len(prompt), requests.generated
            openings.append(Open(name, prompt, *sizes, [], Sampling(temperature=0.0), exactness))
    take_turns(verifier, drafter, openings, emit)
    return tokens, verifier.totals


def take_turns(verifier: Verifier, drafter: Drafter, openings: list[Open], emit: Callable[[ServedEvent], None]) -> None:
    """The draft does all that it can, then the target one step, until all sessions have ended."""
    to_draft: list[TargetEvent] = []
    to_target: list[DraftEvent] = []
    target_end, draft_end = DraftPeer("draft", to_draft.append), TargetPeer(to_target.append)
    verifier.protocol.attach(target_end)
    drafter.attach(draft_end)
    for opening in openings:
        verifier.admission.open(opening, emit)
    while verifier.gauges["sessions"] or verifier.gauges["queued_sessions"]:
        for event in _drain(to_draft):
            drafter.receive(draft_end, event)
        while (drafting := drafter.plan_step()) is not None:
            drafter.finish_step(drafting, drafter.execute(drafting))
        for said in _drain(to_target):
            verifier.protocol.receive(target_end, said)
        step = verifier.plan_step()
        if step is not None:
            verifier.finish_step(step, verifier.execute(step))
        elif not to_draft:
            raise RuntimeError("sessions are open, and neither target nor draft has anything to do")


def _drain(events: list[Event]) -> list[Event]:
    drained = events.copy()
    events.clear()
    return drained


COLUMNS: Columns[IdentityRow] = {
    "": lambda row: row.mix,
    "sessions": lambda row: str(row.sessions),
    "frames": lambda row: str(row.frames),
    "hot": lambda row: f"{row.frames / row.pages:.1%}",
    "fetched": lambda row: f"{row.fetched:,}",
    "staged": lambda row: f"{row.staged:,}",
    "overflow": lambda row: f"{row.overflow:,}",
    "tokens": lambda row: f"{row.tokens:,}",
    "identical": lambda row: "yes" if row.identical else f"no, {row.difference}",
}


def to_text(rows: list[IdentityRow]) -> str:
    """Return the table, below a line on how the engine ran."""
    device = default_device()
    engine = ", deterministic engine" if device == "cuda" else ""
    return f"float32 on {device}{engine}\n{text_table(COLUMNS, rows, left=1)}"
