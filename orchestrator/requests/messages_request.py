"""Requests of Anthropic's Messages, which are served as chats."""

import json
from itertools import groupby
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from orchestrator.requests.chat_request import CalledFunction, ChatRequest, FunctionDefinition, Message, Tool, ToolCall
from orchestrator.requests.long_fields import Items, Models
from orchestrator.requests.requests import GenerationRequest, StopString, check_one_answer, read_request
from orchestrator.text.structured_outputs import Strict
from specahead.wire.errors import InvalidArgument


class Block(Strict):
    """A part of a message: its type says which of the other fields it has. Unknown fields are ignored."""

    TYPES: ClassVar = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
    NEEDS: ClassVar = {"text": "text", "tool_use": "name", "tool_result": "tool_use_id", "thinking": "thinking"}

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | Models[Block] | None" = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type not in self.TYPES:
            raise InvalidArgument(
                f"messages: a block of type {self.type[:40]!r} is not supported: the model reads text alone", "messages"
            )
        if self.type in self.NEEDS and getattr(self, self.NEEDS[self.type]) is None:
            raise ValueError(f"a block of type {self.type!r} must have {self.NEEDS[self.type]!r}")
        return self


class Turn(Strict):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Models[Block]

    @property
    def blocks(self) -> list[Block]:
        """The content as blocks."""
        return [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ClientTool(Strict):
    """A tool that the client runs."""

    type: str | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type not in (None, "custom") or self.input_schema is None:
            raise InvalidArgument(
                f"tools: {self.name[:40]!r} of type {self.type!r} is not supported: the client runs each tool, "
                "and gives its input_schema",
                "tools",
            )
        return self


class ToolChoice(Strict):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """Whether the model is to reason before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Strict):
    """The JSON schema that the answer must follow."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The form of the answer, and how much the model is to reason."""

    format: OutputFormat | None = None
    effort: str | None = None


class PromptRequest(GenerationRequest):
    """The fields of a request for a message that make its prompt. A request to count tokens has these alone."""

    messages: Models[Turn] = Field(min_length=1)
    system: str | Models[Block] | None = None
    tools: Models[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Items[StopString] | None = Field(None, max_length=16)
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        check_one_answer(self)
        return self


class MessagesRequest(PromptRequest):
    """A request for the next message of a conversation."""

    max_tokens: int = Field(ge=1)


def to_chat(request: PromptRequest) -> ChatRequest:
    """Return a request for a message as a chat. Raises InvalidArgument as a chat does."""
    fields = request.model_dump(include=set(GenerationRequest.model_fields), exclude_none=True, by_alias=True)
    output, choice = request.output_config or OutputConfig(), request.tool_choice
    if output.format is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": output.format.schema_}}
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    template: dict[str, Any] = {}
    if request.thinking is not None:  # the switch of Qwen's template and of others
        template["enable_thinking"] = request.thinking.type != "disabled"
    opening = [Turn(role="system", content=request.system)] if request.system else []
    messages = [message for turn in opening + request.messages for message in _messages(turn)]
    last = messages[-1]
    fields |= {
        "messages": messages,
        "tools": [_tool(tool) for tool in request.tools or []],
        "reasoning_effort": output.effort,
        "continue_final_message": last.role == "assistant" and not last.tool_calls,  # the answer begins with its text
        "chat_template_kwargs": template | (request.chat_template_kwargs or {}),
    }
    return read_request(ChatRequest, fields)


def _tool(tool: ClientTool) -> Tool:
    given = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return Tool(type="function", function=FunctionDefinition(**given, parameters=tool.input_schema))


def _text(content: str | list[Block] | None) -> str:
    """Return a content as one text."""
    return "".join(block.text or "" for block in content) if isinstance(content, list) else content or ""


def _messages(turn: Turn) -> list[Message]:
    """Return a turn as messages of a chat: each result of a tool is one of its own."""
    if turn.role == "assistant":
        return [_answer(turn.blocks)]
    messages: list[Message] = []
    for are_results, blocks in groupby(turn.blocks, lambda block: block.type == "tool_result"):
        if are_results:
            messages += [
                Message(role="tool", tool_call_id=block.tool_use_id, content=_text(block.content)) for block in blocks
            ]
        else:
            messages.append(Message(role=turn.role, content=_text([*blocks])))
    return messages or [Message(role=turn.role, content="")]


def _answer(blocks: list[Block]) -> Message:
    """Return an earlier answer of the model, without reasoning that only Anthropic can read."""
    calls = [
        ToolCall(id=block.id, function=CalledFunction(name=block.name or "", arguments=json.dumps(block.input or {})))
        for block in blocks
        if block.type == "tool_use"
    ]
    return Message(
        role="assistant",
        content=_text(blocks),
        tool_calls=calls or None,
        reasoning_content="".join(block.thinking or "" for block in blocks) or None,
    )
