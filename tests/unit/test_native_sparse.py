"""Native sparse attention whose tokens share selections: against loops over single tokens, trained, and measured."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from specahead.cli.main import main
from specahead.engine.loading.config import load_config
from specahead.lab.evaluation.verification_intensity import NativeSparseSizes, intensity
from specahead.models import DRAFT
from specahead.models.native_sparse import Compression, NativeSparseAttention, NativeSparseLlama, SparseRule
from specahead.models.pair import Shape, llama
from specahead.models.train_native_sparse import settings_from, train

RULE = SparseRule(block_size=4, top=4, first=1, local=2, window=6)
CONFIG = llama(Shape(32, 2, 4, 2, 48, head_dim=8), 97, 0).config
LENGTH = 45


def attended(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return one query's output [dim] and weights; keys, values: [tokens, dim]."""
    weights = (keys @ query / query.numel() ** 0.5).softmax(0)
    return weights @ values, weights


def compressed(module: Compression, x: Tensor) -> Tensor:
    """Return a vector for each full block; x: [tokens, dim]."""
    blocks = [x[i : i + RULE.block_size] for i in range(0, len(x) - RULE.block_size + 1, RULE.block_size)]
    vectors = [module.map(((block + module.positions) * module.weights[:, None]).sum(0)) for block in blocks]
    return torch.stack(vectors) if vectors else x[:0]


def selected_blocks(weights: Tensor, own: int) -> set[int]:
    """Return what a token of block `own` selects; weights: of the blocks that ended before it."""
    kept = {block for block in range(own + 1) if block < RULE.first or block > own - RULE.local}
    others = sorted(set(range(own + 1)) - kept, key=lambda block: -weights[block].item())
    return kept | set(others[: RULE.top - len(kept)])


