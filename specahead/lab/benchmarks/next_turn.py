"""`specahead bench turn`: what the host does for the next turn of a long chat before the model runs, KV being there.

The parts that grow with the chat, one after the other as a request takes them, in one process: its template, its token
ids, whole and by the pieces that earlier turns have had (text/text_pieces.py), the hashes by which a target is
chosen, its way to the target, and finding its prefix in the KV of the target, once more in that of the draft.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from orchestrator.text.special_tokens import TextEncoder
from specahead import models
from specahead.engine.kv.cache import KVCache
from specahead.engine.kv.pages import PAGE_SIZE, SequenceKV, pages_for
from specahead.engine.kv.prefix_index import prefix_hashes
from specahead.engine.loading.tokenizer import load_tokenizer
from specahead.engine.sampling.distributions import Sampling
from specahead.lab.evaluation.report import align
from specahead.wire import convert
from specahead.wire.messages import Exactness, Open

# Special tokens around each message, as the templates of most models have them; the bundled one has none.
TEMPLATE = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
MESSAGE = 8000  # characters of each message

Given = TypeVar("Given")


@dataclass(frozen=True)
class TurnRow:
    """Milliseconds of each part, medians, of the turn that gives a chat so many tokens."""

    tokens: int
    template: float
    encoded_whole: float
    encoded_by_pieces: float
    hashes: float
    to_target: float
    found: float


def run(flags: argparse.Namespace) -> None:
    """Measure and print the table, and write it to the JSON file if one is named. Raises OSError for the text."""
    text = Path(flags.text).read_text(encoding="utf-8")
    rows = [measure(text, count, flags.repeats) for count in flags.messages]
    numbers = f"--messages {' '.join(map(str, flags.messages))} --repeats {flags.repeats}"
    print(f"command: specahead bench turn --text {flags.text} {numbers}")
    names = [field.name for field in fields(TurnRow)]
    table = [[name.replace("_", " ") for name in names]]
    table += [[str(row.tokens), *(f"{getattr(row, name):.1f} ms" for name in names[1:])] for row in rows]
    print(align(table, left=0))
    if flags.json:
        Path(flags.json).write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def measure(text: str, count: int, repeats: int) -> TurnRow:
    """Return the row of a chat's turn of so many messages, by the bundled tokenizer. Each repeat is another turn."""
    tokenizer = load_tokenizer_with(TEMPLATE)
    encoder, times = TextEncoder(tokenizer), dict[str, list[float]]()

    def timed(name: str, do: Callable[[], Given]) -> Given:
        began = time.perf_counter()
        given = do()
        times.setdefault(name, []).append(1000 * (time.perf_counter() - began))
        return given

    def rendered(messages: list[dict[str, str]]) -> str:
        marked = encoder.mark(messages)
        made: str = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
        return made

    chat = [message_of(text, number) for number in range(count - 1)]
    encoder.encode_rendered(rendered(chat))
    for repeat in range(repeats):
        messages = [*chat, message_of(text, count + repeat)]
        prompt = timed("template", lambda messages=messages: rendered(messages))  # type: ignore[misc]
        whole = timed("encoded_whole", lambda prompt=prompt: tokenizer.encode(prompt, add_special_tokens=False))  # type: ignore[misc]
        ids = timed("encoded_by_pieces", lambda prompt=prompt: encoder.encode_rendered(prompt))  # type: ignore[misc]
        if ids != whole:
            raise ValueError("a chat's pieces give other token ids than the chat")
        timed("hashes", lambda ids=ids: list(prefix_hashes(ids)))  # type: ignore[misc]
        timed("to_target", lambda ids=ids: to_target_and_back(ids))  # type: ignore[misc]
        kv = kv_of(ids)
        timed("found", lambda kv=kv, ids=ids: kv.reuse_prefix(SequenceKV(), ids))  # type: ignore[misc]
    return TurnRow(len(ids), **{name: median(each) for name, each in times.items()})


def load_tokenizer_with(template: str) -> Any:
    """Return the bundled tokenizer with another template, and without a longest text."""
    tokenizer: Any = load_tokenizer(str(models.TARGET))
    tokenizer.chat_template, tokenizer.model_max_length = template, 1 << 30
    return tokenizer


def message_of(text: str, number: int) -> dict[str, str]:
    """Return a chat's message of that number, unlike all others."""
    start = number * MESSAGE // 3 % max(1, len(text) - MESSAGE)
    role = "assistant" if number % 2 else "user"
    return {"role": role, "content": f"{number}. " + (text[start:] + text)[:MESSAGE]}


def to_target_and_back(ids: list[int]) -> Any:
    """Have a session's opening written as bytes, and read as the target reads it."""
    opened = Open("turn", ids, len(ids), 100, [], Sampling(0.0), Exactness.EXACT)
    frame = convert.serve_request_to_pb(opened)
    return convert.serve_request_from_pb(type(frame).FromString(frame.SerializeToString()))


def kv_of(ids: list[int]) -> KVCache:
    """Return KV in which a text is indexed, and nobody holds it."""
    kv, sequence = KVCache(1, 1, 1, pages_for(len(ids)) + 1), SequenceKV()
    kv.grow(sequence, len(ids))
    sequence.length = len(ids) // PAGE_SIZE * PAGE_SIZE
    kv.index_prefix(sequence, ids)
    kv.release(sequence)
    return kv
