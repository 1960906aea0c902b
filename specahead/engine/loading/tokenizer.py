"""A model's tokenizer, what identifies it, and the ids that it has."""

import hashlib
import json
from typing import Any

from specahead.engine.loading.config import load_config


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer in a folder or of a Hugging Face id; code from the hub is never run."""
    from transformers import AutoTokenizer  # loaded here, as it takes seconds
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    named = get_tokenizer_config(model)
    # transformers reads the config by itself where the tokenizer's class has to be found by that of the config.
    config = load_config(model) if "tokenizer_class" in named and "auto_map" not in named else None
    return AutoTokenizer.from_pretrained(model, config=config, trust_remote_code=False)


def tokenizer_hash(tokenizer: Any) -> str:
    """Return 16 hex digits that are the same for tokenizers that give the same ids.

    They are over the vocabulary, the special tokens and how a few awkward strings encode.
    """
    probes = ["Hello, world", " naïve café 北京 🙂\n\n", "x = 1\t# tab", "  two spaces"]
    state = [
        sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]),
        sorted(tokenizer.all_special_ids),
        [tokenizer.encode(probe, add_special_tokens=False) for probe in probes],
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


def count_token_ids(tokenizer: Any) -> int:
    """Return one more than the highest id of a token, added and special ones included."""
    return int(max(tokenizer.get_vocab().values())) + 1


def load_generation_config(model: str) -> dict[str, Any]:
    """Return what a folder's generation_config.json or that of a Hugging Face id says; nothing if there is none."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(model).to_diff_dict()
    except OSError:
        return {}


def stop_token_ids(config: dict[str, Any], tokenizer: Any) -> list[int]:
    """Return the end-of-sequence ids of a generation config, the tokenizer's if it has none."""
    found = config.get("eos_token_id")
    if found is None:
        found = tokenizer.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)
