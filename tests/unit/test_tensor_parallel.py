"""Tensor parallelism: the parts of a model that ranks hold, and the passes that they run together."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor

from specahead import models
from specahead.config import TargetSettings
from specahead.engine.kv.pages import SequenceKV
from specahead.engine.kv.tiered import TieredKV
from specahead.engine.loading.checkpoint import Checkpoint, find_files
from specahead.engine.loading.config import load_config
from specahead.engine.loading.fused import experts_apart, read_decoder
from specahead.engine.loading.model import load_model
from specahead.engine.loading.opening import OpenedModel, open_model
from specahead.engine.loading.own_part import OwnPart
from specahead.engine.model.decoder import Decoder
from specahead.engine.model.families import weight_shapes
from specahead.engine.parallel import ranks as parallel_ranks
from specahead.engine.parallel.commands import decode, encode
from specahead.engine.parallel.processes import RankProcesses, device_of, serve_store
from specahead.engine.parallel.ranks import Ranks, join, leave
from specahead.engine.parallel.small_sums import SmallSums, meet_in_memory
from specahead.engine.sampling.distributions import Sampling
from specahead.engine.sampling.judging import Drafted
from specahead.engine.steps.inputs import SequenceInput
from specahead.engine.steps.model_runner import ModelRunner
from specahead.engine.steps.shapes import Choosers, JudgeShape, PassShape, ReadShape
from specahead.kernels.mixture import ExpertWeight
from specahead.lab.benchmarks.rank_sums import captured
from specahead.sparsity.reader import Reader
from specahead.sparsity.selection import BlockSelection
from target_service.self_drafting import SelfDrafting
from tests.books import random_tokens as tokens
from tests.plans import bundled_plan
from tests.settings import target_settings
from tests.unit.quantized_forms import BLOCKS, by_block, from_parts
from tests.unit.steps import read_prompt
from tests.unit.test_minicpm import CONFIG, save

SIZES: dict[str, Any] = {
    **{"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256},
    **{"attention_bias": True, "pad_token_id": 0},
}
MIXTURE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config, model = FAMILIES[request.param]
    made = model(config(**SIZES))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, 0, 0.1)
    made.save_pretrained(tmp_path)
    return tmp_path


def part_of(folder: Path, ranks: Ranks, **how: Any) -> Decoder:
    return load_model(str(folder), torch.float32, "cpu", ranks=ranks, **how).decoder


@pytest.mark.parametrize("count", [2, 4])
def test_parts_put_together_are_the_model(folder: Path, count: int) -> None:
    """By heads: rows of queries, keys, values, gates and ups; columns of what reads them; one bias of these counts."""
    of_all = read_decoder(load_config(str(folder)), Checkpoint(find_files(str(folder)), "cpu"), torch.float32, "cpu")
    parts = [part_of(folder, Ranks(rank, count)) for rank in range(count)]
    for index, layer in enumerate(of_all.layers):
        own = [part.layers[index] for part in parts]
        for name, dim, sizes in (
            ("qkv", 0, (8 * 16, 4 * 16, 4 * 16)),
            ("gate_up", 0, (96, 96)),
            ("out", 1, (8 * 16,)),
            ("down", 1, (96,)),
        ):
            assert torch.equal(
                from_parts([getattr(each, name).values for each in own], sizes, dim), getattr(layer, name).values
            )
        if layer.out.bias is not None:
            assert torch.equal(sum(each.out.bias for each in own), layer.out.bias)
        if layer.qkv.bias is not None:
            split = [each.qkv.bias.split([size // count for size in (128, 64, 64)]) for each in own]
            assert torch.equal(torch.cat([each[0] for each in split]), layer.qkv.bias[:128])
    assert all(torch.equal(part.embedding, of_all.embedding) for part in parts)
    assert {(part.heads, part.kv_heads) for part in parts} == {(8 // count, 4 // count)}


def test_only_the_own_part_is_read(folder: Path) -> None:
    config = load_config(str(folder))
    part = OwnPart(Checkpoint(find_files(str(folder)), "cpu"), config, Ranks(1, 4))
    read = sum(part[name].numel() for name in part)
    total = sum(torch.Size(shape).numel() for shape in weight_shapes(config).values())
    unsplit = 2 * 100 * 64
    assert read - unsplit < 0.3 * (total - unsplit)


def test_parts_that_are_rounded_to_eight_bits(tmp_path: Path) -> None:
    """Columns get scales of their own on each rank. test_quantized_checkpoints has checkpoints in 8 bits."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES | {"attention_bias": False})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    of_all = load_model(str(tmp_path), torch.float32, "cpu", quantization="fp8").decoder
    parts = [part_of(tmp_path, Ranks(rank, 2), quantization="fp8") for rank in (0, 1)]
    for index, layer in enumerate(of_all.layers):
        for name, dim, sizes, near in (("gate_up", 0, (96, 96), 0.0), ("down", 1, (96,), 0.07)):
            together = from_parts([getattr(each.layers[index], name).values.in_order() for each in parts], sizes, dim)
            torch.testing.assert_close(together, getattr(layer, name).values.in_order(), rtol=near, atol=near / 50)


