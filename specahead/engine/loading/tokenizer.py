"""A model's tokenizer: its identity, its ids, and the ids that end a text."""

import hashlib
import json
from pathlib import Path
from typing import Any

from specahead.engine.loading.config import load_config


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer in a folder or of a Hugging Face id; code from the hub is never run.

    Raises OSError for files that are not there, ValueError that names a file which cannot be read.
    """
    from transformers import AutoTokenizer  # loaded here, as it takes seconds
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        named = get_tokenizer_config(model)
        # Without a class of its own the tokenizer is found by the config's class; transformers reads the config itself.
        config = load_config(model) if "tokenizer_class" in named and "auto_map" not in named else None
        return AutoTokenizer.from_pretrained(model, config=config, trust_remote_code=False)
    except (OSError, NotImplementedError):
        raise
    except Exception as error:  # tokenizers has no class of its own for errors, and transformers names no file
        raise ValueError(f"{_broken_file(model)} cannot be read: {error}") from error


def _broken_file(model: str) -> str:
    """Return the file of a model's folder that is no JSON; the model's tokenizer if there is none."""
    for path in sorted(Path(model).glob("*.json")):
        try:
            json.loads(path.read_bytes())
        except ValueError:
            return str(path)
    return f"the tokenizer of {model}"


def tokenizer_hash(tokenizer: Any) -> str:
    """Return 16 hex digits that are the same for tokenizers that give the same ids.

    They hash the vocabulary, the special tokens and the ids of a few awkward strings.
    """
    probes = ["Hello, world", " naïve café 北京 🙂\n\n", "x = 1\t# tab", "  two spaces"]
    state = [
        sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]),
        sorted(tokenizer.all_special_ids),
        [tokenizer.encode(probe, add_special_tokens=False) for probe in probes],
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


def count_token_ids(tokenizer: Any) -> int:
    """Return the highest token id plus one, counting added and special tokens."""
    return int(max(tokenizer.get_vocab().values())) + 1


def load_generation_config(model: str) -> dict[str, Any]:
    """Return the generation config in a folder or of a Hugging Face id, as far as it is not the default; {} if none.

    Raises OSError that names the file if it cannot be read.
    """
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME, cached_file

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    if cached_file(model, GENERATION_CONFIG_NAME, **missing) is None:
        return {}
    return GenerationConfig.from_pretrained(model).to_diff_dict()


def stop_token_ids(config: dict[str, Any], tokenizer: Any) -> list[int]:
    """Return the end-of-sequence ids of a generation config, or the tokenizer's if it has none."""
    found = config.get("eos_token_id")
    if found is None:
        found = tokenizer.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)
