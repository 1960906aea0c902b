"""Requests and their callers: models of requests, keys and limits."""
