"""Train a small draft/target pair of Llama models that share a tokenizer, one process a GPU.

    torchrun --nproc-per-node N -m specahead.models.train_pair --text FILES --hold FILE --tokenizer FILE --out DIR

Both models learn in one loop: the target from the text, the draft from the text and from the target's logits.
DIR/target and DIR/draft can then be used as --target and --draft. A GPU is used where there is one; without
torchrun one process trains alone, and a CPU does for very small pairs.
"""

import copy
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from specahead.models import TARGET
from specahead.models.pair import MAX_POSITIONS, Losses, Pair, evaluate, induction, llama
from specahead.models.train_settings import Settings, learning_rate, phases, settings_from
from specahead.models.training_text import (
    END_OF_TEXT,
    TrainingText,
    end_of_text_id,
    load_tokenizer,
    tokenise,
    tokenise_held_out,
)

CLOCK_STEPS = 10  # steps between looks at the clock, which cost a broadcast


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


def new_optimiser(model: torch.nn.Module, fused: bool) -> torch.optim.AdamW:
    """Return an optimiser, whose learning rate `take_step` sets."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=fused)


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


def update(pair: Pair, optimiser: torch.optim.Optimizer, losses: Losses, lr: float, place: Place) -> None:
    losses.total.backward()
    average_gradients(pair, place)
    take_step([pair.target, pair.draft], optimiser, lr)


def take_step(models: Sequence[torch.nn.Module], optimiser: torch.optim.Optimizer, lr: float) -> None:
    """Take a step by the gradients of all models, and clear them."""
    for model in models:  # apart, so that one's spike does not shrink the other's step
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimiser.param_groups:
        group["lr"] = lr
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)


class Clock:
    """The share of the training time that has passed, the same in all processes."""

    def __init__(self, seconds: float, place: Place) -> None:
        self.seconds, self.place = seconds, place
        self.start, self.last = time.monotonic(), 0.0

    def passed(self) -> float:
        return time.monotonic() - self.start

    def share(self, step: int) -> float:
        if step % CLOCK_STEPS == 0:
            share = torch.tensor([min(1.0, self.passed() / self.seconds)], device=self.place.device)
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
            f"step {self.step} seq {self.seq} lr {self.lr:.2e} target {self.target:.3f} "
            f"draft {self.draft:.3f} kl {self.divergence:.3f} agree {self.agreement:.3f} "
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
class Progress:
    """How far training went."""

    steps: int
    tokens_seen: int  # by all processes
    records: Sequence[Record]  # of some steps; empty in all processes but the first


@dataclass(frozen=True)
class Report:
    """What came of a training run; DIR/train.json holds the same."""

    progress: Progress
    unique_tokens: int
    heldout_target_ppl: float
    heldout_draft_ppl: float
    divergence: float
    agreement: float


def new_pair(settings: Settings, tokenizer: Tokenizer, place: Place) -> Pair:
    """An untrained pair for the tokenizer's vocabulary, the same in all processes."""
    torch.manual_seed(0)
    vocab, end_of_text = tokenizer.get_vocab_size(), end_of_text_id(tokenizer)
    pair = Pair(llama(settings.target, vocab, end_of_text), llama(settings.draft, vocab, end_of_text))
    pair.to(place.device)
    if place.world > 1:
        for p in pair.parameters():
            dist.broadcast(p.data, 0)
    return pair


def fit(pair: Pair, text: TrainingText, settings: Settings, place: Place) -> Progress:
    # Compiled for each phase's shape alone. On a CPU compiling takes longer than the small runs meant for it.
    forward = torch.compile(pair, dynamic=False) if place.cuda else pair
    optimiser = new_optimiser(pair, place.cuda)
    clock, step, seen, records = Clock(settings.seconds, place), 0, 0, []
    for number, phase in enumerate(phases(settings)):
        seed = (settings.seed, place.rank, number)
        with closing(text.batches(seed, phase.rows, phase.seq, pin=place.cuda)) as batches:
            while (share := clock.share(step)) < phase.until:
                lr = learning_rate(settings.lr, settings.warmup, step, share)
                x, y = (ids.to(place.device, non_blocking=True) for ids in next(batches))
                losses = Losses(*forward(x, y))
                update(pair, optimiser, losses, lr, place)
                step, seen = step + 1, seen + phase.rows * phase.seq * place.world
                if place.rank == 0 and (step in (1, 2, 10, 100) or step % 500 == 0):
                    copying = induction(pair, text.tokenizer.get_vocab_size())
                    records.append(Record(step, phase.seq, lr, seen, *losses.figures(), copying))
                    print(f"[{clock.passed():6.1f}s] {records[-1]}", flush=True)
                if place.rank == 0 and step % settings.save_every == 0:
                    save(pair, settings)
    return Progress(step, seen, records)


def train(settings: Settings) -> Report | None:
    """Trains, evaluates and saves a pair; only the first process reports."""
    tokenizer = load_tokenizer(settings.tokenizer)
    settings.out.mkdir(parents=True, exist_ok=True)
    token_file = settings.out / "tokens.npy"
    with joined(settings.device) as place:
        if place.rank == 0:
            tokenise(settings.text, tokenizer, into=token_file)
            held_out = tokenise_held_out(settings.hold, tokenizer, least=settings.held_out_tokens)
        place.barrier()
        text = TrainingText.open(token_file, tokenizer)
        pair = new_pair(settings, tokenizer, place)
        progress = fit(pair, text, settings, place)
        report = None
        if place.rank == 0:
            rows = [torch.from_numpy(ids[: settings.seq + 1]) for ids in held_out[: settings.held_out_rows]]
            target, draft, divergence, agreement = evaluate(pair, rows).figures()
            report = Report(progress, len(text.tokens), math.exp(target), math.exp(draft), divergence, agreement)
            save(pair, settings)
            (settings.out / "train.json").write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
        place.barrier()
    return report


def main(argv: Sequence[str] | None = None) -> None:
    report = train(settings_from(argv))
    if report is not None:
        print(
            f"held-out: target ppl {report.heldout_target_ppl:.3f} draft ppl {report.heldout_draft_ppl:.3f} "
            f"kl {report.divergence:.3f} agree {report.agreement:.4f}"
        )


if __name__ == "__main__":
    main()
