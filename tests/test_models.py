"""The bundled pair as it lies in specahead/models/, and the program that trained it, on a very small pair."""

import json
import random
from math import log
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.text.replies import ReplyFormat, find_format
from specahead.models import DRAFT, TARGET
from specahead.models.pair import Shape
from specahead.models.train_pair import Report, Settings, train
from specahead.models.training_text import END_OF_TEXT

NAMES = ("alice", "bertram", "clara", "dorothy", "edmund")
THINGS = ("apple", "lantern", "garden", "carriage", "letter")


def story(rng: random.Random, sentences: int) -> str:
    def sentence() -> str:
        giver, taker = rng.sample(NAMES, 2)
        return f"{giver} gave the {rng.choice(THINGS)} to {taker} in the morning."

    return "\n".join(sentence() for _ in range(sentences))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A run of a few seconds on a CPU, on stories and a tokenizer made here."""
    folder, rng = tmp_path_factory.mktemp("pair"), random.Random(0)
    text = "\0".join(story(rng, 400) for _ in range(5))
    (folder / "text.txt").write_text(text)
    (folder / "hold.txt").write_text("\0".join([*(story(rng, 100) for _ in range(3)), "too short"]))
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = BpeTrainer(vocab_size=300, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text], bpe)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Settings(
        text=[folder / "text.txt"],
        hold=folder / "hold.txt",
        tokenizer=folder / "tokenizer.json",
        out=folder / "out",
        target=Shape(64, 2, 2, 1, 128, head_dim=32),
        draft=Shape(32, 1, 2, 1, 64, head_dim=32),
        seq=512,
        short_seq=256,
        step_tokens=1024,
        seconds=6,
        lr=1e-2,
        warmup=5,
        held_out_tokens=600,
        device="cpu",
    )


@pytest.fixture(scope="module")
def report(settings: Settings) -> Report:
    return train(settings)


# The bundled pair


@pytest.mark.parametrize(("folder", "parameters"), [(TARGET, 10_392_832), (DRAFT, 1_508_480)])
def test_bundled_model_loads(folder: Path, parameters: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
    assert model.num_parameters() == parameters
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == 4096
    assert model.config.max_position_embeddings == 32768


def test_bundled_tokenizers_are_the_same() -> None:
    target, draft = AutoTokenizer.from_pretrained(TARGET), AutoTokenizer.from_pretrained(DRAFT)
    assert target.get_vocab() == draft.get_vocab()
    assert len(target) == 4096
    assert target.eos_token == draft.eos_token == END_OF_TEXT
    assert (TARGET / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("folder", [TARGET, DRAFT])
def test_chat_template(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Two\nlines "}]
    plain = "system: Be brief.\n\nuser:  Two\nlines \n\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == plain
    prompted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompted == plain + "assistant:"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == prompted


@pytest.mark.parametrize("folder", [TARGET, DRAFT])
def test_the_chat_template_has_tools_calls_and_results(folder: Path) -> None:
    """What it shows as a call is read as one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    function = {"name": "weather", "arguments": {"city": 'the "Rosé"'}}
    messages = [
        {"role": "user", "content": "Is it sunny?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "It is."},
    ]
    form = find_format(tokenizer, "auto", "auto")
    assert form == ReplyFormat("hermes")
    prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    shown, _, asked = prompt.partition("user: ")
    assert shown.startswith("system: ") and json.dumps(tools[0]) in shown
    assert asked.endswith("tool: It is.\n\nassistant:")
    written = asked.partition("assistant: ")[2].partition("\n\ntool:")[0]
    (call, *more) = form.parser("assistant:", tools).feed(written, last=True)
    assert call.call is not None and call.call.name == "weather"
    text = call.call.arguments + "".join(delta.arguments for delta in more)
    assert json.loads(text) == function["arguments"]


# The training run


@pytest.mark.long
def test_training_lowers_both_losses(report: Report) -> None:
    first = report.progress.records[0]
    assert first.step == 1
    assert first.target == pytest.approx(log(300), abs=0.5)  # an untrained model knows nothing
    assert log(report.heldout_target_ppl) < first.target - 1.5
    assert log(report.heldout_draft_ppl) < first.draft - 1.0