@pytest.mark.parametrize("form", ["16 bits", "fp8 blocks"])
def test_every_expert_is_split(tmp_path: Path, form: str) -> None:
    """By columns, as an MLP is, with the scales of their blocks; all ranks have the whole router."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "head_dim": 32}
    config = transformers.Qwen3MoeConfig(**SIZES | MIXTURE | sizes)
    model = transformers.Qwen3MoeForCausalLM(config)
    tensors: dict[str, Tensor] = {}
    for name, weight in experts_apart({name: each.data for name, each in model.named_parameters()}).items():
        written = by_block("weight_scale_inv")(weight)[0] if ".experts." in name and form != "16 bits" else {"": weight}
        tensors |= {name.replace("weight", kind or "weight"): each.clone() for kind, each in written.items()}
    if form != "16 bits":
        config.quantization_config = BLOCKS
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    of_all = load_model(str(tmp_path), torch.float32, "cpu").decoder
    parts = [part_of(tmp_path, Ranks(rank, 2)) for rank in (0, 1)]
    for index, layer in enumerate(of_all.layers):
        for name, dim, sizes in (("gate_up", 1, (256, 256)), ("down", 2, (256,))):
            whole, *halves = (
                numbers(getattr(decoder.layers[index].experts, name)).unflatten(0, (4, -1))
                for decoder in (of_all, *parts)
            )
            assert torch.equal(from_parts(halves, sizes, dim), whole)
        for part in parts:
            own = part.layers[index].experts
            assert torch.equal(own.router, layer.experts.router)


def numbers(weight: ExpertWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.in_order()


def test_models_that_cannot_be_split_are_refused(folder: Path) -> None:
    with pytest.raises(NotImplementedError, match="--tensor-parallel-size 8 is not built for 4 KV heads"):
        load_model(str(folder), torch.float32, "cpu", ranks=Ranks(0, 8))


def test_norms_over_all_heads_are_refused(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SIZES.items() if name not in ("head_dim", "attention_bias")}
    transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="norms over all heads together"):
        load_model(str(tmp_path), torch.float32, "cpu", ranks=Ranks(0, 2))


# Passes over two ranks, which are two processes.

GAMMA = 4
SAMPLED = Sampling(0.8, seed=3)
SETTINGS = target_settings(
    **{"model": str(models.TARGET), "gamma": GAMMA, "device": "cpu", "dtype": "float32", "threads": 1},
    **{"kv_tokens": 8192, "max_context": 1300, "tensor_parallel_size": 2},
)
PLAN = bundled_plan()


def opened(processes: RankProcesses, settings: TargetSettings) -> OpenedModel:
    """Open the part of rank 0."""
    return processes.open(lambda ranks, meet: open_model(settings, "none", ranks, meet))


TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs more than one GPU")


def test_a_mixture_of_experts_over_two_ranks(tmp_path: Path) -> None:
    """Its logits, of a prompt and of one token, with random weights in a shape of its own. It comes before `runners`: a
    process belongs to one group of ranks at a time.
    """
    model = tmp_path / "model"
    shutil.copytree(models.TARGET, model, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = SIZES | MIXTURE | {"vocab_size": 4096, "attention_bias": False, "initializer_range": 0.2}
    transformers.Qwen3MoeConfig(**sizes).save_pretrained(model)
    check_logits_of_two_ranks(replace(SETTINGS, model=str(model), draft="none", load_format="dummy"), (70, 1))


def test_a_model_that_chooses_blocks_over_two_ranks(tmp_path: Path) -> None:
    """From 160 tokens on each rank chooses for its own KV heads; the GPUs have room for 320 of 342 tokens."""
    model = tmp_path / "model"
    shutil.copytree(models.TARGET, model, ignore=shutil.ignore_patterns("*.safetensors"))
    save(model, CONFIG | {"vocab_size": 4096})
    tiered = replace(SETTINGS, model=str(model), draft="none", kv_tokens=320, host_kv_memory=0.001)
    totals = check_logits_of_two_ranks(tiered, (200, 100, 1, 40, 1))
    assert totals["kv_fetched_pages"] > 0


def check_logits_of_two_ranks(settings: TargetSettings, counts: tuple[int, ...]) -> dict[str, float]:
    """Check that two ranks give the logits of one rank without tiers, for inputs of `counts` tokens in a row.

    Returns the counters of the KV over two ranks.
    """
    settings = replace(settings, max_context=400)
    processes, found = RankProcesses(settings), []
    alone = open_model(replace(settings, tensor_parallel_size=1, kv_tokens=512, host_kv_memory=0.0)).runner
    split = opened(processes, settings).runner
    for runner in (alone, split):
        kv = SequenceKV()
        outputs = [runner.forward([SequenceInput(kv, tokens(count, count), "all")])[0] for count in counts]
        found.append([output.logits for output in outputs])
    processes.stop()
    for one, two in zip(*found, strict=True):
        assert one.std() > 0.1
        torch.testing.assert_close(two, one, atol=2e-3, rtol=1e-3)
    return split.kv.totals


DEVICES = ["cpu", pytest.param("cuda", marks=TWO_GPUS)]
Both = tuple[ModelRunner, ModelRunner]  # in this process alone, and over two ranks


@contextmanager
def open_both_ways(settings: TargetSettings) -> Iterator[Both]:
    """Yield a model's runner in this process alone, and one over two ranks. Only one group of ranks can be open."""
    processes = RankProcesses(settings)
    alone, split = open_model(replace(settings, tensor_parallel_size=1)).runner, opened(processes, settings).runner
    try:
        for runner in (alone, split):
            runner.keep_memories(8)
            runner.kv.keep_group_means(PLAN.group_size)
        yield alone, split
    finally:
        processes.stop()


