"""Tasks asked of a server: their samples, their scores, and both commands against a server of this process."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from specahead.lab.evaluation.tasks.intervals import bootstrap_ratio, wilson
from specahead.lab.evaluation.tasks.others import longbench_tasks, other_tasks
from specahead.lab.evaluation.tasks.ruler import ruler_tasks
from specahead.lab.evaluation.tasks.samples import Haystack, fit, hide
from tests.books import read_books

CONTEXT = 4096
ESSAY = Haystack.of_text(read_books()[0])
TASKS = ruler_tasks(ESSAY, CONTEXT) | other_tasks()


def words_in(text: str) -> int:
    """Count pieces of about a token, without a tokenizer's time."""
    return len(re.findall(r"[A-Za-z]{1,6}|\d{1,3}|[^\w\s]", text))


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_fills_its_context_and_holds_its_references(name: str) -> None:
    task = TASKS[name]
    sample, tokens = fit(task, f"0/{name}/0", CONTEXT - task.answer_tokens, words_in)
    assert tokens == words_in(sample.prompt)
    assert 0.9 * CONTEXT <= tokens + task.answer_tokens <= CONTEXT
    again, _ = fit(task, f"0/{name}/0", CONTEXT - task.answer_tokens, words_in)
    other, _ = fit(task, f"1/{name}/0", CONTEXT - task.answer_tokens, words_in)
    assert again == sample and other.references != sample.references
    if name != "edit_code":
        assert all(reference in sample.prompt for reference in sample.references)
    assert task.score(" ".join(sample.references).upper(), sample) == 1
    assert task.score("I do not know.", sample) == 0
    half = sample.references[: len(sample.references) // 2]
    assert task.score("\n".join(half), sample) == pytest.approx(len(half) / len(sample.references), abs=0.05)


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith(("niah", "key_value"))])
def test_needles_lie_at_their_depths(name: str) -> None:
    depths = []
    for seed in range(8):
        sample, _ = fit(TASKS[name], str(seed), CONTEXT - 128, words_in)
        for reference, depth in zip(sample.references, sample.depths, strict=True):
            assert sample.prompt.count(reference) == 1
            assert sample.prompt.index(reference) / len(sample.prompt) == pytest.approx(depth, abs=0.06)
        depths += sample.depths
    assert min(depths) < 0.4 and max(depths) > 0.55


def test_needles_lie_between_pieces_in_their_order() -> None:
    pieces = [f"{i}. " for i in range(10, 60)]
    text, depths = hide(pieces, ["A ", "B "], random.Random(3))
    assert text.replace("A ", "").replace("B ", "") == "".join(pieces)
    assert re.search(r"(^|\. )A (\d|B)", text) and text.index("A ") < text.index("B ")
    assert depths[0] == text.index("A ") / (len(text) - 4) and depths[1] == (text.index("B ") - 2) / (len(text) - 4)


def test_what_is_frequent_is_what_is_asked_for() -> None:
    common, _ = fit(TASKS["cwe"], "0", CONTEXT - 120, words_in)
    listed = common.prompt[common.prompt.rindex("Memorize") : common.prompt.rindex("Question")]
    counts = Counter(re.findall(r"\d+\. (\w+)", listed)).most_common()
    assert {word for word, count in counts[:10]} == set(common.references)
    assert {count for _, count in counts[:10]} == {30} and {count for _, count in counts[10:]} == {3}
    frequent, _ = fit(TASKS["fwe"], "0", CONTEXT - 50, words_in)
    counts = Counter(
        re.findall(r"\b[a-z]{6}\b", frequent.prompt[150 : frequent.prompt.index("Question")])
    ).most_common()
    assert tuple(word for word, _ in counts[:3]) == frequent.references
    assert counts[0][1] == pytest.approx(counts[1][1] * 9 / 4, rel=0.05)


def test_a_chain_of_variables_leads_back_to_its_value() -> None:
    sample, _ = fit(TASKS["vt"], "0", CONTEXT - 30, words_in)
    own = sample.prompt[sample.prompt.rindex("Memorize") :]
    assigned = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", own))
    value = assigned[sample.references[0]]
    assert value.isdigit() and own.count(value) == 3
    assert [assigned[name] for name in sample.references[1:]] == list(sample.references[:-1])


def test_an_edited_function_differs_in_every_line_that_counts() -> None:
    sample, _ = fit(TASKS["edit_code"], "0", CONTEXT - 640, words_in)
    assert len(sample.references) == 18
    assert not any(reference in sample.prompt for reference in sample.references)


def test_too_short_a_context_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the shortest prompt has .* tokens, but the context leaves 100"):
        fit(TASKS["copy_code"], "0", 100, words_in)


def test_questions_of_longbench_are_cut_in_the_middle(tmp_path: Path) -> None:
    file = tmp_path / "qa.jsonl"
    text = " ".join(map(str, range(1000, 4000)))
    rows = [
        {"context": text, "input": "Which?", "answers": ["1000", "other"]},
        {"context": "a b", "input": "", "answers": ["a"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    long, short = longbench_tasks(file)
    sample, tokens = fit(long, "0", 1000, words_in)
    assert 950 < tokens <= 1000 and "1000 1001" in sample.prompt and "3998 3999" in sample.prompt
    assert "2500" not in sample.prompt
    assert (long.score("It is 1000", sample), long.score("2000", sample)) == (1, 0)
    assert "\na b\n" in fit(short, "0", 1000, words_in)[0].prompt
    file.write_text('{"context": "a", "input": "b", "answers": [""]}\n')
    with pytest.raises(ValueError, match="line 1: expected an object with `context`, `input` and `answers`"):
        longbench_tasks(file)


def test_intervals() -> None:
    """Wilson's against values in the literature; a ratio of equal pairs is certain."""
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)
    assert wilson(1.0, 20) == pytest.approx((0.8389, 1.0), abs=1e-3)
    assert bootstrap_ratio([1, 0, 1], [1, 0, 1]) == (1, 1, 1)
    assert bootstrap_ratio([1, 2], [0, 0]) is None
    ratio = bootstrap_ratio([2, 4] * 50, [1, 1] * 50)
    assert ratio is not None and ratio[0] == 3 and 2.7 < ratio[1] < 3 < ratio[2] < 3.3


@pytest.mark.parametrize("size", [1, 2, 17, 400])
def test_a_text_is_cut_and_begins_again(size: int) -> None:
    haystack = Haystack.of_text('One. "Two." Three\nfour ' + "word " * 60)
    pieces = haystack.cut(random.Random(0), size)
    assert len(pieces) == size and len(set(pieces)) == min(size, 5)
