"""Requests of OpenAI's Responses, which are served as chats."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.requests.chat_request import (
    CalledFunction,
    ChatRequest,
    ContentPart,
    FunctionDefinition,
    FunctionType,
    Message,
    Tool,
    ToolCall,
    join_text,
)
from orchestrator.requests.long_fields import Items, Models
from orchestrator.requests.requests import MAX_LOGPROBS, UNSUPPORTED, GenerationRequest, check_one_answer, read_request
from orchestrator.text.structured_outputs import SchemaFormat, Strict
from specahead.wire.errors import InvalidArgument


class InputMessage(Strict):
    """A message among the items of a response's input."""

    type: Literal["message"] = "message"
    role: str
    content: str | Models[ContentPart]


class InputCall(Strict):
    """A call that an earlier response made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Models[ContentPart]


class InputReasoning(Strict):
    """The reasoning of an earlier response."""

    type: Literal["reasoning"]
    content: Models[ContentPart] | None = None


class ResponseTool(FunctionDefinition):
    """A tool that the model may call, in the form of Responses."""

    type: FunctionType


class Reasoning(Strict, extra="allow"):
    """Options of reasoning."""

    effort: str | None = None
    """The chat template's reasoning_effort."""


def _known_item(item: Any) -> Any:
    """Return an item of an input. Raises pydantic's error for items of tools that OpenAI runs, and for references."""
    kind = item.get("type", "message") if isinstance(item, dict) else "message"
    if kind not in ("message", "function_call", "function_call_output", "reasoning"):
        message = "an item of type {kind} is not supported: messages, reasoning, function calls and their outputs are"
        raise PydanticCustomError(UNSUPPORTED, message, {"kind": repr(str(kind)[:40])})
    return item


InputItem = Annotated[InputCall | InputCallOutput | InputReasoning | InputMessage, BeforeValidator(_known_item)]


class TextFormat(SchemaFormat):
    """ResponseFormat in the form of Responses."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Strict, extra="allow"):
    """Options of a response's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(GenerationRequest):
    """A request for a response to a text or to items. They continue a stored one, or are the whole conversation."""

    input: str | Annotated[Models[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: dict[str, Any] | None = None
    tools: Models[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: Items[str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wanted_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if "message.output_text.logprobs" in (self.include or []) else None

    @model_validator(mode="after")
    def _check_response(self) -> Self:
        check_one_answer(self)
        if self.max_tokens is not None:
            raise InvalidArgument("max_tokens: use max_output_tokens", "max_tokens", "unsupported_parameter")
        return self


def input_items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input as a list of items, as JSON has them."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    return [item.model_dump(exclude_none=True) for item in request.input]


def after(request: ResponsesRequest, history: list[dict[str, Any]]) -> ResponsesRequest:
    """Return a request whose input begins with the items of a stored conversation."""
    items = TypeAdapter(list[InputItem]).validate_python(history + input_items(request))
    return request.model_copy(update={"input": items})


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """Return a request for a response as a chat. Raises InvalidArgument as a chat does."""
    fields = request.model_dump(include=set(GenerationRequest.model_fields), exclude_none=True, by_alias=True)
    if request.text is not None and request.text.format is not None:
        form = request.text.format.model_dump(exclude_none=True, by_alias=True)
        fields["response_format"] = {"type": form.pop("type"), "json_schema": form}
    functions = [tool.model_dump(exclude={"type"}, exclude_unset=True) for tool in request.tools or []]
    fields |= {
        "max_tokens": request.max_output_tokens,
        "logprobs": request.wanted_logprobs is not None,
        "top_logprobs": request.wanted_logprobs,
        "messages": _messages(request),
        "tools": [Tool(type="function", function=FunctionDefinition(**function)) for function in functions],
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    return read_request(ChatRequest, fields)


def _messages(request: ResponsesRequest) -> list[Message]:
    """Return the input as messages. Items of one turn of the assistant become one message."""
    messages = [Message(role="system", content=request.instructions)] if request.instructions else []
    items = request.input
    if isinstance(items, str):
        return [*messages, Message(role="user", content=items)]
    for item in items:
        if isinstance(item, InputMessage) and item.role != "assistant":
            messages.append(Message(role=item.role, content=item.content))
            continue
        if isinstance(item, InputCallOutput):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=item.output))
            continue
        if not messages or messages[-1].role != "assistant":
            messages.append(Message(role="assistant"))
        turn = messages[-1]
        if isinstance(item, InputMessage):
            turn.content = turn.text + join_text(item.content)
        elif isinstance(item, InputCall):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            turn.tool_calls = [*(turn.tool_calls or []), ToolCall(id=item.call_id, function=function)]
        else:
            turn.reasoning_content = (turn.reasoning_content or "") + join_text(item.content or [])
    return messages