@pytest.mark.parametrize("device", DEVICES)
def test_kv_in_eight_bits_and_in_tiers(device: str) -> None:
    """Ranks have the scales of their own heads. Pages leave all GPUs at once, and each rank fetches those that its own
    heads list. If one rank has no room, the pass is void on both.
    """
    settings = replace(SETTINGS, device=device, kv_cache_dtype="fp8", kv_tokens=480, host_kv_memory=0.04)
    with open_both_ways(settings) as runners:
        alone, split = (runner.kv for runner in runners)
        assert isinstance(alone, TieredKV) and isinstance(split, TieredKV)
        own = split.ranks.own(alone.kv_heads)
        assert torch.equal(split.scales.scales, alone.scales.scales[:, :, own])
        torch.testing.assert_close(split.scales.centers, alone.scales.centers[:, :, own], atol=1e-4, rtol=1e-4)
        check_logits(runners, 0.3)  # sums over ranks round some keys and values to the next 8-bit number
        check_one_budget(runners, 1)
        # Later tokens may differ where two tokens are almost equally likely.
        one, two = drafted_both_ways(runners, Sampling(0.0), 0.15)
        assert one[:601] == two[:601]
        assert not split.counters.overflow_pages
        one, two = drafted_both_ways(runners, Sampling(0.0), 0.3)
        assert one[:601] == two[:601]
        assert split.counters.overflow_pages > 0
        for count in (lambda kv: kv.stored_pages, lambda kv: kv.offloads, lambda kv: kv.stages):
            assert count(alone.counters) == count(split.counters) > 0
        for kv in (alone, split):
            assert kv.counters.fetched_pages > 0
            kv.check_integrity()


