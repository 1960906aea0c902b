"""What it takes a draft on the target's device to read prompts, spread over the tokens that are generated."""

from dataclasses import dataclass

FORGOTTEN_AFTER = 16  # requests: older ones say little about the length of present prompts and answers
FORGOTTEN_TOKENS = 65_536  # tokens that the draft has read: older ones say little about how long it takes


@dataclass
class DraftReading:
    """Sums over recent requests, in which older ones fade."""

    seconds: float = 0.0
    """How long the draft took to read `tokens` tokens of prompts."""
    tokens: float = 0.0
    """Tokens of prompts that the draft has read."""
    prompts: float = 0.0
    """Tokens of prompts that the target has read for requests that have ended."""
    answers: float = 0.0
    """Tokens that were generated for these requests."""

    def note_read(self, seconds: float, tokens: int) -> None:
        """Take note that the draft has read `tokens` tokens for `seconds`."""
        kept = max(0.0, 1 - tokens / FORGOTTEN_TOKENS)
        self.seconds, self.tokens = kept * self.seconds + max(0.0, seconds), kept * self.tokens + tokens

    def note_answer(self, prompt: int, answer: int) -> None:
        """Take note of a request that has ended, with the tokens of its prompt that were read, and of its answer."""
        kept = 1 - 1 / FORGOTTEN_AFTER
        self.prompts, self.answers = kept * self.prompts + prompt, kept * self.answers + answer

    def seconds_to_read(self, tokens: int) -> float:
        """Return how long the draft takes to read `tokens` tokens; 0 until it has read any."""
        return tokens * self.seconds / self.tokens if self.tokens else 0.0

    @property
    def seconds_a_token(self) -> float:
        """Seconds of reading for each generated token; 0 until a request has ended."""
        return self.seconds_to_read(1) * self.prompts / self.answers if self.answers else 0.0
