"""Serving with a draft that announces KV blocks and a target that verifies: what its services share."""