@pytest.fixture(scope="module", params=DEVICES)
def runners(request: pytest.FixtureRequest) -> Iterator[Both]:
    """The bundled target in this process alone, and over two ranks."""
    with open_both_ways(replace(SETTINGS, device=request.param)) as both:
        yield both


def test_logits_of_both_are_the_same_up_to_rounding(runners: Both) -> None:
    check_logits(runners, 2e-3)


def check_logits(runners: Both, near: float) -> None:
    """Compare logits of a prompt in parts, after a rollback, and of a sequence that begins with another's pages."""
    found = []
    for runner in runners:
        prompt = tokens(500, 1)
        kv = read_prompt(runner, prompt, 400)
        runner.kv.index_prefix(kv, prompt)
        (first,) = runner.forward([SequenceInput(kv, tokens(5, 2), "all")])
        runner.kv.truncate(kv, 502)
        other = SequenceKV()
        assert runner.kv.reuse_prefix(other, [*prompt[:320], *tokens(20, 3)]) == 320
        inputs = [SequenceInput(kv, tokens(3, 4), "all"), SequenceInput(other, tokens(20, 3), "all")]
        found.append([first.logits, *(output.logits for output in runner.forward(inputs))])
        for sequence in (kv, other):
            runner.kv.release(sequence)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, atol=near, rtol=1e-3)


def test_one_budget_is_shared_out_over_the_heads_of_all_ranks(runners: Both) -> None:
    check_one_budget(runners, 3)


def check_one_budget(runners: Both, rounds: int) -> None:
    """Check that one rank and two share a budget out to the same blocks in each round.

    Scores are sums over ranks, so blocks may differ where two scores differ by rounding alone; their number may not.
    Means stand in for the other blocks.
    """
    chosen: list[list[Tensor]] = []
    counts: list[list[int | None]] = []
    for runner in runners:
        lengths = 800, 330
        sequences = [read_prompt(runner, tokens(length, i), 400) for i, length in enumerate(lengths)]
        readers, rng = [Reader(PLAN, report_blocks=True) for _ in lengths], np.random.default_rng(0)
        blocks: list[Tensor] = []
        read: list[int | None] = []
        for turn in range(rounds):
            inputs = []
            for i, (kv, reader) in enumerate(zip(sequences, readers, strict=True)):
                base = kv.length + 1
                said = rng.random((reader.announced_rows, PLAN.num_blocks(base))) < 0.03
                listed = reader.read(BlockSelection.from_matrix(said), base, kv.length + 5)
                inputs.append(SequenceInput(kv, tokens(5, 10 * turn + i), "all", listed))
            outputs = runner.forward(inputs)
            for reader, output in zip(readers, outputs, strict=True):
                reader.finish(output)
                blocks.append(output.blocks.cpu())
                read.append(output.blocks_read)
        chosen.append(blocks)
        counts.append(read)
        for sequence in sequences:
            runner.kv.release(sequence)
    assert counts[0] == counts[1]
    for one, two in zip(*chosen, strict=True):
        assert 0 < int(one.sum()) < one.numel()
        assert int((one != two).sum()) <= 0.01 * int(one.sum())
    of_last_layer = chosen[1][-1][-1]
    assert of_last_layer[:2].any()
    assert of_last_layer[2:].any()


@pytest.mark.parametrize("sampling", [Sampling(0.0), SAMPLED], ids=["greedy", "sampled"])
def test_ranks_draft_and_judge_alike(runners: Both, sampling: Sampling) -> None:
    one, two = drafted_both_ways(runners, sampling, 0.3)
    assert one == two


