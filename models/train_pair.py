"""Train a small draft/target pair of Llama models that share a tokenizer, one process a GPU.

    torchrun --nproc-per-node N -m models.train_pair --text FILES --hold FILE --tokenizer FILE --out DIR

Both models learn in one loop: the target from the text, the draft from the text and from the target's logits.
DIR/target and DIR/draft can then be used as --target and --draft. A GPU is used where there is one; without
torchrun one process trains alone, and a CPU does for very small pairs.
"""

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from models import TARGET
from models.pair import MAX_POSITIONS, Losses, Pair, Shape, evaluate, induction, llama
from models.training_text import (
    END_OF_TEXT,
    MIN_ROW,
    TrainingText,
    load_tokenizer,
    tokenise,
    tokenise_held_out,
)

CLOCK_STEPS = 10  # steps between looks at the clock, which cost a broadcast


@dataclass(frozen=True)
class Settings:
    text: Sequence[Path]  # training text, documents parted by a zero byte
    hold: Path  # held-out text, parted likewise
    tokenizer: Path  # a tokenizer.json with an <|endoftext|> token
    out: Path
    target: Shape = Shape(256, 10, 8, 4, 704)
    draft: Shape = Shape(128, 4, 4, 2, 384)
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


@dataclass(frozen=True)
class Place:
    """Where this process stands among those that torchrun started."""

    rank: int
    world: int
    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


@contextmanager
def joined(device: str) -> Iterator[Place]:
    """The process's place; with several processes, inside their process group."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    place = Place(rank, world, torch.device(device))
    if place.cuda:
        place = Place(rank, world, torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
        torch.cuda.set_device(place.device)
        torch.set_float32_matmul_precision("high")
    if world > 1:
        dist.init_process_group("nccl" if place.cuda else "gloo")
    try:
        yield place
    finally:
        if world > 1:
            dist.destroy_process_group()


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


def learning_rate(settings: Settings, step: int, share: float) -> float:
    """Linear warm-up by steps, times a cosine over the time's share that ends at 2 % of the peak."""
    warm = min(1.0, (step + 1) / settings.warmup)
    return settings.lr * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))


def optimiser(pair: Pair, settings: Settings, place: Place) -> torch.optim.AdamW:
    matrices = [p for p in pair.parameters() if p.ndim > 1]
    norms = [p for p in pair.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=place.cuda)


def average_gradients(pair: Pair, place: Place) -> None:
    """Every process's gradients become their mean, in one exchange; they are views of one buffer then."""
    if place.world == 1:
        return
    params = list(pair.parameters())
    flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
    dist.all_reduce(flat)
    flat /= place.world
    for p, grad in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = grad.view_as(p)


def update(pair: Pair, optimizer: torch.optim.Optimizer, losses: Losses, lr: float, place: Place) -> None:
    losses.total.backward()
    average_gradients(pair, place)
    for model in (pair.target, pair.draft):  # apart, so that one's spike does not shrink the other's step
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


class Clock:
    """The share of the training time that has passed, the same in all processes."""

    def __init__(self, seconds: float, place: Place) -> None:
        self.seconds, self.place = seconds, place
        self.start, self.last = time.monotonic(), 0.0

    def share(self, step: int) -> float:
        if step % CLOCK_STEPS == 0:
            passed = min(1.0, (time.monotonic() - self.start) / self.seconds)
            share = torch.tensor([passed], device=self.place.device)
            if self.place.world > 1:
                dist.broadcast(share, 0)
            self.last = float(share)
        return self.last


@dataclass(frozen=True)
class Record:
    """What is told of one step: losses of the first process's batch."""

    step: int
    seq: int
    lr: float
    tokens_seen: int
    target: float
    draft: float
    divergence: float
    agreement: float
    induction: tuple[float, float]  # target, draft

    def __str__(self) -> str:
        return (
            f"step {self.step} seq {self.seq} lr {self.lr:.2e} target {self.target:.3f} draft {self.draft:.3f} "
            f"kl {self.divergence:.3f} agree {self.agreement:.3f} "
            f"induction {self.induction[0]:.3f} {self.induction[1]:.3f} tokens {self.tokens_seen / 1e6:.1f}M"
        )


