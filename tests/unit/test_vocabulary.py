"""Models of one tokenizer whose vocabularies are padded differently fit each other, and padding is never chosen."""

import shutil
from pathlib import Path

import pytest
import torch
import transformers

import models
from engine.batch import SequenceInput
from engine.loading import ModelSettings, count_token_ids, load_model, load_tokenizer
from engine.paged_kv import SequenceKV
from wire.handshake import Side, SideSettings, open_side

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


def open_padded(source: Path, folder: Path, rows: int) -> Side:
    model = ModelSettings(pad(source, folder, rows), "cpu", kv_tokens=320, max_context=200)
    return open_side(SideSettings(source.name, model, str(models.PLAN), gamma=4))


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Side, Side]:
    """Draft and target."""
    folder = tmp_path_factory.mktemp("padded")
    return (
        open_padded(models.DRAFT, folder / "draft", IDS + 64),
        open_padded(models.TARGET, folder / "target", IDS + 3000),
    )


def test_padding_is_no_mismatch(sides: tuple[Side, Side]) -> None:
    draft, target = sides
    assert target.hello.mismatch(draft.hello) is None
    assert draft.hello.vocab_size == draft.shape.vocab_size == draft.runner.vocab_size == IDS


def test_padding_is_never_chosen(sides: tuple[Side, Side]) -> None:
    """The logits are those of the models before padding, whose tokens the padding would have outweighed."""
    tokens = list(range(300, 340))
    for side, source in zip(sides, (models.DRAFT, models.TARGET), strict=True):
        (output,) = side.runner.forward([SequenceInput(SequenceKV(), tokens, "all")])
        assert output.logits is not None
        unpadded = load_model(str(source), torch.float32, "cpu", "eager")
        with torch.inference_mode():
            wanted = unpadded(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(output.logits, wanted, atol=2e-4, rtol=1e-3)


def test_added_tokens_and_gaps_are_counted() -> None:
    tokenizer = load_tokenizer(str(models.DRAFT))
    assert count_token_ids(tokenizer) == IDS
    tokenizer.add_tokens(["a token of its own"])
    assert count_token_ids(tokenizer) == IDS + 1