def drafted_both_ways(runners: Both, sampling: Sampling, budget: float) -> tuple[list[int], list[int]]:
    """Return the tokens of a session that drafts for itself, by one rank and by two. Its lists come from remembered
    weights.
    """
    prompt, said = tokens(600, 5), []
    for runner in runners:
        kv, found = read_prompt(runner, prompt[:-1], 400), list(prompt)
        drafting = SelfDrafting(replace(PLAN, budget=budget), GAMMA)
        memory = drafting.new_memory()
        for drafted in (0, GAMMA, GAMMA):
            judged = Drafted([0] * drafted, [], sampling, len(found), committed=found)
            read = drafting.read(memory, len(found), drafted)
            item = SequenceInput(kv, [found[-1], *judged.tokens], "all", read, judged)
            (output,) = runner.forward([item])
            found += [*item.tokens[1 : output.verdict[0] + 1], output.verdict[1]]
            runner.kv.truncate(kv, len(found) - 1)
        said.append(found)
        runner.kv.release(kv)
    assert len(said[0]) > len(prompt) + 3
    return said[0], said[1]


def test_pages_are_zeroed_on_all_ranks(runners: Both) -> None:
    """Keys of zeros weigh all tokens alike, so other values read on one rank would change the logits."""
    found = []
    for runner in runners:
        kv = read_prompt(runner, tokens(64, 7), 400)
        runner.kv.scrub(kv)
        (output,) = runner.forward([SequenceInput(kv, [5], "last")])
        found.append(output.logits)
        runner.kv.release(kv)
    torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=1e-3)


def test_steps_follow_one_another_before_the_host_has_seen_them(runners: Both) -> None:
    """Each begins with the token that ranks have found themselves. On GPUs steps are prepared graphs, sums included."""
    said = []
    for runner in runners:
        before = runner.captures_made
        runner.warm_up([None], 2)
        made, prompt = runner.captures_made, tokens(300, 9)
        assert runner.chains_steps == (runner.kv.device.type == "cuda") == (made > before)
        kv, found, under_way = read_prompt(runner, prompt[:-1], 400), list(prompt), None
        for turn in range(6):
            item = SequenceInput(kv, found[-1:], "all", None, Drafted([], [], Sampling(0.0), len(found)))
            launched = runner.launch([replace(item, tokens=[0], follows=0) if turn else item])
            if under_way is not None:
                (output,) = under_way()
                found.append(output.verdict[1])
            under_way = launched
        under_way()
        assert runner.captures_made == made
        said.append(found)
        runner.kv.release(kv)
    assert len(said[0]) == 305
    assert said[0] == said[1]


# Sums of small tensors.


def test_which_tensors_are_small() -> None:
    """The kernel takes two dtypes, and contiguous multiples of 16 bytes that fit into a rank's part."""
    sums = SmallSums(torch.empty(2048, dtype=torch.uint8), "")
    fits = torch.empty(2, 512, dtype=torch.bfloat16)
    refused = [fits[:, :256], fits[:, 1:], fits[:, :7].clone(), fits[:0], fits.half(), fits.float()]
    refused.append(fits.flatten()[1:9])
    assert [sums.takes(tensor) for tensor in (fits, fits[1:], fits[:1].float())] == [True] * 3
    assert not any(sums.takes(tensor) for tensor in refused)