def attend_by_loops(layer: NativeSparseAttention, x: Tensor, shared: int) -> tuple[Tensor, list[set[int]]]:
    """Return the output [tokens, hidden] without rotary embeddings, and what the first KV head's tokens select."""
    length, group = len(x), layer.heads // layer.kv_heads
    queries, gates = layer.q_proj(x).view(length, layer.heads, -1), layer.gates(x).sigmoid().view(length, 3, -1)
    keys, values = (project(x).view(length, 3, layer.kv_heads, -1) for project in (layer.k_proj, layer.v_proj))
    output, read = torch.zeros_like(queries), list[set[int]]()
    for kv in range(layer.kv_heads):
        own_heads = range(kv * group, (kv + 1) * group)
        for t in range(length):
            past, own = t + 1, t // RULE.block_size
            summary_keys = compressed(layer.compress_keys, keys[:past, 0, kv])
            summaries = compressed(layer.compress_values, values[:past, 0, kv])
            coarse = [attended(queries[t, head], summary_keys, summaries) for head in own_heads]
            if shared == 0:
                blocks = set(range(own + 1))
            elif t % shared == 0:
                blocks = selected_blocks(sum(weights for _, weights in coarse), own)
            places = [i for i in range(past) if i // RULE.block_size in blocks]
            near = list(range(max(0, past - RULE.window), past))
            for head, (summary, _) in zip(own_heads, coarse, strict=True):
                fine, _ = attended(queries[t, head], keys[places, 1, kv], values[places, 1, kv])
                newest, _ = attended(queries[t, head], keys[near, 2, kv], values[near, 2, kv])
                output[t, head] = (gates[t, :, head, None] * torch.stack((summary, fine, newest))).sum(0)
            if kv == 0:
                read.append(blocks)
    return layer.o_proj(output.flatten(1)), read


@pytest.fixture
def layer() -> NativeSparseAttention:
    torch.manual_seed(3)
    made = NativeSparseAttention(CONFIG, RULE)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def unrotated(length: int) -> tuple[Tensor, Tensor]:
    return torch.ones(1, length, CONFIG.head_dim), torch.zeros(1, length, CONFIG.head_dim)


@torch.inference_mode()
@pytest.mark.parametrize("shared", [0, 1, 2, 3, 4, 7])
def test_attention_equals_loops_over_tokens(layer: NativeSparseAttention, shared: int) -> None:
    """Runs of 3 and 7 tokens reach over the ends of blocks."""
    x = torch.randn(2, LENGTH, CONFIG.hidden_size)
    got, _ = layer(x, unrotated(LENGTH), shared)
    for row, of_row in zip(x, got, strict=True):
        wanted, read = attend_by_loops(layer, row, shared)
        torch.testing.assert_close(of_row, wanted, atol=1e-4, rtol=1e-4)
        # Selections change within the text, so that the number of tokens that share them shows.
        changes = [t for t in range(1, LENGTH) if read[t] != read[t - 1]]
        assert len(changes) >= 4 and all(t % max(1, shared) == 0 for t in changes)


@torch.inference_mode()
@pytest.mark.parametrize("shared", [0, 1, 4, 7])
def test_later_tokens_change_nothing(shared: int) -> None:
    torch.manual_seed(0)
    model = NativeSparseLlama(CONFIG, RULE).eval()
    ids = torch.randint(97, (1, LENGTH))
    changed = ids.clone()
    changed[:, 30:] = (changed[:, 30:] + 1) % 97
    before, after = model(ids, shared), model(changed, shared)
    torch.testing.assert_close(before[:, :30], after[:, :30])
    assert (before[:, 30:] - after[:, 30:]).abs().amax(-1).min() > 1e-3


@torch.inference_mode()
def test_a_model_starts_from_a_dense_one() -> None:
    """With the gate of the selected branch open alone and all blocks selected, it is that model."""
    dense = LlamaForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()
    model = NativeSparseLlama.from_dense(dense, SparseRule()).eval()
    model.open_gates((-50.0, 50.0, -50.0))
    ids = torch.randint(4096, (1, 100))
    torch.testing.assert_close(model(ids, 0), dense(ids).logits, atol=1e-3, rtol=1e-3)


def test_training_lowers_the_loss_and_its_models_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run of the program for two numbers of tokens, then the command; the models cannot be served."""
    rng, text = random.Random(0), tmp_path / "text.txt"
    names = "Alice", "Bertram", "Clara", "Edmund", "Dorothy", "Ferdinand"
    text.write_text(" ".join(f"{rng.choice(names)} gave it to {rng.choice(names)}." for _ in range(2000)))
    sizes = "--shape 32,2,4,2,48,8 --rule 4,4,1,2,6 --shared 1 4"
    length = "--steps 20 --rows 2 --seq 256 --lr 1e-2 --warmup 1"
    train(settings_from(["--text", str(text), "--out", str(tmp_path), *sizes.split(), *length.split()]))
    folders = [str(tmp_path / f"shared-{shared}") for shared in (1, 4)]
    losses = [json.loads(Path(folder, "train.json").read_text())["losses"] for folder in folders]
    assert all(of_steps[-1] < of_steps[0] - 1 for of_steps in losses) and losses[0] != losses[1]
    capsys.readouterr()
    command = ["evaluate", "sharing", "--text", str(text), "--context", "128", "--passages", "3", "--json", "--model"]
    main([*command, *folders, "--shared", "1", "4"])
    own, free, trained, after = json.loads(capsys.readouterr().out)
    assert (own["model"], own["shared"], own["increase"], own["same"]) == ("shared-1", 1, 0, 1)
    assert free["increase"] == pytest.approx(free["nats"] - own["nats"])
    assert free["variation"] > 0 and free["standard_error"] > 0
    assert (trained["model"], after["shared"]) == ("shared-4", 4) and trained["increase"] != 0
    with pytest.raises(NotImplementedError, match="native sparse attention"):
        load_config(folders[0])


def test_intensity_is_that_of_table_1_and_of_one_example_by_hand() -> None:
    shared_and_apart = {8192: (2048, 5120), 16384: (2560, 5632), 32768: (3584, 6656), 65536: (5632, 8704)}
    for context, keys in shared_and_apart.items():
        row = intensity(NativeSparseSizes(), context, 4)
        assert (row.keys_shared, row.keys_apart) == keys
    # One layer of 2 query heads on 1 KV head, keys and values of 4, 2 bytes each; 32 tokens of context. A token attends
    # to 32/4 + 2*4 + 2 = 18 keys: 18 * 2 heads * 8 * 2 = 576 operations, and 2 * 100 for the parameters.
    small = NativeSparseSizes(100, 1, 2, 1, 4, 4, stride=4, selected=8, window=2)
    row = intensity(small, 32, 3)
    assert (row.keys_shared, row.keys_apart) == (18, 8 + 3 * 8 + 2)
    assert row.flops_shared == pytest.approx(3 * 776 / (18 * 16)) and row.flops_apart == pytest.approx(
        3 * 776 / (34 * 16)
    )
    assert intensity(small, 32, 9).keys_apart == 8 + 32 + 2  # no more than all of the context
