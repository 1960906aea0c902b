"""Evaluation: its cases, its counting, its tables, and the rounds against plain passes of the model."""

import argparse
import math
import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specahead import models
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.lab.evaluation import cases, command, drafts, quality, report, run, workers
from specahead.lab.evaluation.continuations import Continuation
from specahead.lab.evaluation.flags import add_evaluate_flags
from specahead.lab.evaluation.methods import RIVALS
from specahead.lab.evaluation.models import load_runner
from specahead.lab.evaluation.readers import BlocksRead
from specahead.lab.evaluation.rounds import Variant, VariantSums, count_blocks, evaluate_case, prefill
from specahead.lab.evaluation.run import Pair, variants_of
from specahead.lab.results import markdown_table
from specahead.models import DEMO_TEXT
from specahead.sparsity.rounds import round_settings
from tests.plans import bundled_plan
from tests.stack import ROOT

PLAN = bundled_plan()


@pytest.fixture(scope="module")
def pair() -> tuple[ModelRunner, ModelRunner]:
    """draft, target"""
    return (
        load_runner(str(models.DRAFT), torch.float32, "cpu", 700),
        load_runner(str(models.TARGET), torch.float32, "cpu", 4000),
    )


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return cases.read_texts([str(DEMO_TEXT)])


def test_dense_rounds_are_a_plain_pass(
    pair: tuple[ModelRunner, ModelRunner], tokenizer: Any, texts: dict[str, str]
) -> None:
    draft, target = pair
    (case,) = cases.perplexity_cases(texts, tokenizer, 330, 297)
    (sums,) = evaluate_case(draft, target, case, [Variant("dense", "", PLAN)])
    log_probs = []
    for runner in (target, draft):
        sequence = SequenceKV()
        (output,) = runner.forward([SequenceInput(sequence, case.tokens, "all")])
        runner.kv.release(sequence)
        log_probs.append(output.logits[297:-1].log_softmax(-1))
    wanted = torch.tensor(case.tokens[298:])
    assert sums.scored == sums.judged == 32
    assert sums.nll == pytest.approx(-float(log_probs[0].gather(1, wanted[:, None]).sum()), rel=1e-4)
    assert sums.accepted == pytest.approx(float(torch.minimum(*log_probs).exp().sum()), rel=1e-4)
    assert sums.read == sums.present
    assert target.kv.pool.held == draft.kv.pool.held == 0


def test_the_target_is_evaluated_in_the_bits_that_are_asked_for() -> None:
    """Measured on a CPU: 6.7 % of the norm of the logits by weights in 8 bits, 3.5 % by KV in 8 bits."""
    tokens = list(range(1, 130))

    def logits(pair: Pair) -> torch.Tensor:
        _, target = run._load(pair, 150, 320)
        (output,) = target.forward([SequenceInput(SequenceKV(), tokens, "all")])
        return output.logits.float()

    full = Pair(str(models.TARGET), str(models.DRAFT))
    exact = logits(full)
    for held in (replace(full, quantization="fp8"), replace(full, kv_cache_dtype="fp8")):
        assert 1e-3 < (logits(held) - exact).norm() / exact.norm() < 0.1, held


def test_every_method_runs_and_reads_what_it_says(
    pair: tuple[ModelRunner, ModelRunner], tokenizer: Any, texts: dict[str, str]
) -> None:
    (case,) = cases.perplexity_cases(texts, tokenizer, 620, 604)
    plan = replace(PLAN, group_size=64)
    variants = variants_of([*RIVALS, "ahead"], ["0.25"], plan, 3)
    order = list[int]()
    sums = evaluate_case(*pair, case, variants, lambda index, _: order.append(index))
    rows = report.to_rows("test", variants, sums)
    assert sorted(order) == list(range(len(variants)))
    assert order[:2] == [0, len(variants) - 1], "rivals come after dense and ahead"
    some = [0, *(i for i, variant in enumerate(variants) if variant.method in ("quest", "tidal"))]
    at_once = evaluate_case(*pair, case, [variants[i] for i in some], at_once=3)  # passes of 3 rounds and of 1
    for one, many in zip([sums[i] for i in some], at_once, strict=True):
        assert (one.scored, one.rounds, one.present) == (many.scored, many.rounds, many.present)
        assert many.nll == pytest.approx(one.nll, rel=2e-3), "near-ties may choose other blocks"
        assert many.read == pytest.approx(one.read, rel=1e-3)
        assert many.squares == pytest.approx(one.squares, rel=0.05)
    dense = rows[0]
    assert (dense.method, dense.increase, dense.kv_read) == ("dense", 0.0, 1.0)
    for row in rows[1:]:
        assert 0 < row.kv_read < 1
        assert math.isfinite(row.perplexity)
        assert 0 <= row.churn4 <= row.churn <= 1
        if row.method in ("streaming", "oracle", "sts"):
            assert row.kv_read == pytest.approx(0.25, abs=0.02)
        if row.method == "tidal":  # four of ten layers are dense
            assert row.kv_read == pytest.approx(0.4 + 0.6 * 0.25, abs=0.02)
        if row.method in ("ahead", "specattn"):
            assert row.kv_read <= 0.25 + 0.01
    assert pair[1].kv.pool.held == 0


