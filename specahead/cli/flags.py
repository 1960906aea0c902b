"""The flags of the commands that talk to a running server, and of small ones. Their modules are imported later."""

import argparse
from typing import Any


def add_generate_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what `generate` takes."""
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE")
    prompt.add_argument("stdin", nargs="?", choices=["-"], metavar="-", help="read the prompt from standard input")
    _add_server(parser)
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="of the answer (default: 128)")
    _add_sampling(parser)
    parser.add_argument("--stop", action="append", default=[], metavar="S", help="may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what `chat` takes."""
    _add_server(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message before the conversation")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of each answer (default: the rest of the context)")
    _add_sampling(parser)


def add_status_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what `status` takes."""
    _add_server(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def add_health_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what `health` takes."""
    parser.add_argument("address", metavar="HOST:PORT", help="of a target, a draft, or a client gRPC port")
    parser.add_argument("--timeout", type=float, default=4.0, metavar="SECONDS", help="default: 4")
    parser.add_argument("--tls-ca", default="", metavar="FILE", help="who signed its certificate (PEM), if it has one")
    parser.add_argument("--tls-cert", default="", metavar="FILE", help="what to show it, if it asks for one (PEM)")
    parser.add_argument("--tls-key", default="", metavar="FILE", help="the private key of --tls-cert (PEM)")
    parser.add_argument(
        "--tls-name", default="", metavar="HOST", help="name in its certificate; default: the address's"
    )


def add_key_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what `key` takes."""
    parser.add_argument("name", help="whose key it is, one word")
    parser.add_argument("--requests", type=int, default=0, metavar="N", help="requests at once; 0: any number")
    parser.add_argument("--tokens-per-minute", type=int, default=0, metavar="N", help="0: any number")


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="or SPECAHEAD_API_KEY in the environment")
    parser.add_argument(
        "--tls-ca", metavar="FILE", help="who signed its certificate (PEM), unless it is a public authority"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--exactness", choices=["exact", "approximate"], default="exact")


def asked_sampling(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a request that these flags give; the server decides about the others."""
    names = ("max_tokens", "temperature", "top_p", "seed", "exactness")
    return {name: value for name in names if (value := getattr(flags, name)) not in (None, "")}
