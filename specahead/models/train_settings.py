"""What a training run is told: its settings, and the schedule that follows from them."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specahead.models.pair import Shape
from specahead.models.training_text import MIN_ROW

TARGET_SHAPE = Shape(256, 10, 8, 4, 704)  # 10.4 M parameters with 4,096 tokens
DRAFT_SHAPE = Shape(128, 4, 4, 2, 384)  # 1.5 M


@dataclass(frozen=True)
class Settings:
    text: Sequence[Path]  # training text, documents parted by a zero byte
    hold: Path  # held-out text, parted likewise
    tokenizer: Path  # a tokenizer.json with an <|endoftext|> token
    out: Path
    target: Shape = TARGET_SHAPE
    draft: Shape = DRAFT_SHAPE
    seq: int = 8192  # tokens a row in the second phase
    short_seq: int = 1024  # and in the first, which is cheaper a token
    short_share: float = 0.42  # share of the time that the first phase takes
    step_tokens: int = 16384  # tokens a process and step
    seconds: float = 400.0
    lr: float = 2e-3  # at its peak
    warmup: int = 200  # steps
    save_every: int = 2000  # steps
    held_out_rows: int = 24  # at most
    held_out_tokens: int = 20_000  # shorter held-out documents are left out
    seed: int = 1234
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")

    def __post_init__(self) -> None:
        if min(self.seq, self.short_seq) < MIN_ROW:
            raise ValueError(f"a row must have at least {MIN_ROW} tokens")
        if self.seconds <= 0 or self.warmup < 1:
            raise ValueError("seconds and warm-up steps must be above 0")


@dataclass(frozen=True)
class Phase:
    """Training on rows of one length."""

    seq: int
    rows: int  # a process and step
    until: float  # share of the time at which the phase ends


def phases(settings: Settings) -> tuple[Phase, Phase]:
    return (
        Phase(settings.short_seq, max(1, settings.step_tokens // settings.short_seq), settings.short_share),
        Phase(settings.seq, max(1, settings.step_tokens // settings.seq), 1.0),
    )


def learning_rate(peak: float, warmup: int, step: int, share: float) -> float:
    """Return the learning rate of a step: linear warm-up, times half a cosine that ends at 2 % of the peak.

    warmup: in steps. share: the part of the run that is over, 0 to 1.
    """
    warm = min(1.0, (step + 1) / warmup)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))


def settings_from(argv: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(
        description="Train a draft/target pair.",
        argument_default=argparse.SUPPRESS,  # defaults live in Settings
    )
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="training text, UTF-8")
    parser.add_argument("--hold", type=Path, required=True, help="held-out text, UTF-8")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    shape = "hidden,layers,heads,kv_heads,intermediate[,head_dim]"
    parser.add_argument("--target", type=Shape.parse, metavar="SHAPE", help=shape)
    parser.add_argument("--draft", type=Shape.parse, metavar="SHAPE", help=shape)
    parser.add_argument("--seq", type=int, help="tokens a row in the second phase")
    parser.add_argument("--short-seq", type=int, help="tokens a row in the first phase")
    parser.add_argument("--short-share", type=float, help="share of the time for the first phase")
    parser.add_argument("--step-tokens", type=int, help="tokens a process and step")
    parser.add_argument("--seconds", type=float, help="training time, without tokenising and evaluation")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--warmup", type=int, help="steps until the peak learning rate")
    parser.add_argument("--save-every", type=int, help="steps between saves")
    parser.add_argument("--held-out-rows", type=int, help="most rows to evaluate on")
    parser.add_argument("--held-out-tokens", type=int, help="leave shorter held-out documents out")
    parser.add_argument("--seed", type=int, help="seed of the training rows")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="the GPU where there is one")
    return Settings(**vars(parser.parse_args(argv)))
