"""The parser of command lines: an error stands below the usage of its own command and names what was probably meant."""

import argparse
import difflib
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any

# What other servers, or earlier versions, call a setting, and its name here.
_ELSEWHERE = {
    "http_port": "port",
    "max_context": "max_model_len",
    "max_num_seqs": "max_sessions",
    "max_num_batched_tokens": "prefill_chunk",
    "model": "target",
    "speculative_model": "draft",
    "speculative_config": "speculation",
}


def did_you_mean(name: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Return ` (did you mean X?)`, or nothing if no known name is like this one. spell: gives X of a known name."""
    plain = {each.removeprefix("--").replace("-", "_"): each for each in known}
    meant = plain | {other: plain[here] for other, here in _ELSEWHERE.items() if here in plain}
    close = difflib.get_close_matches(name.removeprefix("--").partition("=")[0].replace("-", "_"), meant, 1)
    return f" (did you mean {spell(meant[close[0]])}?)" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser that refuses what it does not know itself. argparse would leave that to the parser of all commands."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Return the flags, and no other arguments, which end in an error."""
        if self._subparsers is None:  # else the flags are those of a command
            # argparse would take the value of an unknown flag for a positional argument, and complain about that.
            self._refuse([each for each in self._flags_in(args or ()) if not self._knows(each)])
        flags, unknown = super().parse_known_args(args, namespace)
        self._refuse(unknown)
        return flags, unknown

    @staticmethod
    def _flags_in(args: Iterable[str]) -> Iterator[str]:
        """Yield the long flags. One with a space is a value, such as the flags of a service that a benchmark starts."""
        before_end = takewhile(lambda each: each != "--", args)
        return (each for each in before_end if each.startswith("--") and " " not in each)

    def _knows(self, flag: str) -> bool:
        """Return whether a flag is known, also by its beginning."""
        name = flag.partition("=")[0]
        return any(known.startswith(name) for known in self._option_string_actions)

    def _refuse(self, unknown: list[str]) -> None:
        """End with an error if there are unknown arguments."""
        if unknown:
            named = [each + did_you_mean(each, self._option_string_actions) for each in unknown]
            self.error(f"unrecognized arguments: {' '.join(named)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            meant = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{meant}") from None
