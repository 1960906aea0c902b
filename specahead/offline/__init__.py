"""Generation from Python, without a server: `specahead.LLM`. Target and draft run in this process, without Ray."""

from specahead.offline.llm import LLM
from specahead.offline.sampling import Output, SamplingParams

__all__ = ["LLM", "Output", "SamplingParams"]
