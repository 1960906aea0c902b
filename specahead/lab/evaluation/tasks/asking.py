"""Asking a server for samples, several at a time, so that a run which was ended can go on."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specahead.lab.endpoint import Answer, Endpoint
from specahead.lab.evaluation.tasks.samples import Sample, Task, fit
from specahead.lab.results import write_json

_SAVED_EVERY = 5.0  # seconds


@dataclass(frozen=True)
class Question:
    """One sample of a task."""

    task: str
    made_by: Task
    context: int
    """Tokens of prompt and answer together."""
    index: int


@dataclass(frozen=True)
class Way:
    """How a question is asked."""

    exactness: str
    """Empty: the request does not say, and any server understands it."""
    temperature: float = 0.0


@dataclass(frozen=True)
class Record:
    """An answer and its score. `request` is the hash of the request: what is asked again is known by it."""

    task: str
    context: int
    index: int
    exactness: str
    temperature: float
    request: str
    prompt_tokens: int
    depths: tuple[float, ...]
    score: float | None
    """None: nothing judges the answer."""
    generated: int
    """Tokens of the answer."""
    answer: str
    speculation: dict[str, Any] | None


class Answers:
    """The answers of a run, kept in a JSON file; the file may be that of an earlier run."""

    def __init__(self, path: Path | None, resume: bool) -> None:
        """path: None: none are kept. resume: whether answers in the file are used again. Raises ValueError for a file
        of something else."""
        self._path, self._lock, self._saved = path, threading.Lock(), time.monotonic()
        self.by_request: dict[str, Record] = {}
        if path is not None and resume and path.exists():
            try:
                kept = [Record(**record) for record in json.loads(path.read_text(encoding="utf-8"))["answers"]]
            except (ValueError, TypeError, LookupError) as error:
                raise ValueError(f"{path}: not the file of an earlier run ({error!r}); name another --json") from None
            self.by_request = {record.request: record for record in kept}

    def add(self, record: Record) -> None:
        """Keep an answer; the file follows within seconds."""
        with self._lock:
            self.by_request[record.request] = record
            if time.monotonic() - self._saved > _SAVED_EVERY:
                self.save({})

    def save(self, head: dict[str, Any]) -> None:
        """Write the file, in which `head` comes before the answers."""
        if self._path is not None:
            write_json(self._path, head | {"answers": list(self.by_request.values())})
        self._saved = time.monotonic()


def prompt_ids(tokenizer: Any, task: Task, prompt: str, chat: bool) -> list[int]:
    """Return a prompt of a task in token ids. chat: whether the tokenizer's template makes a chat of it, unless the
    task's answer goes on with the prompt."""
    is_chat, text = chat and not task.completes, prompt
    if is_chat:
        said = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(said, tools=task.tools or None, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=not is_chat, verbose=False))


def make_sample(tokenizer: Any, question: Question, room: int, chat: bool, seed: int) -> tuple[Sample, int]:
    """Return the sample of a question, and the tokens of its prompt, which leaves `room` tokens of the context.

    Raises ValueError where the shortest prompt leaves less.
    """
    name = f"{seed}/{question.task}/{question.context}/{question.index}"

    def count(prompt: str) -> int:
        return len(prompt_ids(tokenizer, question.made_by, prompt, chat))

    return fit(question.made_by, name, question.context - room, count)


class Asker:
    """Asks one server for all questions in all ways."""

    def __init__(self, endpoint: Endpoint, tokenizer: Any, chat: bool, seed: int, answers: Answers) -> None:
        """tokenizer: the model's, by which lengths are measured. chat: whether the server adds a chat template."""
        self._endpoint, self._tokenizer, self._chat = endpoint, tokenizer, chat
        self._seed, self._answers = seed, answers
        self._making = threading.Lock()  # one long prompt is made at a time

    def ask_all(
        self, questions: Sequence[Question], ways: Sequence[Way], concurrency: int, fields: dict[str, Any]
    ) -> list[Record]:
        """Return the answers in the order of the questions, then of the ways. fields: of all requests.

        Raises as Endpoint; answers that came by then are kept.
        """
        with (
            tqdm(total=len(questions) * len(ways), desc="asking", unit="answer") as progress,
            ThreadPoolExecutor(concurrency) as pool,
        ):
            pending = [pool.submit(self._ask, question, ways, fields, progress.update) for question in questions]
            try:
                for done in as_completed(pending):
                    done.result()
            finally:
                pool.shutdown(cancel_futures=True)
                self._answers.save({})
        return [record for each in pending for record in each.result()]

    def _ask(
        self, question: Question, ways: Sequence[Way], fields: dict[str, Any], note: Callable[[], object]
    ) -> list[Record]:
        task = question.made_by
        room = int(fields.get("max_tokens", task.answer_tokens))
        with self._making:
            sample, tokens = make_sample(self._tokenizer, question, room, self._chat, self._seed)
        chat = self._chat and not task.completes
        called = {"tools": list(task.tools)} if chat and task.tools else {}
        records = []
        for way in ways:
            more: dict[str, Any] = {"max_tokens": room, "temperature": way.temperature, "seed": question.index}
            more |= fields | called
            more |= {"exactness": way.exactness} if way.exactness else {}
            request = self._endpoint.request(sample.prompt, chat, **more)
            name = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
            known = self._answers.by_request.get(name)
            if known is None:
                answer: Answer = self._endpoint.ask(request)
                known = Record(
                    task=question.task,
                    context=question.context,
                    index=question.index,
                    exactness=way.exactness,
                    temperature=way.temperature,
                    request=name,
                    prompt_tokens=tokens,
                    depths=sample.depths,
                    score=task.score(answer.text, sample) if sample.references else None,
                    generated=answer.generated,
                    answer=answer.text,
                    speculation=answer.speculation,
                )
                self._answers.add(known)
            # The same request may belong to several contexts, where a text is shorter than these.
            records.append(replace(known, task=question.task, context=question.context, index=question.index))
            note()
        return records
