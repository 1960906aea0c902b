"""From a conversation to the text of a prompt, by the model's chat template."""

from typing import Any

from pydantic_core import from_json

from orchestrator.requests.chat_request import ChatRequest, Message
from orchestrator.text.replies import ReplyFormat
from orchestrator.text.special_tokens import TextEncoder
from specahead.wire.errors import InvalidArgument


def render_chat(request: ChatRequest, tokenizer: Any, reply_format: ReplyFormat, encoder: TextEncoder) -> str:
    """Return the prompt's text, with the encoder's marks in place of special tokens that users wrote.

    Raises InvalidArgument for a conversation that the template refuses, and for tools if the model's format of calls is
    not known.
    """
    if not tokenizer.chat_template:
        raise InvalidArgument("messages: the model has no chat template; use /v1/completions", "messages")
    if request.offered_tools and not reply_format.tools:
        message = "tools: the model's chat template shows no known format of calls; launch with --tool-call-parser"
        raise InvalidArgument(message, "tools", "unsupported_parameter")
    continues, generates = bool(request.continue_final_message), request.add_generation_prompt
    options: dict[str, Any] = {
        "tools": encoder.mark(request.offered_tools) or None,
        "continue_final_message": continues,
        "add_generation_prompt": not continues if generates is None else generates,
    }
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
    given = encoder.mark(request.chat_template_kwargs or {})
    options |= {name: value for name, value in given.items() if name not in _OURS}
    knows_developers = "developer" in str(tokenizer.chat_template)
    messages = [
        encoder.mark(_template_message(i, message, knows_developers)) for i, message in enumerate(request.messages)
    ]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # templates raise any error for messages that they refuse
        raise InvalidArgument(f"messages: the model's chat template refuses them: {error}", "messages") from error


# Arguments of apply_chat_template that are not variables of a template.
_OURS = frozenset({"conversation", "chat_template", "tokenize", "return_dict", "return_tensors", "tools", "padding"})


def _template_message(index: int, message: Message, knows_developers: bool) -> dict[str, Any]:
    """Return a message in the form of templates: its content as one text, the arguments of its calls as values."""
    role = "system" if message.role == "developer" and not knows_developers else message.role
    plain: dict[str, Any] = {"role": role, "content": message.text}
    plain |= message.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        for call in plain["tool_calls"]:
            try:
                # An answer that a limit cut off within a call comes back as it was.
                call["function"]["arguments"] = from_json(call["function"]["arguments"] or "{}", allow_partial=True)
            except ValueError as error:
                param = f"messages[{index}].tool_calls"
                raise InvalidArgument(f"{param}: the arguments are not valid JSON: {error}", param) from None
    return plain
