"""From a conversation to a prompt, and from tokens to text: templates, tool calls, grammars, detokenization."""
