"""The flags of `specahead evaluate tasks` and `evaluate acceptance`, declared without loading anything that is slow."""

import argparse

_URL = "http://127.0.0.1:8000"


def _add_asking(parser: argparse.ArgumentParser) -> None:
    """Declare what both commands take: the samples, the model, the file of answers."""
    parser.add_argument("--model", default="", help="default: the first one that the server lists")
    parser.add_argument("--api-key", default="", metavar="KEY", help="or SPECAHEAD_API_KEY in the environment")
    parser.add_argument("--chat", action="store_true", help="ask for chat completions; default: completions")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="of a request")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="samples that are asked at once")
    parser.add_argument("--tokenizer", required=True, metavar="MODEL", help="Hugging Face id or folder of the model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096], metavar="N", help="tokens with the answer")
    parser.add_argument("--samples", type=int, metavar="N", help="of each task and context (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--longbench", nargs="+", default=[], metavar="FILE", help="JSON lines: context, input, answers"
    )
    parser.add_argument("--json", metavar="FILE", help="rows and answers, written as they come")
    parser.add_argument("--resume", action="store_true", help="ask again for nothing that the --json file answers")
    compared = "compared with each other; without a name the field is not sent, for other servers"
    parser.add_argument("--exactness", nargs="*", default=["exact", "approximate"], metavar="NAME", help=compared)


def add_tasks_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what `evaluate tasks` takes."""
    parser.add_argument("--url", default=_URL, help="an OpenAI-style server (default: %(default)s)")
    _add_asking(parser)
    parser.add_argument("--tasks", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--text", nargs="+", default=[], metavar="FILE", help="haystacks (default: RULER's noise)")
    parser.add_argument("--plot", metavar="FILE")
    parser.set_defaults(samples=20)


def add_acceptance_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what `evaluate acceptance` takes."""
    parser.add_argument("--url", nargs="+", default=[_URL], help=f"servers; several are compared (default: {_URL})")
    _add_asking(parser)
    chosen = ["edit_code", "tool_calls", "chat"]
    parser.add_argument(
        "--tasks", nargs="*", default=chosen, metavar="NAME", help=f"generated tasks (default: {' '.join(chosen)})"
    )
    to_continue = "each a task to continue its passages (default: bundled prose and code)"
    parser.add_argument("--text", nargs="*", metavar="FILE", help=to_continue)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], metavar="X")
    parser.add_argument("--generated", type=int, default=256, metavar="N", help="tokens of an answer at most")
    parser.add_argument("--plan", metavar="FILE", help="write what exact requests accept into this plan, as a prior")
    several = parser.add_argument_group(
        "several servers, which answer by turns; the first is compared with the rest, on as many samples as that needs"
    )
    several.add_argument("--at-once", type=int, nargs="+", default=[1, 4], metavar="N", help="requests at once")
    several.add_argument("--repeats", type=int, default=2, metavar="N", help="of each row (default: %(default)s)")
    parser.set_defaults(samples=8)