def test_without_shared_memory_nccl_adds_up_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks decide so together, and rank 0 says why."""
    agreed: list[int] = []

    def least(number: int) -> int:
        agreed.append(number)
        return number

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (3, 2))
    assert meet_in_memory(0, 2, least) is None
    assert agreed == [0]
    assert "ranks add up all tensors by NCCL, since cuda:3 cannot reach the memory of cuda:2" in caplog.text


@torch.inference_mode()
def check_sums(rank: int, port: int) -> None:
    """Add up as one of two ranks: through symmetric memory, eagerly and in a graph, and by NCCL."""
    ranks = Ranks(rank, 2)
    join(ranks, port, torch.device("cuda", rank))
    generator = torch.Generator().manual_seed(rank)
    for rows, dtype in ((1, torch.bfloat16), (40, torch.bfloat16), (7, torch.float32)):
        tensor = torch.randn(rows, 4096, generator=generator).to("cuda", dtype)
        by_nccl, summed, again = tensor.clone(), tensor.clone(), tensor.clone()
        assert parallel_ranks._small_sums.takes(summed)
        dist.all_reduce(by_nccl)
        ranks.sum(summed)
        assert torch.equal(summed, by_nccl)  # two numbers have one order to be added up in
        both = [torch.empty_like(summed) for _ in range(2)]
        dist.all_gather(both, summed)
        assert torch.equal(*both)
        graph = captured(partial(ranks.sum, again), times=3)
        for _ in range(2):
            again.copy_(tensor)
            graph.replay()
        assert torch.equal(again, 4 * summed)  # which each of the sums after the first doubles
    large = torch.ones(1024, 4096, dtype=torch.bfloat16, device="cuda")
    assert bool((ranks.sum(large) == 2).all())
    leave()


@TWO_GPUS
def test_small_sums_are_the_same_on_all_ranks() -> None:
    """To the bit, in graphs too, and the same as NCCL's."""
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs that reach each other's memory")
    store, port = serve_store()
    torch.multiprocessing.spawn(check_sums, (port,), nprocs=2)
    del store


# What rank 0 tells the others.


def test_shapes_are_told_as_numbers() -> None:
    """Every field has another value than by default, so one that is not told would show."""
    read = ReadShape(32, 5, (0, 3), 0.9, weighs=True, fetches=True, reports=True)
    judge = JudgeShape(64, 3, draws_own=True, alternatives=2)
    shape = PassShape(
        *(4, 20, 5, 100, 7),
        **{"pinned": True, "light": True, "drafts": 3, "turn": 2, "judges_drafts": True, "choosers": Choosers.EACH},
        **{"gives_logits": False},
        **{"read": read, "judge": judge},
    )
    for each, plain in ((shape, PassShape(1, 1, 1, 1)), (read, ReadShape()), (judge, JudgeShape())):
        assert all(getattr(each, item.name) != getattr(plain, item.name) for item in fields(each))
    for each in (shape, replace(shape, judge=None), replace(shape, read=replace(read, dense_layers=()))):
        assert decode(encode(each)) == each
    with pytest.raises(ValueError, match="more than a PassShape has"):
        decode((*encode(shape), 0))


def test_ranks_take_neighbouring_gpus() -> None:
    assert [device_of("cuda", rank) for rank in (1, 2)] == ["cuda:1", "cuda:2"]
    assert device_of("cuda:2", 1) == "cuda:3"
    assert device_of("cpu", 1) == "cpu"
    if torch.cuda.device_count() < 8:
        with pytest.raises(ValueError, match="--tensor-parallel-size 8 takes as many GPUs from cuda on"):
            RankProcesses(replace(SETTINGS, device="cuda", tensor_parallel_size=8))


def test_a_rank_that_ends_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that could not open its part after all ranks had met, of memory that it alone lacks, say."""
    (ours, theirs), (ended, other) = Pipe(), Pipe()
    theirs.send_bytes(b"MemoryError: the host has no room")
    other.close()
    processes = object.__new__(RankProcesses)
    process = SimpleNamespace(sentinel=ended, join=lambda: None, pid=7, exitcode=1)
    vars(processes).update(_processes=[process], pipes=[ours], _count=2, _stopping=False)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    processes._watch()
    assert caplog.records[-1].reason == "MemoryError: the host has no room"  # type: ignore[attr-defined]


def test_a_rank_that_cannot_load_is_named() -> None:
    with pytest.raises(ValueError, match="rank 1 of 2 could not load its part of the model: ValueError: dtype 'odd'"):
        opened(RankProcesses(replace(SETTINGS, dtype="odd")), SETTINGS)
