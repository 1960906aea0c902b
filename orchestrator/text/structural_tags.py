"""Structural tags, as in vLLM: free text in which the parts between tags follow schemas.

They become a Lark grammar in llguidance's dialect, in which tags that are tokens of the model are tokens.
llguidance.StructTag takes each tag between angle brackets for a token.
"""

import json
from typing import Any

from orchestrator.text.lark import Lark, any_text
from specahead.wire.errors import InvalidArgument

Format = dict[str, Any]


def tag_grammar(text: str, param: str, lark: Lark) -> str:
    """Return the Lark grammar of structural tags.

    text: their JSON, {format} with a format of type triggered_tags, or the older {structures, triggers}. Raises
    InvalidArgument, with the request's field `param`, for tags that are unknown or incomplete.
    """
    try:
        given = json.loads(text)
        form = given["format"] if "format" in given else _older(given)
        if form["type"] != "triggered_tags":
            raise ValueError(f"the format must be triggered_tags, got {str(form['type'])[:80]!r}")
        return _triggered(form, lark)
    except KeyError as error:
        raise InvalidArgument(f"{param}: a structural tag lacks {error}", param) from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"{param}: not a structural tag: {error}", param) from None


def _older(given: Format) -> Format:
    """Return the older form as a format."""
    schemas = ((each, {"type": "json_schema", "json_schema": each["schema"]}) for each in given["structures"])
    tags = [{"begin": each["begin"], "content": schema, "end": each["end"]} for each, schema in schemas]
    return {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}


def _triggered(form: Format, lark: Lark) -> str:
    """Return the grammar of free text in which each trigger must begin one of its tags."""
    triggers, of_trigger = form["triggers"], dict[str, list[str]]()
    rules: list[str] = []
    for tag in form["tags"]:
        trigger = next((each for each in triggers if each and tag["begin"].startswith(each)), None)
        if trigger is None:
            raise ValueError(f"{tag['begin']!r} begins with none of the triggers {triggers}")
        trigger = max(trigger, lark.first_token(tag["begin"]), key=len)
        of_trigger.setdefault(trigger, []).append(_tag(tag, trigger, lark, rules))
    parts = [f"{_before(trigger, lark, rules, *triggers)} ({' | '.join(tags)})" for trigger, tags in of_trigger.items()]
    part = f"({' | '.join(parts)})"
    rules.append(any_text("text", *triggers))
    repeats = "+" if form.get("at_least_one") else "*"
    if form.get("stop_after_first"):
        return f"start: {part if form.get('at_least_one') else f'({part} | TEXT?)'}\n{''.join(rules)}"
    return f"start: {part}{repeats} TEXT?\n{''.join(rules)}"


def _tag(form: Format, trigger: str, lark: Lark, rules: list[str]) -> str:
    """Return the term of the rest of a tag after its trigger, and add the rules that it refers to."""
    begin, ends, content = lark.spell(form["begin"][len(trigger) :]), form["end"], form["content"]
    ends = [ends] if isinstance(ends, str) else ends
    if content["type"] == "any_text" and all(ends):
        return f"{begin} ({' | '.join(_before(end, lark, rules) for end in ends)})"
    if content["type"] != "json_schema":
        raise ValueError(f"a tag's content must be json_schema or any_text with an end, got {content['type'][:80]!r}")
    schema = content["json_schema"]
    closings = " | ".join(lark.spell(end) for end in ends if end)
    closed = f"({closings}){'' if all(ends) else '?'}" if closings else ""
    return f"{begin} {lark.json({} if schema is True else schema)} {closed}"


def _before(marker: str, lark: Lark, rules: list[str], *but: str) -> str:
    """Return the term of any text up to a marker, and the marker, and add its rules. Before a token, the text has none
    of `but`."""
    term, added = lark.before(marker, f"before_{len(rules)}", *but)
    rules.append(added)
    return term