def test_blocks_are_counted_as_round_after_round_reads_them() -> None:
    """Two rounds in a first pass of 4 blocks, one in a second of 5; rows are one layer and two heads."""
    rounds = [["1100", "1000"], ["0110", "1000"], ["11001", "10000"]]
    first, second, third = (torch.tensor([[[bit == "1" for bit in row] for row in each]]) for each in rounds)
    reads = [BlocksRead(torch.stack((first, second)), [4, 4], [0.5, 0.0]), BlocksRead(third[None], [5], [0.0])]
    sums = VariantSums()
    count_blocks(sums, reads, 16)
    assert (sums.read, sums.present) == (16 * 10 + 0.5, 16 * (8 + 8 + 10))
    assert (sums.blocks, sums.rounds, sums.compared) == (10, 3, 7)
    assert sums.fresh == [1 + 2, 1 + 1, 2, 2, 2, 2], "the third round reads a block of the first again, and a new one"
    assert sums.hot[:2] == pytest.approx([3 / 8 + 3 / 10, 3 / 8 + 4 / 10])


@pytest.mark.parametrize("kind", sorted(cases.RECALL))
def test_what_is_asked_for_was_said(kind: str, tokenizer: Any, texts: dict[str, str]) -> None:
    for case in cases.recall_cases([kind], texts, tokenizer, 600, 3):
        assert len(case.tokens) == case.asked[1] == 600
        answer = tokenizer.decode(case.tokens[case.asked[0] :]).strip(" .")
        before = tokenizer.decode(case.tokens[: case.start])
        assert answer in before
        assert case.start < case.asked[0]
        assert answer not in tokenizer.decode(case.tokens[case.start : case.asked[0]])


def some_rows() -> list[report.QualityRow]:
    plain = VariantSums(nll=math.log(20) * 10, scored=10, judged=10, accepted=6.5, read=100, present=100)
    plain.rounds, plain.blocks = 2, 8
    changes: dict[str, Any] = {"nll": math.log(22) * 10, "read": 6, "compared": 4, "fresh": [3, 2, 1, 1, 0, 0]}
    sparse = VariantSums(**(vars(plain) | changes | {"recalled": 2, "asked": 3}))
    return report.to_rows("t", [Variant("dense", "", PLAN), Variant("ahead", "0.06", PLAN)], [plain, sparse])


def test_rows_say_what_the_sums_say() -> None:
    dense, sparse = some_rows()
    assert dense.perplexity == pytest.approx(20)
    assert (sparse.increase, sparse.kv_read) == (pytest.approx(0.1), 0.06)
    assert (sparse.recalled, sparse.asked, dense.asked) == (2, 3, None)
    assert (sparse.acceptance, sparse.blocks, sparse.churn, sparse.churn4) == (0.65, 4, 0.75, 0.25)


