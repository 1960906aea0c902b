"""The structure that a request asks for: OpenAI's response_format or vLLM's structured_outputs."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from orchestrator.requests.long_fields import Items
from specahead.wire.errors import InvalidArgument

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag", "lark"]
Schema = dict[str, Any] | bool | str

# White space in JSON, as llguidance's options. It is bounded, since weak models might fill answers with blanks:
# `compact` allows one space after a comma or a colon, `any` enough for indented objects.
WhiteSpace = dict[str, str | bool]
COMPACT: WhiteSpace = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
NO_SPACE: WhiteSpace = {"whitespace_flexible": False}
ANY_SPACE: WhiteSpace = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}"}
ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True)
class Structure:
    """The structure of an answer."""

    kind: Kind
    text: str
    """A JSON schema, a regular expression, a JSON list of choices, a grammar of Lark or GBNF, or JSON of structural
    tags, which become a grammar of kind lark."""
    param: str
    """The request's field."""


class Strict(BaseModel):
    """A part of a request whose values must have their types: `"1"` is not a number."""

    model_config = ConfigDict(strict=True)


class SchemaFormat(Strict, extra="allow"):
    """The JSON schema of a response, which is followed whether or not `strict` is set."""

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict, extra="allow"):
    """OpenAI's field of the structure. Structural tags are vLLM's, with their fields beside the type."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: SchemaFormat | None = None


class StructuredOutputs(Strict, extra="forbid"):
    """vLLM's field of the structure: one of the first six fields."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[Items[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_count(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > len(cls.model_fields):  # pydantic would describe each of them
            raise ValueError(f"at most {len(cls.model_fields)} fields are known, got {len(given)}")
        return given


class StructuredRequest(BaseModel):
    """The fields that ask for a structure; a request may use one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def structure(self) -> Structure | None:
        """The structure of the answer, None for free text. Raises InvalidArgument for more than one structure."""
        given, form = self.structured_outputs or StructuredOutputs.model_construct(), self.response_format
        tags = form.model_extra if form is not None and form.type == "structural_tag" else None
        outputs: list[tuple[Kind, Any, str]] = [
            ("json", given.json_, "structured_outputs.json"),
            ("regex", given.regex, "structured_outputs.regex"),
            ("choice", given.choice, "structured_outputs.choice"),
            ("grammar", given.grammar, "structured_outputs.grammar"),
            ("json", ANY_OBJECT if given.json_object else None, "structured_outputs.json_object"),
            ("structural_tag", given.structural_tag, "structured_outputs.structural_tag"),
            ("structural_tag", tags, "response_format"),
            ("json", self._format_schema(), "response_format"),
        ]
        found = [(kind, value, param) for kind, value, param in outputs if value is not None]
        if not found:
            return None
        if len(found) > 1:
            message = f"an answer can have one structure, got {' and '.join(param for _, _, param in found)}"
            raise InvalidArgument(message, found[1][2])
        ((kind, value, param),) = found
        return Structure(kind, value if isinstance(value, str) else json.dumps(value), param)

    @property
    def white_space(self) -> WhiteSpace | None:
        """The white space that the request allows in JSON, None if it does not state any."""
        given = self.structured_outputs
        if given is None or given.disable_any_whitespace is given.whitespace_pattern is None:
            return None
        if given.disable_any_whitespace or given.whitespace_pattern == "":
            return NO_SPACE
        return ANY_SPACE if given.whitespace_pattern is None else {"whitespace_pattern": given.whitespace_pattern}

    def _format_schema(self) -> Schema | None:
        """Return the schema of response_format, None if it asks for none. Raises InvalidArgument if it is missing."""
        form = self.response_format
        if form is None or form.type in ("text", "structural_tag"):
            return None
        if form.type == "json_object":
            return ANY_OBJECT
        if form.json_schema is None or form.json_schema.schema_ is None:
            param = "response_format.json_schema"
            raise InvalidArgument(f"{param}: expected an object with a schema, since type is json_schema", param)
        return form.json_schema.schema_
