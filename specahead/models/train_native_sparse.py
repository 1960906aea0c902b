"""Train models with native sparse attention, one for each number of tokens that share a selection.

    python -m specahead.models.train_native_sparse --text FILES --out DIR

All models start from the bundled draft and see the same rows in the same order. Each is written to DIR/shared-N; a
folder that exists is kept. `specahead evaluate sharing --model DIR/shared-*` measures them. A GPU is used if there is
one.
"""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM

from specahead.models import DRAFT
from specahead.models.native_sparse import NativeSparseLlama, SparseRule
from specahead.models.pair import Shape, llama
from specahead.models.train_pair import new_optimiser, take_step
from specahead.models.train_settings import learning_rate
from specahead.models.training_text import TrainingText, end_of_text_id, load_tokenizer, tokenise


@dataclass(frozen=True)
class Settings:
    """The settings of a training run."""

    text: Sequence[Path]
    """Files of training text, UTF-8, with a zero byte between documents."""
    out: Path
    """The folder to write to."""
    shared: Sequence[int] = (1, 2, 4, 8)
    """Numbers of tokens that share a selection. A model is trained for each."""
    rule: SparseRule = field(default_factory=SparseRule)
    start: Path = DRAFT
    """The folder of a Llama with the weights to start from, and the tokenizer."""
    shape: Shape | None = None
    """The sizes of models that start from random weights; None: they start from the weights in `start`."""
    steps: int = 500
    rows: int = 4
    """Rows of a step."""
    seq: int = 1024
    """Tokens of a row."""
    lr: float = 5e-4
    """The learning rate at its peak."""
    warmup: int = 25
    """Steps until the learning rate is at its peak."""
    seed: int = 1234
    """The seed of rows and random weights."""


def new_model(settings: Settings, tokenizer: Tokenizer) -> NativeSparseLlama:
    """Return an untrained model, the same at each call."""
    torch.manual_seed(settings.seed)
    if settings.shape is not None:
        random = llama(settings.shape, tokenizer.get_vocab_size(), end_of_text_id(tokenizer))
        return NativeSparseLlama(random.config, settings.rule)
    dense = LlamaForCausalLM.from_pretrained(settings.start, dtype=torch.float32)
    return NativeSparseLlama.from_dense(dense, settings.rule)


def fit(model: NativeSparseLlama, text: TrainingText, settings: Settings, shared: int) -> list[float]:
    """Train a model, and return the cross-entropy of each step in nats."""
    optimiser, device = new_optimiser(model, fused=True), model.llama.device
    losses = list[Tensor]()
    with closing(text.batches((settings.seed,), settings.rows, settings.seq, pin=False)) as batches:
        for step in tqdm(range(settings.steps), desc=f"training, {shared} share", disable=None):
            x, y = (ids.to(device) for ids in next(batches))
            with torch.autocast(device.type, torch.bfloat16):  # on a CPU, too, 1.4 times as fast as float32
                logits = model(x, shared)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            loss.backward()
            take_step([model], optimiser, learning_rate(settings.lr, settings.warmup, step, step / settings.steps))
            losses.append(loss.detach())
    return [loss.item() for loss in losses]


def train(settings: Settings) -> None:
    """Train and save a model for each number of tokens that share a selection."""
    tokenizer_file = settings.start / "tokenizer.json"
    tokenizer = load_tokenizer(tokenizer_file)
    with TemporaryDirectory() as scratch:
        token_file = Path(scratch) / "tokens.npy"
        tokenise(settings.text, tokenizer, into=token_file)
        text = TrainingText.open(token_file, tokenizer)
    for shared in settings.shared:
        folder = settings.out / f"shared-{shared}"
        if folder.exists():
            continue
        model = new_model(settings, tokenizer).to("cuda" if torch.cuda.is_available() else "cpu")
        losses = fit(model, text, settings, shared)
        model.save(folder, tokenizer_file)
        report = {**asdict(settings), "shared": shared, "unique_tokens": len(text.tokens), "losses": losses}
        (folder / "train.json").write_text(json.dumps(report, indent=1, default=str), encoding="utf-8")


def settings_from(argv: Sequence[str] | None) -> Settings:
    """Return the settings of a command line."""
    parser = argparse.ArgumentParser(
        description="Train models with native sparse attention, one for each number of tokens that share a selection.",
        argument_default=argparse.SUPPRESS,  # defaults live in Settings
    )
    parser.add_argument("--text", nargs="+", type=Path, required=True, help="training text, UTF-8")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--shared", nargs="+", type=int, help="tokens that share a selection: a model for each number")
    parser.add_argument("--rule", type=SparseRule.parse, help="block_size,top,first,local,window, each in SparseRule")
    parser.add_argument("--start", type=Path, help="folder of a Llama to start from")
    parser.add_argument(
        "--shape", type=Shape.parse, help="hidden,layers,heads,kv_heads,intermediate[,head_dim] of random weights"
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, help="rows of a step")
    parser.add_argument("--seq", type=int, help="tokens of a row")
    parser.add_argument("--lr", type=float, help="peak learning rate")
    parser.add_argument("--warmup", type=int, help="steps until the peak learning rate")
    parser.add_argument("--seed", type=int, help="seed of rows and random weights")
    return Settings(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    train(settings_from(None))
