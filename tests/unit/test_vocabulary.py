"""Models of one tokenizer whose vocabularies are padded differently fit each other, and padding is never chosen."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

from specahead import models
from specahead.config import ModelSettings
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.loading.model import load_module
from specahead.engine.loading.opening import OpenedModel, open_model
from specahead.engine.loading.tokenizer import count_token_ids, load_tokenizer
from specahead.engine.steps.inputs import SequenceInput
from specahead.wire.messages import Hello

IDS = 4096  # of the bundled tokenizer


def pad(source: Path, folder: Path, rows: int) -> str:
    """A copy of the model with as many rows of vocabulary, of which those that are padding have the largest logits."""
    shutil.copytree(source, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.resize_token_embeddings(rows, mean_resizing=False)
    model.tie_weights()
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head[IDS:] = 9 * head[:IDS].repeat(2, 1)[: rows - IDS]
    assert model.config.vocab_size == rows
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenedModel, OpenedModel]:
    """Draft and target, as services open them."""
    folder = tmp_path_factory.mktemp("padded")
    draft = pad(models.DRAFT, folder / "draft", IDS + 64)
    target = pad(models.TARGET, folder / "target", IDS + 3000)
    draft_side, target_side = (
        open_model(ModelSettings(model=path, device="cpu", kv_tokens=320, max_context=200)) for path in (draft, target)
    )
    return draft_side, target_side


def test_padding_is_no_mismatch(sides: tuple[OpenedModel, OpenedModel]) -> None:
    draft, target = (
        Hello("a side", "a model", side.shape.vocab_size, side.tokenizer_hash, "a plan", 4, 16) for side in sides
    )
    assert target.mismatch(draft) is None
    assert target.vocab_size == sides[0].runner.vocab_size == IDS


def test_padding_is_never_chosen(sides: tuple[OpenedModel, OpenedModel]) -> None:
    """The logits are those of the models before padding, whose tokens the padding would have outweighed."""
    tokens = list(range(300, 340))
    for side, source in zip(sides, (models.DRAFT, models.TARGET), strict=True):
        (output,) = side.runner.forward([SequenceInput(SequenceKV(), tokens, "all")])
        unpadded = load_module(str(source), torch.float32, "cpu", "eager")
        with torch.inference_mode():
            wanted = unpadded(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(output.logits, wanted, atol=2e-4, rtol=1e-3)


def test_added_tokens_and_gaps_are_counted() -> None:
    tokenizer = load_tokenizer(str(models.DRAFT))
    assert count_token_ids(tokenizer) == IDS
    tokenizer.add_tokens(["a token of its own"])
    assert count_token_ids(tokenizer) == IDS + 1
