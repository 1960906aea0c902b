"""A process that makes a grammar's source for the services and checks that it compiles.

`orchestrator.text.grammar_compiler` runs it and can end it, since some grammars take minutes or gigabytes to compile.
It imports llguidance alone, so that it starts in 50 ms. It reads a JSON object {kind, text, white_space, main, limits,
seconds, bytes} and writes {source} or {error}.
"""

import json
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark


def make_source(kind: str, text: str, white_space: dict[str, Any], main: str) -> str:
    """Return the source of a grammar in llguidance's JSON. Raises ValueError.

    kind, text, white_space: as in structured_outputs; an empty kind is no structure. main: a Lark grammar that refers
    to the structure as @body; if it is empty, the structure is the whole grammar.
    """
    grammars: list[dict[str, Any]] = [{"lark_grammar": main}] if main else []
    if kind:
        grammars.append(_grammar(kind, text, white_space) | {"name": "body"})
    return json.dumps({"grammars": grammars})


def _grammar(kind: str, text: str, white_space: dict[str, Any]) -> dict[str, Any]:
    if kind == "json":
        schema = json.loads(text)
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, dict):
            raise ValueError(f"a JSON schema is an object, got {type(schema).__name__}")
        return {"json_schema": {**schema, "x-guidance": white_space}}
    if kind == "choice":
        choices = (json.dumps(each, ensure_ascii=False) for each in json.loads(text))
        return {"lark_grammar": f"start: {' | '.join(choices)}"}
    if kind == "regex":
        return json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"][0]
    return {"lark_grammar": text if kind == "lark" else any_to_lark(text)}


def find_error(source: str, limits: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return why a grammar does not compile, empty if it does. Tokens of the model are replaced by a byte.

    limits: of what following the grammar may cost, fields of LLParserLimits.
    """
    by_byte = re.sub(r"<\[[0-9]+\]>", "<[1]>", source)
    tokenizer, bounds = llguidance.LLTokenizer("byte"), llguidance.LLParserLimits(**limits)
    matcher = llguidance.LLMatcher(tokenizer, by_byte, log_level=0, limits=bounds)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return str(matcher.get_error()).strip()


def main() -> None:
    try:
        import resource  # POSIX alone

        given = json.load(sys.stdin)
        resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
        resource.setrlimit(resource.RLIMIT_AS, (given["bytes"], given["bytes"]))
        source = make_source(given["kind"], given["text"], given["white_space"], given["main"])
        error = find_error(source, given["limits"])
    except BaseException as exception:  # conversions raise any error, and panics of Rust are not Exceptions
        source, error = "", str(exception)
    json.dump({"error": error} if error else {"source": source}, sys.stdout)


if __name__ == "__main__":
    main()
