"""The drafter and its server. Knows nothing of the target's KV."""