def save(pair: Pair, settings: Settings) -> None:
    """Writes out/target and out/draft: bfloat16 weights, configuration, tokenizer and chat template."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(settings.tokenizer),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=(TARGET / "chat_template.jinja").read_text(encoding="utf-8"),
    )
    for name, model in (("target", pair.target), ("draft", pair.draft)):
        saved = copy.deepcopy(model).to(torch.bfloat16)
        saved.config.use_cache = True
        saved.generation_config.use_cache = True
        saved.generation_config.pad_token_id = tokenizer.pad_token_id
        saved.save_pretrained(settings.out / name)
        tokenizer.save_pretrained(settings.out / name)


@dataclass(frozen=True)
class Report:
    """What came of a training run; DIR/train.json holds the same."""

    steps: int
    tokens_seen: int
    unique_tokens: int
    heldout_target_ppl: float
    heldout_draft_ppl: float
    divergence: float
    agreement: float
    records: Sequence[Record]


def prepare_pair(settings: Settings, vocab: int, end_of_text: int, place: Place) -> Pair:
    torch.manual_seed(0)
    pair = Pair(llama(settings.target, vocab, end_of_text), llama(settings.draft, vocab, end_of_text))
    pair.to(place.device)
    if place.world > 1:
        for p in pair.parameters():
            dist.broadcast(p.data, 0)
    return pair


def fit(pair: Pair, text: TrainingText, settings: Settings, place: Place) -> list[Record]:
    """The training loop; returns the records of the steps that were told of."""
    vocab = text.tokenizer.get_vocab_size()
    forward: Callable[..., tuple[torch.Tensor, ...]] = (
        torch.compile(pair, dynamic=False) if place.cuda else pair
    )
    optimizer, records = optimiser(pair, settings, place), []
    clock, step, seen = Clock(settings.seconds, place), 0, 0
    for number, phase in enumerate(phases(settings)):
        seed = (settings.seed, place.rank, number)
        with closing(text.batches(seed, phase.rows, phase.seq, pin=place.cuda)) as batches:
            while (share := clock.share(step)) < phase.until:
                lr = learning_rate(settings, step, share)
                x, y = (ids.to(place.device, non_blocking=True) for ids in next(batches))
                losses = Losses(*forward(x, y))
                update(pair, optimizer, losses, lr, place)
                step, seen = step + 1, seen + phase.rows * phase.seq * place.world
                if place.rank == 0 and (step in (1, 2, 10, 100) or step % 500 == 0):
                    figures = (v.item() for v in vars(losses).values())
                    records.append(
                        Record(step, phase.seq, lr, seen, *figures, induction=induction(pair, vocab))
                    )
                    print(f"[{time.monotonic() - clock.start:6.1f}s] {records[-1]}", flush=True)
                if place.rank == 0 and step % settings.save_every == 0:
                    save(pair, settings)
    return records


def train(settings: Settings) -> Report | None:
    """Trains, evaluates and saves a pair; only the first process reports."""
    tokenizer = load_tokenizer(settings.tokenizer)
    vocab, end_of_text = tokenizer.get_vocab_size(), tokenizer.token_to_id(END_OF_TEXT)
    settings.out.mkdir(parents=True, exist_ok=True)
    token_file = settings.out / "tokens.npy"
    with joined(settings.device) as place:
        if place.rank == 0:
            tokenise(settings.text, tokenizer, into=token_file)
            held_out = tokenise_held_out(settings.hold, tokenizer, least=settings.held_out_tokens)
        place.barrier()
        text = TrainingText.open(token_file, tokenizer)
        pair = prepare_pair(settings, vocab, end_of_text, place)
        records = fit(pair, text, settings, place)
        report = None
        if place.rank == 0:
            rows = [torch.from_numpy(ids[: settings.seq + 1]) for ids in held_out[: settings.held_out_rows]]
            report = summarise(records, evaluate(pair, rows), unique_tokens=len(text.tokens))
            save(pair, settings)
            (settings.out / "train.json").write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
        place.barrier()
    return report


def summarise(records: Sequence[Record], held_out: Losses, unique_tokens: int) -> Report:
    return Report(
        steps=records[-1].step,
        tokens_seen=records[-1].tokens_seen,
        unique_tokens=unique_tokens,
        heldout_target_ppl=held_out.target.exp().item(),
        heldout_draft_ppl=held_out.draft.exp().item(),
        divergence=held_out.divergence.item(),
        agreement=held_out.agreement.item(),
        records=records,
    )


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


def main(argv: Sequence[str] | None = None) -> None:
    report = train(settings_from(argv))
    if report is not None:
        print(
            f"held-out: target ppl {report.heldout_target_ppl:.3f} draft ppl {report.heldout_draft_ppl:.3f} "
            f"kl {report.divergence:.3f} agree {report.agreement:.4f}"
        )


if __name__ == "__main__":
    main()
