"""Shapes of real models, for benchmarks that need no weights worth anything. Nothing here loads torch, for `flags`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """As in a transformers config of the Llama family, of Qwen3's, dense or a mixture, or of MiniCPM4's."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    """Of each expert, if there are any."""
    vocab_size: int = 128256
    experts: int = 0
    """Of each layer; 0: it has an MLP."""
    chosen: int = 0
    """Experts of a token."""
    sparse_config: dict[str, int] | None = None
    """How MiniCPM's attention chooses blocks; None: it reads everything."""
    drafted: int = 0
    """Tokens that an EAGLE-3 head drafts of the vocabulary; 0: it is a model by itself."""
    model_type: str = "llama"
    """As transformers names it."""
    tied: bool = False
    """Whether the embedding is the head as well."""


_MINICPM4 = {"block_size": 64, "topk": 64, "init_blocks": 1, "window_size": 2048, "dense_len": 8192}
SHAPES = {
    "70b": Shape(80, 8192, 64, 8, 128, 28672),
    "8b": Shape(32, 4096, 32, 8, 128, 14336),
    "1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151936),
    "1b": Shape(16, 2048, 32, 8, 64, 8192),
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936, model_type="qwen3", tied=True),
    "0.5b": Shape(24, 896, 14, 2, 64, 4864, 151936),
    "30b-a3b": Shape(48, 2048, 32, 4, 128, 768, 151936, experts=128, chosen=8, model_type="qwen3_moe"),
    "minicpm4-8b": Shape(32, 4096, 32, 2, 128, 16384, 73448, sparse_config=_MINICPM4, model_type="minicpm"),
    "eagle3-8b": Shape(1, 4096, 32, 8, 128, 14336, drafted=32000),
    "eagle3-70b": Shape(1, 8192, 64, 8, 128, 28672, drafted=32000),
    "tiny": Shape(2, 64, 4, 2, 16, 128, 4096),
}
