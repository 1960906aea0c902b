"""Tasks beside RULER's: key-value retrieval, copying and editing of code, and questions from LongBench's files."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import specahead
from specahead import models
from specahead.lab.evaluation.tasks.ruler import uuids, words
from specahead.lab.evaluation.tasks.samples import Haystack, Sample, Task, hide

CODE_LINES = 16  # assignments of a generated function


def _key_value(rng: random.Random, size: int) -> Sample:
    """Key-value retrieval of Liu et al., Lost in the Middle (arXiv 2307.03172, section 3.1)."""
    drawn = uuids(rng, 2 * size + 2)
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    rows = [f' "{key}": "{value}",\n' for key, value in pairs]
    text, depths = hide(rows[1:], rows[:1], rng)
    prompt = (
        "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
        f'{{{text.strip().rstrip(",")}}}\n\nKey: "{pairs[0][0]}"\nCorresponding value:'
    )
    return Sample(prompt, (pairs[0][1],), depths)


def _function(rng: random.Random, name: str, variable: str, length: int = CODE_LINES) -> str:
    """Return a Python function of `length` assignments, each of which names the variable, as does its last line."""
    lines = [f"def {name}(first, second):", f"    {variable} = first"]
    for _ in range(length):
        sign, argument = rng.choice("+-^|"), rng.choice(("first", "second"))
        numbers = rng.randrange(10, 100), rng.randrange(1000, 10_000)
        lines.append(f"    {variable} = ({variable} * {numbers[0]} {sign} {argument}) % {numbers[1]}")
    return "\n".join([*lines, f"    return {variable} - {rng.randrange(1000, 10_000)}"]) + "\n\n\n"


def _code(edited: bool, rng: random.Random, size: int) -> Sample:
    """Write one function of a long file out again, with a variable renamed if edited; references are its lines.

    size: assignments of the other functions.
    """
    names = words(rng, 4 + size // CODE_LINES, joint="_")
    variable, renamed, name = names[:3]
    asked = _function(rng, name, variable)
    lengths = [CODE_LINES] * (size // CODE_LINES) + [size % CODE_LINES]
    others = [_function(rng, other, variable, length) for other, length in zip(names[3:], lengths, strict=True)]
    text, depths = hide(others, [asked], rng)
    change = f"with its variable `{variable}` renamed to `{renamed}`" if edited else "exactly as it stands there"
    prompt = (
        f"A file of Python:\n\n```python\n{text.strip()}\n```\n\nThe function `{name}` again, {change}:\n\n```python\n"
    )
    answer = asked.replace(variable, renamed) if edited else asked
    lines = [line.strip() for line in answer.splitlines() if line.strip() and (renamed in line or not edited)]
    return Sample(prompt, tuple(lines), depths)


def _question(row: dict[str, Any], rng: random.Random, size: int) -> Sample:
    """A question about a text, of which the first and last `size` characters are kept, as LongBench cuts."""
    text = str(row["context"])
    if 2 * size < len(text):
        text = text[:size] + text[-size:]
    prompt = (
        f"Answer the question based on the given text. Only give me the answer and do not output any other words.\n\n"
        f"The text:\n{text}\n\nQuestion: {row['input']}\nAnswer:"
    )
    return Sample(prompt, tuple(map(str, row["answers"])))


def longbench_tasks(path: Path) -> list[Task]:
    """Return a task for each line of a file in LongBench's form (arXiv 2308.14508): `context`, `input`, `answers`.

    Raises ValueError for a line that is not of this form.
    """
    tasks = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        if not (row.get("context") and "input" in row and row.get("answers") and all(row["answers"])):
            raise ValueError(f"{path}, line {number}: expected an object with `context`, `input` and `answers`")
        tasks.append(Task(partial(_question, row), 64, any_reference=True, most=-(-len(str(row["context"])) // 2)))
    return tasks


def other_tasks() -> dict[str, Task]:
    """Return the generated tasks by name."""
    return {
        "key_value": Task(_key_value, 64),
        "copy_code": Task(partial(_code, False), 640),
        "edit_code": Task(partial(_code, True), 640),
    }


def _tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    """Return a function that a model may call, whose arguments are strings, in the form of OpenAI's protocol."""
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_TOOLS = (
    _tool("search_files", "Search files for a pattern", "pattern", "folder"),
    _tool("read_file", "Read a file", "path"),
    _tool("run_tests", "Run tests", "target"),
    _tool("send_mail", "Send a mail", "to", "subject", "body"),
)
_TOPICS = (
    *("garbage collection", "a B-tree", "TCP congestion control", "public-key cryptography", "a hash table"),
    *("register allocation in a compiler", "a page cache", "gradient descent", "the Raft protocol", "a bloom filter"),
)


def _log(rng: random.Random, size: int) -> Sample:
    """Call tools about the functions that a log of `size` lines names."""
    names, lines = words(rng, 12, joint="_"), list[str]()
    for i in range(size):
        found, expected = rng.randrange(1000), rng.randrange(1000)
        lines.append(f"{i // 3600:02}:{i // 60 % 60:02}:{i % 60:02} {rng.choice(names)}: {found} is not {expected}")
    prompt = (
        "Here is a log:\n" + "\n".join(lines) + "\n\nSearch the folder src for the three functions that it names most "
        "often, then read each file that you find, run its tests, and mail the results to ann@example.org. Call the "
        "tools one after another, each call with all its arguments."
    )
    return Sample(prompt, ())


def _explain(rng: random.Random, size: int) -> Sample:
    return Sample(f"Explain to a student, in detail and with examples, how {rng.choice(_TOPICS)} works.", ())


def unjudged_tasks() -> dict[str, Task]:
    """Return the generated tasks by name whose answers have no score: they only show how fast answers come."""
    return {"tool_calls": Task(_log, 0, tools=_TOOLS), "chat": Task(_explain, 0, most=1)}


def _continue(haystack: Haystack, rng: random.Random, size: int) -> Sample:
    return Sample("".join(haystack.cut(rng, size)).rstrip(), ())


def continuation(text: str) -> Task:
    """Return the task to go on with passages of a text, at most all of it, whose answers have no score."""
    haystack = Haystack.of_text(text)
    return Task(partial(_continue, haystack), 0, most=len(haystack), completes=True)


def bundled_texts() -> dict[str, str]:
    """Return texts that need no files of the user, by name: the demo's prose, and the code of this package."""
    sources = sorted(Path(specahead.__file__).parent.rglob("*.py"))
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    return {"prose": models.DEMO_TEXT.read_text(encoding="utf-8"), "code": code}
