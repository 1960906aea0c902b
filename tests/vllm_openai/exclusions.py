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
)

EXCLUDED: dict[str, str] = {}
