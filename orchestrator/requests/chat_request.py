"""A request for the next message of a conversation, with the tools that the model may call."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.requests.long_fields import Models
from orchestrator.requests.requests import MAX_LOGPROBS, UNSUPPORTED, GenerationRequest
from orchestrator.text.structured_outputs import Strict
from specahead.wire.errors import InvalidArgument


def _only_text(kind: Any) -> Any:
    """Return the type of a part of text. Raises pydantic's error for images, audio and files."""
    if isinstance(kind, str) and not kind.endswith("text"):
        message = "type {kind} is not supported: the model reads text alone"
        raise PydanticCustomError(UNSUPPORTED, message, {"kind": repr(kind[:40])})
    return kind


def _only_functions(kind: Any) -> Any:
    """Return the type of a function. Raises pydantic's error for tools that a server would run, such as web_search."""
    if isinstance(kind, str) and kind != "function":
        message = "{kind} is not supported: only functions are, which the client runs"
        raise PydanticCustomError(UNSUPPORTED, message, {"kind": repr(kind[:40])})
    return kind


FunctionType = Annotated[Literal["function"], BeforeValidator(_only_functions)]


class ContentPart(Strict):
    """A part of a message's content."""

    type: Annotated[Literal["text", "input_text", "output_text", "reasoning_text"], BeforeValidator(_only_text)]
    text: str


def join_text(content: str | list[ContentPart]) -> str:
    """Return a content as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class CalledFunction(Strict):
    """The function that a tool call names, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that an earlier answer made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """A message of a conversation. Unknown fields, such as `refusal`, do not reach the template."""

    role: str
    content: str | Models[ContentPart] | None = None
    name: str | None = None
    tool_calls: Models[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return join_text(self.content or "")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} must have content")
        return self


class FunctionDefinition(Strict, extra="allow"):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(Strict, extra="allow"):
    """A tool that the model may call."""

    type: FunctionType
    function: FunctionDefinition


class ChatRequest(GenerationRequest):
    """A request for the next message of a conversation."""

    messages: Models[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    tools: Models[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def must_call(self) -> bool:
        """Whether the answer must be calls of tools and nothing else."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that may be called: the named one, or all."""
        named = self._named_tool()
        return [tool for tool in self.tools or [] if named in (None, tool.function.name)]

    @property
    def has_strict_tools(self) -> bool:
        """Whether the model may call a tool whose arguments must follow its schema."""
        return self.tool_choice != "none" and any(tool.function.strict for tool in self.tools or [])

    def _named_tool(self) -> str | None:
        """Return the name of the only tool that may be called, None if tool_choice names none."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "function":
            return None
        named = choice.get("function", choice)  # Responses put the name beside the type
        return str(named.get("name") if isinstance(named, dict) else named)

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools in the prompt, as they were given."""
        offered = self.tools if self.tool_choice != "none" else None
        return [tool.model_dump(exclude_unset=True) for tool in offered or []]

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        self._check_tool_choice()
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise InvalidArgument(message, "continue_final_message")
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs: only where logprobs is true", "top_logprobs")
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return self

    def _check_tool_choice(self) -> None:
        """Raise InvalidArgument for an unknown choice, or for a tool that is not in the request."""
        choice = self.tool_choice
        if choice not in (None, "none", "auto", "required") and self._named_tool() is None:
            message = f"tool_choice: expected 'auto', 'none', 'required' or a function's name, got {str(choice)[:80]!r}"
            raise InvalidArgument(message, "tool_choice", "unsupported_value")
        if self.must_call and not self.callable_tools:
            names = ", ".join(repr(tool.function.name) for tool in self.tools or []) or "none"
            raise InvalidArgument(f"tool_choice: {choice!r} matches none of the tools: {names}", "tool_choice")
