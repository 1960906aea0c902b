"""What it takes a draft on the target's device to read prompts, spread over the tokens that are generated."""

from dataclasses import dataclass

from target_service.policy.plans import Load

FORGOTTEN_AFTER = 16  # requests: older ones say little about the length of present prompts and answers
MANY = 1024  # tokens: a part of so many says what reading takes by itself
USUAL_ANSWER = 256.0  # tokens
OUTLIER, USUAL_TOKENS = 3.0, 8192  # times the mean, once it rests on so many tokens
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
    squares: float = 0.0
    """The sum of the squares of how many tokens each request was answered with."""

    def note_read(self, seconds: float, tokens: int) -> None:
        """Take note that the draft has read `tokens` tokens for `seconds`. Far more than usual is a kernel that was
        compiled meanwhile; so was one before where it is far less.
        """
        usual = self.seconds_to_read(tokens)
        if self.tokens >= USUAL_TOKENS:
            seconds = min(seconds, OUTLIER * usual)
        if tokens >= MANY and OUTLIER * seconds < usual:
            self.seconds = self.tokens = 0.0
        kept = max(0.0, 1 - tokens / FORGOTTEN_TOKENS)
        self.seconds, self.tokens = kept * self.seconds + max(0.0, seconds), kept * self.tokens + tokens

    def note_answer(self, prompt: int, answer: int) -> None:
        """Take note of a request that has ended, with the tokens of its prompt that were read, and of its answer."""
        kept = 1 - 1 / FORGOTTEN_AFTER
        self.prompts, self.answers = kept * self.prompts + prompt, kept * self.answers + answer
        self.squares = kept * self.squares + answer * answer

    def seconds_to_read(self, tokens: int) -> float:
        """Return how long the draft takes to read `tokens` tokens; 0 until it has read any."""
        return tokens * self.seconds / self.tokens if self.tokens else 0.0

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
        brought = self.prompts / self.answers if self.answers else 0.0
        before = load.undrafted / load.tokens * load.undrafted / load.expected if load.expected else 0.0
        return load.sessions * self.seconds_to_read(1) * max(brought, before)
