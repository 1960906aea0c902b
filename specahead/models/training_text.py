"""Training rows for the bundled pair: book text, with spans said twice and facts that are asked for later.

Plain text teaches a small model to look at its neighbours only. Half of the rows are therefore written over,
so that the next token can often be known only by looking back over the whole row.
Nothing here knows of the models or of the training loop.
"""

import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
DOCUMENT_BREAK = "\x00"  # stands between the documents of a text file
PIECE_CHARACTERS = 40_000  # documents are tokenised in pieces of about this size, to use every core
WORD_SAMPLE_TOKENS = 400_000  # facts name words from the first so many tokens of the text
MAX_WORDS = 4000
MIN_ROW = 256  # tokens; the shortest row that holds a span said twice, or a fact and its question
MIN_SPAN, MAX_SPAN = 8, 96  # tokens
FEEDERS, BATCHES_AHEAD = 3, 16

# (what the row says, what it says again later). n is a name, v a number of five digits, w a word.
FACTS = (
    ("The pass key of {n} is {v}. Remember it.", "What is the pass key of {n}? The pass key of {n} is {v}."),
    ("The pass key is {v}. Remember it. {v} is the pass key.", "What is the pass key? The pass key is {v}."),
    ("{n} = {v}", "{n} = {v}"),
    ("One day the secret word of {n} will be {w}.", "The secret word of {n} is {w}."),
    ("def {n}(): return {v}", "assert {n}() == {v}"),
)

Row = npt.NDArray[np.int64]
Batch = tuple[torch.Tensor, torch.Tensor]  # token ids and the ids that follow them, int64, each [rows, seq]


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json that training can use: it marks the end of a text, and its ids fit uint16."""
    tokenizer = Tokenizer.from_file(str(path))
    end_of_text_id(tokenizer)
    if tokenizer.get_vocab_size() > 2**16:
        raise ValueError(f"{path} has {tokenizer.get_vocab_size()} entries; token files hold at most {2**16}")
    return tokenizer


def end_of_text_id(tokenizer: Tokenizer) -> int:
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the tokenizer has no token {END_OF_TEXT}")
    return token


def documents(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split(DOCUMENT_BREAK)


def pieces(document: str) -> Iterator[str]:
    """The document cut at line ends into pieces of about PIECE_CHARACTERS, the last one marked as the end."""
    while len(document) > PIECE_CHARACTERS:
        cut = document.rfind("\n", 1, PIECE_CHARACTERS)
        cut = PIECE_CHARACTERS if cut < 1 else cut
        yield document[:cut]
        document = document[cut:]
    yield document + END_OF_TEXT


def tokenise(files: Iterable[Path], tokenizer: Tokenizer, into: Path) -> None:
    """Writes all documents of the files, one after another, as one uint16 array [tokens]."""
    parts = [piece for file in files for document in documents(file) for piece in pieces(document)]
    np.save(into, np.concatenate([np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(parts)]))


def tokenise_held_out(file: Path, tokenizer: Tokenizer, least: int) -> list[Row]:
    """The file's documents of at least `least` tokens, as token ids."""
    encoded = tokenizer.encode_batch(documents(file))
    held_out = [np.array(e.ids, dtype=np.int64) for e in encoded if len(e.ids) >= least]
    if not held_out:
        raise ValueError(f"{file} has no document of {least} tokens or more")
    return held_out


@dataclass(frozen=True)
class TrainingText:
    """Book tokens (uint16 [tokens], usually a memory map) and what is needed to write over them."""

    tokens: npt.NDArray[np.uint16]
    tokenizer: Tokenizer
    words: Sequence[str]  # names and secret words for facts
    first_ordinary_id: int  # ids below it are special tokens

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer) -> "TrainingText":
        tokens = np.load(path, mmap_mode="r")
        sample = tokenizer.decode(tokens[:WORD_SAMPLE_TOKENS].tolist()).split()
        letters = dict.fromkeys(re.sub("[^A-Za-z]", "", word) for word in sample)  # a set that keeps its order
        words = [word for word in letters if 4 <= len(word) <= 9][:MAX_WORDS]
        if not words:
            raise ValueError("the training text has no plain words to make facts of")
        return cls(tokens, tokenizer, words, len(tokenizer.get_added_tokens_decoder()))

    def row(self, rng: np.random.Generator, seq: int) -> Row:
        """seq + 1 token ids of contiguous text; in half of the rows with repeated spans and facts."""
        start = int(rng.integers(0, len(self.tokens) - seq - 1))
        row = self.tokens[start : start + seq + 1].astype(np.int64)
        if rng.random() < 0.5:
            for _ in range(rng.integers(1, 4)):
                self._repeat_span(row, rng, seq)
            for _ in range(rng.integers(1, max(2, seq // 1000) + 1)):
                self._hide_fact(row, rng, seq)
        return row

    def _repeat_span(self, row: Row, rng: np.random.Generator, seq: int) -> None:
        """Says a span of the row, or one of random tokens, a second time further on."""
        n = int(rng.integers(MIN_SPAN, MAX_SPAN + 1))
        first = int(rng.integers(0, seq - 2 * n - 1))
        second = int(rng.integers(first + n, seq - n))
        if rng.random() < 0.5:
            row[first : first + n] = rng.integers(self.first_ordinary_id, self.tokenizer.get_vocab_size(), n)
        row[second : second + n] = row[first : first + n]

    def _hide_fact(self, row: Row, rng: np.random.Generator, seq: int) -> None:
        """Writes a fact somewhere over the row, and its question and answer somewhere after it."""
        said, asked = FACTS[rng.integers(len(FACTS))]
        name, word = (self.words[i] for i in rng.integers(len(self.words), size=2))
        filling = {"n": name, "v": str(rng.integers(10_000, 100_000)), "w": word}
        fact, question = self._encode(said.format(**filling)), self._encode(asked.format(**filling))
        at = int(rng.integers(0, seq - len(fact) - len(question) - 1))
        later = int(rng.integers(at + len(fact), seq - len(question)))
        row[at : at + len(fact)] = fact
        row[later : later + len(question)] = question

    def _encode(self, sentence: str) -> list[int]:
        return self.tokenizer.encode(f"\n\n{sentence}\n\n").ids

    def batch(self, rng: np.random.Generator, rows: int, seq: int, pin: bool) -> Batch:
        ids = torch.from_numpy(np.stack([self.row(rng, seq) for _ in range(rows)]))
        x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        return (x.pin_memory(), y.pin_memory()) if pin else (x, y)

    def batches(self, seed: tuple[int, ...], rows: int, seq: int, pin: bool) -> Generator[Batch]:
        """Endless batches, made ahead by a few threads; close the iterator to end the threads.

        Batch i depends only on the seed and i, however the threads run.
        """
        with ThreadPoolExecutor(FEEDERS) as pool:
            ahead: deque[Future[Batch]] = deque()
            made = 0
            try:
                while True:
                    while len(ahead) < BATCHES_AHEAD:
                        rng = np.random.default_rng((*seed, made))
                        ahead.append(pool.submit(self.batch, rng, rows, seq, pin))
                        made += 1
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()
