#!/bin/sh
# Claude Code asks a question and gets the answer as a call of a tool: needs npx, which comes with Node.js.
# Start the server first: specahead serve
export ANTHROPIC_BASE_URL="${SPECAHEAD_URL:-http://127.0.0.1:8000}" ANTHROPIC_AUTH_TOKEN=none
export ANTHROPIC_MODEL=tiny-target ANTHROPIC_DEFAULT_HAIKU_MODEL=tiny-target
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 # asks nobody but the server

# A model that follows instructions needs neither this nor `--tools ""`. The bundled one is too small to decide for a
# call by itself, and all of Claude Code's own tools together take more than its context.
export CLAUDE_CODE_EXTRA_BODY='{"tool_choice": {"type": "any", "disable_parallel_tool_use": true}}'

schema='{"type": "object", "properties": {"calm": {"type": "boolean"}}, "required": ["calm"], "additionalProperties": false}'
npx --yes @anthropic-ai/claude-code --print "Is the sea calm?" --tools "" --json-schema "$schema" </dev/null
