"""The device chain: launches that follow one another on a device before the host has seen what they give.

Each step leaves a verdict and each round of a draft leaves its tokens in one row a sequence, at addresses that captured
launches know. The next launch reads these rows, and begins where they say: a step after a step, a draft's rounds after
a step, a step that judges what rounds have drafted. The host lays all of them out as if nothing had been accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specahead.engine.kv.pages import PAGE_SIZE
from specahead.engine.steps.shapes import PassShape
from specahead.kernels.advance_rows import Choice, Followers, LaunchRows, Verdicts, advance_rows
from specahead.kernels.backends import default_backend, power_of_two
from specahead.kernels.copy_drafts import Drafts, Judged, JudgedRows, copy_drafts

MOST_CHAINED = 1024  # sequences of a step that the next one follows before the host has seen it
# What a step that drafts draws with, by position, and the same from the first position on at which it may begin.
UNIFORMS = {
    "draft_uniforms": "all_draft_uniforms",
    "accept_uniforms": "all_accept_uniforms",
    "draw_uniforms": "all_draw_uniforms",
}
# A verdict that counts in place of a step's: drafted tokens that are accepted, the token that follows them, and the
# last accepted token if it is an alternative to the one that was drafted, else NO_ALTERNATIVE.
Imposed = tuple[int, int, int]
NO_ALTERNATIVE = -1


@dataclass(frozen=True)
class DeviceChain:
    """The rows of a device chain. Tensors keep their addresses."""

    verdict_rows: Tensor
    """int32 [3, rows], the verdicts of the last step."""
    drafts: Drafts | None = None
    """What the last rounds of a draft on this device proposed; None: there is no draft."""

    @staticmethod
    def make(sequences: int, device: torch.device) -> "DeviceChain":
        """Return a chain with rows for the verdicts of at least `sequences` and MOST_CHAINED sequences."""
        rows = max(MOST_CHAINED, power_of_two(sequences))
        return DeviceChain(torch.zeros(3, rows, dtype=torch.int32, device=device))

    @property
    def verdicts(self) -> Verdicts:
        return Verdicts(*self.verdict_rows.unbind())

    def with_drafts(self, sequences: int, gamma: int, support: int, bitmap: tuple[int, int]) -> "DeviceChain":
        """Return the chain with rows for rounds of up to `sequences` sequences and `gamma` tokens.

        support: entries of the distribution that each token was drawn from. bitmap: rows and words of an announcement.
        """
        device, rows = self.verdict_rows.device, power_of_two(sequences)
        tokens, ids, likeliest = (
            torch.zeros(rows, gamma, *sizes, dtype=torch.int32, device=device) for sizes in ((), (support,), (2,))
        )
        bitmaps = torch.zeros(rows, *bitmap, dtype=torch.int64, device=device)
        return DeviceChain(
            self.verdict_rows, Drafts(tokens, ids, torch.zeros(ids.shape, device=device), likeliest, bitmaps)
        )

    def impose(self, imposed: Sequence[Imposed]) -> None:
        """Overwrite the verdicts of the last step, in the order of the device's stream."""
        given = torch.tensor(imposed, dtype=torch.int32).T
        self.verdict_rows[:, : len(imposed)].copy_(given, non_blocking=True)

    # Called where passes and rounds are launched.

    def leave_verdicts(
        self, given: dict[str, Tensor], accepted: Tensor, following: Tensor, other: Tensor | None
    ) -> None:
        """Leave the verdicts of a pass, int32 [sequences] each; other: the alternatives that it accepted, if any ran.

        Of tokens that were held, those of the rounds alone count: where one is rejected it is as if all of these were,
        since what follows is void. While a graph is made its launches may run without sequences, between a step and one
        that follows it: rows of sequences that are not there stay as they are. given: the buffers of the pass.
        """
        verdicts = [accepted, following]
        if "held" in given:  # rounds may follow
            verdicts = [
                (accepted - given["held"]).clamp(min=0),
                following,
                torch.full_like(following, NO_ALTERNATIVE) if other is None else other,
            ]
        here = self.verdict_rows[: len(verdicts), : len(accepted)]
        here.copy_(torch.where(given["lengths"] > 0, torch.stack(verdicts), here))

    def leave_drafts(self, results: dict[str, Tensor], gamma: int) -> None:
        """Leave what rounds of one branch have proposed. results: of their buffers; gamma: tokens of each."""
        assert self.drafts is not None
        drafts = self.drafts._asdict()
        for name, result in _RESULTS.items():
            if result in results:
                values = results[result][:gamma].transpose(0, 1)[: len(drafts[name])]
                drafts[name][tuple(map(slice, values.shape))].copy_(values)
        bitmaps = results.get("bitmaps")
        if bitmaps is None:
            self.drafts.bitmaps.zero_()
            return
        kept = self.drafts.bitmaps[: len(bitmaps)]
        words = min(kept.shape[2], bitmaps.shape[2])  # what lies beyond a target's context is never announced
        kept[..., :words].copy_(bitmaps[: len(kept), :, :words])
        kept[..., words:].zero_()

    def follow_step(self, given: dict[str, Tensor], shape: PassShape) -> None:
        """Have the sequences of a step begin where the last one ended, in place. given: the buffers of the step."""
        choices: list[Choice] = []
        for name, of_all in UNIFORMS.items():
            if of_all in given:
                count = given[of_all].shape[1] - shape.drafts
                given[name] = given[of_all].new_empty(shape.sequences, count)
                choices.append((given[of_all].unfold(1, count, 1), given[name]))
        self._advance(given, None, choices)
        if shape.drafts and "blocks" in given:
            given["blocks"].copy_(-(-given["lengths"] // shape.read.block_size))

    def follow_step_in_round(self, given: dict[str, Tensor], passes: int) -> None:
        """Have the sequences of a round begin where a step of the target ended, in place.

        given: the buffers of the round. Adds the uniforms, limits and words for the number of accepted tokens, and
        began: int32 [3, sequences], the verdicts that it follows.
        """
        sequences = len(given["lengths"])
        given["uniforms"] = given["all_uniforms"].new_empty(passes, sequences)
        choices: list[Choice] = [(given["all_uniforms"].unfold(1, passes, 1), given["uniforms"].T)]
        if "all_limits" in given:
            given["limits"], given["words"] = (
                given["all_limits"].new_empty(size) for size in ((3, sequences), sequences)
            )
            choices.append((given["all_limits"].permute(2, 0, 1), given["limits"].T))
            choices.append((given["all_words"].T[..., None], given["words"][:, None]))
        given["began"] = self._advance(given, given["all_previous"].T, choices)

    def _advance(self, given: dict[str, Tensor], previous: Tensor | None, choices: list[Choice]) -> Tensor:
        rows = LaunchRows(
            given["query_starts"],
            given["lengths"],
            given["block_tables"],
            given["token_ids"],
            given["positions"],
            given["slots"],
        )
        followers, backend = Followers(given["follows"], given["judged"]), default_backend(rows.lengths.device)
        return advance_rows(self.verdicts, followers, rows, previous, choices, PAGE_SIZE, backend)

    def take_drafts(self, given: dict[str, Tensor]) -> None:
        """Put what rounds have drafted where a pass takes the tokens that it judges from. given: its buffers."""
        assert self.drafts is not None
        rows = JudgedRows(given["draft_rows"], given["held"], given["draft_counts"], given["query_starts"])
        optional = ("support_ids", "support_probs", "bitmaps", "alternatives", "alternative_counts")
        judged = Judged(given["token_ids"], given["draft_tokens"], *(given.get(name) for name in optional))
        copy_drafts(rows, judged, self.drafts, default_backend(judged.tokens.device))


_RESULTS = {"tokens": "tokens", "ids": "ids", "probs": "probs", "likeliest": "alternatives"}  # of rounds
