"""Which of vLLM's tests are run, by file below tests/entrypoints, and which of these are not, with reasons."""

FILES = (
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_prompt_validation.py",
    "openai/models/test_models.py",
    "openai/test_chunked_prompt.py",
)

EXCLUDED: dict[str, str] = {}
