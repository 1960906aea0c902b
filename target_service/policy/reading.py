"""What it takes a draft on the target's device to read prompts, spread over the tokens that are generated."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from target_service.policy.plans import Load

FORGOTTEN_AFTER = 16  # requests: older ones say little about the length of present prompts and answers
MANY = 1024  # tokens: fewer take as long as the host takes to launch their pass
USUAL_ANSWER = 256.0  # tokens
NEWEST_PARTS = 9  # parts of prompts whose median counts: kernels are compiled while some of the first ones are read


@dataclass
class DraftReading:
    """Sums over recent requests, in which older ones fade."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST_PARTS))
    """Seconds a token that the draft took for the last parts of prompts of at least MANY tokens."""
    prompts: float = 0.0
    """Tokens of prompts that the target has read for requests that have ended."""
    skippable: float = 0.0
    """Tokens of these that a draft does not read of sessions that take no announcements."""
    answers: float = 0.0
    """Tokens that were generated for these requests."""
    wholes: float = 0.0
    """Tokens that would have been without the limits of clients."""
    squares: float = 0.0
    """The sum over these requests of their generated tokens times those without the client's limit."""

    def note_read(self, seconds: float, tokens: int) -> None:
        """Take note that the draft has read a part of `tokens` tokens for `seconds`."""
        if tokens >= MANY:
            self.rates.append(max(0.0, seconds) / tokens)

    def note_answer(self, prompt: int, answer: int, was_cut: bool, skippable: int = 0) -> None:
        """Take note of a request that has ended, with the tokens of its prompt that were read, and of its answer.

        was_cut: whether the client's limit ended it: then it says only that answers may be as long. skippable: tokens
        of the prompt that a draft need not read if nothing is announced.
        """
        whole = max(answer, self.typical_answer) if was_cut else answer
        kept = 1 - 1 / FORGOTTEN_AFTER
        self.prompts, self.answers = kept * self.prompts + prompt, kept * self.answers + answer
        self.skippable = kept * self.skippable + skippable
        self.wholes, self.squares = kept * self.wholes + whole, kept * self.squares + answer * whole

    def seconds_to_read(self, tokens: int) -> float:
        """Return how long the draft takes to read `tokens` tokens; 0 until it has read a part of MANY."""
        return tokens * median(self.rates) if self.rates else 0.0

    @property
    def typical_answer(self) -> float:
        """Tokens of the answer that a generated token belongs to, on average; USUAL_ANSWER before any is known."""
        return self.squares / self.answers if self.answers else USUAL_ANSWER

    def seconds_a_token(self, load: Load) -> float:
        """Return the seconds of reading while each session of a load generates a token: of what requests bring, or of
        what the draft has to read before it can draft for these sessions, whichever is more.
        """
        if not load.sessions:
            return 0.0
        skipped = (1 - load.announcing / load.tokens) * self.skippable
        brought = (self.prompts - skipped) / self.wholes if self.wholes else 0.0
        before = load.undrafted / load.tokens * load.undrafted / load.expected if load.expected else 0.0
        return load.sessions * self.seconds_to_read(1) * max(brought, before)
