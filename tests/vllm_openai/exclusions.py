"""Which of vLLM's tests are run, by file below tests/entrypoints, and which of these are not, with reasons.

Of the other files there, most drive vLLM's own classes in one process (`test_completion_error.py`,
`test_chat_error.py`, `test_serving_…`, `test_prompt_validation.py`), others are about what is not built here (LoRA,
images, prompt embeddings, beams, harmony, stored responses). `test_openai_schema.py` looks at the schema of vLLM's
application; ours is tried the same way by tests/clients/test_schema.py.
"""

FILES = (
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/completion/test_completion.py",
    "openai/models/test_models.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/responses/test_simple.py",
)

_IN_PROCESS = "drives vLLM's own classes in one process"
_TOKENIZER_INFO = "/tokenizer_info is not built"
_PROMPT_LOGPROBS = "prompt_logprobs is not built; a completion's echo with logprobs tells the same"
_USAGE = "continuous_usage_stats is taken and not followed"
_TOKEN_IDS = "logprob_token_ids is not built"
_REASONS_FIRST = "is of a model that reasons"

_REASONS = {
    "serve/instrumentator/test_basic.py": {
        "test_server_load": "/load is not built; /metrics has the same figure",
        "test_health_check_engine_dead_error": _IN_PROCESS,
    },
    "serve/tokenize/test_tokenization.py": {
        "test_tokenizer_info_basic": _TOKENIZER_INFO,
        "test_tokenizer_info_schema": _TOKENIZER_INFO,
        "test_tokenizer_info_consistency_with_tokenize": _TOKENIZER_INFO,
        "test_tokenizer_info_chat_template": _TOKENIZER_INFO,
    },
    "openai/chat_completion/test_chat.py": {
        "test_prompt_logprobs_chat": _PROMPT_LOGPROBS,
        "test_more_than_one_prompt_logprobs_chat": _PROMPT_LOGPROBS,
        "test_single_chat_session": "counts the tokens of another tokenizer",
        "test_chat_streaming": "has text in the last piece; ours is empty, as OpenAI's",
        "test_chat_completion_stream_options": _USAGE,
        "test_structured_outputs_choice_chat": "has two samples differ, which is up to the model",
        "test_structured_outputs_json_chat": "has the model end an object that may be endless",
        "test_response_format_json_object": "has the model calculate",
        "test_response_format_json_schema": "has the model calculate",
        "test_complex_message_content": "has the model calculate",
        "test_long_seed": "looks for pydantic's name of what is wrong; ours has its words",
        "test_invocations": "/invocations is not built",
        "test_chat_completion_request_n_parameter_to_sampling_params": _IN_PROCESS,
        "test_chat_completion_request_n_parameter_default": _IN_PROCESS,
        "test_null_top_logprobs_is_same_as_omitted": _IN_PROCESS,
        "test_chat_completion_request_accepts_model_specific_reasoning_effort": _IN_PROCESS,
        "test_chat_completion_request_rejects_unknown_reasoning_effort": _IN_PROCESS,
        "test_chat_completion_request_n_parameter_various_values": _IN_PROCESS,
        "test_chat_completion_request_n_parameter_exceeds_default_limit": _IN_PROCESS,
        "test_chat_completion_request_n_parameter_at_limit": _IN_PROCESS,
        "test_chat_completion_request_n_parameter_custom_limit": _IN_PROCESS,
        "test_chat_completion_request_n_parameter_massive_value": _IN_PROCESS,
    },
    "openai/chat_completion/test_chat_completion.py": {
        "test_kv_transfer_prompt_token_ids_round_trip": "kv_transfer_params is vLLM's own",
        "test_kv_transfer_prompt_token_ids_streaming": "kv_transfer_params is vLLM's own",
        "test_per_request_metrics_non_streaming": "of vLLM's metrics of a request we have speculative_decoding alone",
        "test_per_request_metrics_on_final_usage_chunk": "as before",
    },
    "openai/chat_completion/test_chat_echo.py": {
        "test_chat_session_with_echo_and_continue_final_message": "chats have no echo",
        "test_prompt_logprobs": _PROMPT_LOGPROBS,
        "test_top_logprobs": "-1 for all tokens is vLLM's own",
    },
    "openai/chat_completion/test_chat_logit_bias_validation.py": {
        "test_chat_logit_bias_multiple_non_integer_keys": "our message names the first of them"
    },
    "openai/completion/test_completion.py": {
        "test_single_completion": "counts the tokens of another tokenizer",
        "test_completion_truncation_side_controls_prompt_truncation": "truncate_prompt_tokens is not built",
        "test_logprob_token_ids": _TOKEN_IDS,
        "test_logprob_token_ids_stream": _TOKEN_IDS,
        "test_prompt_logprobs_completion": _PROMPT_LOGPROBS,
        "test_completion_stream_options": _USAGE,
        "test_batch_completions": "asks for a beam search as well, which is not built",
        "test_completion_request_bad_words_to_sampling_params": _IN_PROCESS,
        "test_completion_request_bad_words_default_empty": _IN_PROCESS,
        "test_completion_request_forwards_routed_experts_prompt_start": _IN_PROCESS,
    },
    "openai/models/test_models.py": {"test_check_models": "lists LoRA adapters, of which there are none"},
    "openai/test_return_token_ids.py": {
        "test_basic_completion_with_emoji[False]": "has null for fields that are not asked for; ours leaves them out",
        "test_basic_completion_with_emoji[None]": "as before",
        "test_chat_completion_with_tool_use": "has the model call a tool by itself",
        "test_chat_completion_with_emoji_and_token_ids": "has the text of another model's template",
        "test_comparison_with_prompt_logprobs_and_logprobs": _PROMPT_LOGPROBS,
    },
    "openai/test_return_tokens_as_ids.py": {
        "test_completion_return_tokens_as_token_ids_completion[True]": "--return-tokens-as-token-ids is vLLM's own",
        "test_chat_return_tokens_as_token_ids_completion[True]": "as before",
        "test_responses_api_logprobs_with_return_tokens_as_token_ids": _IN_PROCESS,
    },
    "openai/responses/test_simple.py": {
        "test_basic": "has the model calculate",
        "test_enable_response_messages": "enable_response_messages is vLLM's own",
        "test_reasoning_item": _REASONS_FIRST,
        "test_streaming_reasoning_tokens_e2e": _REASONS_FIRST,
        "test_non_streaming_reasoning_tokens_e2e": _REASONS_FIRST,
    },
}
EXCLUDED = {f"{file}::{test}": reason for file, tests in _REASONS.items() for test, reason in tests.items()}
