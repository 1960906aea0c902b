"""A model's tokenizer, what identifies it, and the ids that it has."""

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer in a folder or of a Hugging Face id; code from the hub is never run."""
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


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


def stop_token_ids(model: str, tokenizer: Any) -> list[int]:
    """Return the end-of-sequence ids by generation_config.json where there is one, else the tokenizer's."""
    file = Path(model) / "generation_config.json"
    found: Any = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    if found is None:
        found = tokenizer.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)