def test_variants_are_printed_and_kept_as_they_come(
    pair: tuple[ModelRunner, ModelRunner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By models that this process holds. A run that is cut off goes on: dense runs again, others that are kept do not.
    The queue of parts is a list here."""
    ran, failing = list[str](), True

    def run_here(work: Any, given: list[Any], *others: Any) -> Iterator[Any]:
        *_, on_part = others
        parts, found = list[tuple[Any, ...]](), list[dict[int, VariantSums]]()
        future: Future[Any] = Future()
        for number, case, variants in given[:1] if failing else given:
            ran.extend(f"{case.name} {variant.name}" for variant in variants.values())
            sums = evaluate_case(*pair, case, list(variants.values()))
            parts.extend((number, *part) for part in zip(variants, sums, strict=True))
            found.append(dict(zip(variants, sums, strict=True)))
        future.set_exception(KeyboardInterrupt()) if failing else future.set_result(None)
        queue = SimpleNamespace(empty=lambda: not parts, get=lambda: parts.pop(0))
        workers._follow([future], SimpleNamespace(value=3), queue, "perplexity", on_part)
        future.result()
        yield from found

    monkeypatch.setattr(run, "run_in_workers", run_here)
    parser = argparse.ArgumentParser()
    add_evaluate_flags("perplexity", parser)
    short = ["--context", "340", "--prefilled", "323", "--passages", "2", "--budgets", "0.5"]
    kept = ["--text", str(DEMO_TEXT), *short, "--json", str(tmp_path / "sums.json"), "--resume", "--methods"]
    with pytest.raises(KeyboardInterrupt):
        command.run(parser.parse_args([*kept, "ahead"]))
    printed = capsys.readouterr()
    assert not printed.out
    assert re.search(r"demo_text@0, 340 tokens: dense .* \+0\.00% ± 0\.00%; KV read 100\.00%; 16 tokens", printed.err)
    assert re.search(r"demo_text@0, 340 tokens: ahead +0\.5 .* ± [\d.]+%; KV read [45]\d\.\d\d%; 16 ", printed.err)
    assert "demo_text@1" not in printed.err
    ran.clear()
    failing = False
    command.run(parser.parse_args([*kept, "ahead,quest"]))
    of_first, of_second = ["dense", "quest"], ["dense", "ahead", "quest"]
    assert ran == [f"demo_text@{i} {name}" for i, names in enumerate((of_first, of_second)) for name in names]
    table = capsys.readouterr().out
    assert re.search(r"± increase\ndense .* 32 +0\.00%\nahead .* 32 +[\d.]+%\nquest ", table)
    ran.clear()
    command.run(parser.parse_args([*kept, "ahead,quest"]))
    assert (ran, capsys.readouterr().out) == ([], table)
    with pytest.raises(ValueError, match="not the file of such a run"):
        command.run(parser.parse_args([*kept, "ahead", "--gamma", "2"]))


def test_ways_of_drafting_lead_to_one_text(tokenizer: Any, texts: dict[str, str]) -> None:
    loaded = drafts.load_pair(Pair(str(models.TARGET), str(models.DRAFT)), 440)
    (case,) = cases.perplexity_cases(texts, tokenizer, 400, 400)
    shares = [1.0, 1 - 1e-9, 0.4, 0.2]
    ends = []
    prompts = [SequenceKV(), SequenceKV()]
    for runner, prompt in zip(loaded, prompts, strict=True):
        prefill(runner, prompt, case.tokens[:-1])
    sums = []
    for share in shares:
        loaded[0].prepare_rounds(round_settings(PLAN, 4, 1, share))
        run = Continuation(*loaded, PLAN, case, 4, share)
        sums.append(run.run(prompts[0], prompts[1], 12))
        ends.append(run.tokens[:412])
    for runner, prompt in zip(loaded, prompts, strict=True):
        runner.kv.release(prompt)
        assert runner.kv.pool.held == 0
    assert all(tokens == ends[0] for tokens in ends)
    dense, listed, *sparse = drafts.to_rows(shares, sums)
    assert (dense.accepted, dense.drafted, dense.kv_read) == (listed.accepted, listed.drafted, 1.0)
    assert dense.mass == pytest.approx(listed.mass, abs=0.01)
    assert 0 < dense.middle < dense.mass < 1
    assert dense.kv_read > sparse[0].kv_read > sparse[1].kv_read > 0.2


@pytest.mark.long
def test_the_draft_study_fills_the_page(tmp_path: Path, texts: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By models that this process holds: other tests start workers."""
    held = drafts.load_pair(Pair(str(models.TARGET), str(models.DRAFT)), 450)
    monkeypatch.setattr(drafts, "held_models", lambda: held)
    monkeypatch.setattr(drafts, "run_in_workers", lambda work, given, *_: [work(*each) for each in given])
    pair = Pair(str(models.TARGET), str(models.DRAFT))
    tables = drafts.run_study(pair, PLAN, texts, context=400, passages=1, generated=6, recalled=1)
    assert {name: len(rows) for name, rows in tables.items()} == {drafts.TEXT: 3, drafts.ANSWERS: 3}
    page = tmp_path / "tables.md"
    page.write_text((ROOT / "docs" / quality.PAGE).read_text(encoding="utf-8"))
    quality.write_drafts(tables, page, "the command", 60.0)
    filled = page.read_text(encoding="utf-8")
    assert "Made by `the command`" in filled
    for rows in tables.values():
        assert markdown_table(drafts.COLUMNS, rows, left=0) in filled


def test_books_that_the_plan_was_calibrated_on_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not calibrated on"):
        cases.held_out_files(str(tmp_path), PLAN)
    for name in (PLAN.provenance["files"][0], "b.txt", "a.txt", "notes.md"):
        (tmp_path / name).write_text("text")
    assert cases.held_out_files(str(tmp_path), PLAN) == [str(tmp_path / name) for name in ("a.txt", "b.txt")]
