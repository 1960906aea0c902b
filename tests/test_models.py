"""The bundled pair as it lies in specahead/models/, and the program that trained it, on a very small pair."""

import random
import threading
from contextlib import closing
from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from specahead.models import DRAFT, TARGET
from specahead.models.pair import Shape
from specahead.models.train_pair import Report, Settings, train
from specahead.models.train_settings import learning_rate, phases, settings_from
from specahead.models.training_text import END_OF_TEXT, TrainingText, load_tokenizer, tokenise, tokenise_held_out

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
    report = train(settings)
    assert report is not None
    return report


@pytest.fixture(scope="module")
def training_text(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> TrainingText:
    token_file = tmp_path_factory.mktemp("tokens") / "tokens.npy"
    tokenizer = load_tokenizer(settings.tokenizer)
    tokenise(settings.text, tokenizer, into=token_file)
    return TrainingText.open(token_file, tokenizer)


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


# The training text


def test_batches_follow_from_the_seed_and_end_their_threads(training_text: TrainingText) -> None:
    threads = threading.active_count()

    def first_two(seed: tuple[int, ...]) -> list[torch.Tensor]:
        with closing(training_text.batches(seed, rows=4, seq=256, pin=False)) as batches:
            pairs = [next(batches) for _ in range(2)]
        for x, y in pairs:
            assert x.shape == y.shape == (4, 256)
            assert torch.equal(x[:, 1:], y[:, :-1])
        return [x for x, _ in pairs]

    a, b, other = first_two((1, 0)), first_two((1, 0)), first_two((2, 0))
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a[0], other[0])
    assert threading.active_count() == threads


def test_rows_hold_facts_and_later_their_answers(training_text: TrainingText) -> None:
    rng = np.random.default_rng(0)
    rows = [training_text.tokenizer.decode(training_text.row(rng, 1024).tolist()) for _ in range(200)]
    asked = [row.split("What is the pass key? The pass key is ") for row in rows]
    # Facts may write over one another, so not every question still has its fact; most do.
    answered = [key[:5] in before for before, key, *_ in (parts for parts in asked if len(parts) > 1)]
    assert len(answered) > 5
    assert sum(answered) > len(answered) / 2
    untouched = training_text.tokenizer.decode(training_text.tokens.tolist())
    assert 60 < sum(row in untouched for row in rows) < 140  # half of the rows are plain text


def test_text_without_its_needs_is_refused(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no document"):
        tokenise_held_out(settings.hold, load_tokenizer(settings.tokenizer), least=100_000)
    Tokenizer(BPE()).save(str(tmp_path / "bare.json"))
    with pytest.raises(ValueError, match="endoftext"):
        load_tokenizer(tmp_path / "bare.json")


# The training run


def test_defaults_are_the_bundled_pairs() -> None:
    given = ["--text", "a", "b", "--hold", "c", "--tokenizer", "d", "--out", "e", "--draft", "1,2,3,4,5"]
    settings = settings_from(given)
    assert settings.text == [Path("a"), Path("b")]
    assert settings.draft == Shape(1, 2, 3, 4, 5, head_dim=64)
    assert settings.target == Shape(256, 10, 8, 4, 704, head_dim=64)
    assert [(p.seq, p.rows, p.until) for p in phases(settings)] == [(1024, 16, 0.42), (8192, 2, 1.0)]
    rates = [learning_rate(settings, step, share) for step, share in ((0, 0.0), (199, 0.0), (9999, 1.0))]
    assert rates == pytest.approx([2e-3 / 200, 2e-3, 2e-3 * 0.02])


def test_training_lowers_both_losses(report: Report) -> None:
    first = report.progress.records[0]
    assert first.step == 1
    assert first.target == pytest.approx(log(300), abs=0.5)  # an untrained model knows nothing
    assert log(report.heldout_target_ppl) < first.target - 1.5
    assert log(report.heldout_draft_ppl) < first.draft - 1.0


def test_trained_pair_loads_and_shares_its_vocabulary(settings: Settings, report: Report) -> None:
    folders = [settings.out / "target", settings.out / "draft"]
    vocabularies = [AutoTokenizer.from_pretrained(folder).get_vocab() for folder in folders]
    assert vocabularies[0] == vocabularies[1]
    for folder, layers in zip(folders, (2, 1), strict=True):
        model = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)
        assert model.config.num_hidden_layers == layers
        assert model.config.vocab_size == len(vocabularies[0]) == 300
        prompt = AutoTokenizer.from_pretrained(folder)("alice gave the", return_tensors="pt")
        assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] > prompt.input_ids.shape[1]
    assert (folders[0] / "chat_template.jinja").read_text() == (TARGET / "chat_template.jinja").read_text()
