"""The flags of `specahead evaluate` and `calibrate`. They are declared apart from what they are for, so that neither
--help nor completion loads torch."""

import argparse

from specahead import models
from specahead.config.speculation import KV_CACHE_DTYPES, QUANTIZATIONS


def _add_pair(parser: argparse.ArgumentParser, required: bool) -> None:
    """Declare --target and --draft, which are the bundled pair where they may be left out."""
    for name, default in (("--target", models.TARGET), ("--draft", models.DRAFT)):
        text = "Hugging Face id or folder" + ("" if required else " (default: the bundled model)")
        parser.add_argument(name, required=required, default=str(default), help=text)


def add_calibrate_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what `calibrate` takes. Those without a default here have the one of CalibrationSettings."""
    _add_pair(parser, required=True)
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--out", required=True, metavar="PLAN.JSON")
    parser.add_argument("--passages", type=int, default=3, help="passages read of each file, evenly spread")
    parser.add_argument("--gamma", type=int, default=4, help="tokens drafted a round; a sample is gamma + 1 queries")
    parser.add_argument("--context", type=int, help="tokens read of each passage (default: 4096)")
    parser.add_argument("--skipped", type=int, help="leading tokens without samples (default: 1024)")
    parser.add_argument(
        "--least-tokens", type=int, help="tokens that approximate reads at least, whatever the budget (default: 1024)"
    )
    parser.add_argument("--budget", type=float, help="share of the KV that approximate reads by default (default: 0.1)")
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[], help="target layers that read everything")


EVALUATIONS = {
    "perplexity": "what sparse verification costs in perplexity, by method and budget",
    "recall": "whether hidden keys are recalled, by method and budget",
    "copy": "how well code and random tokens are copied, by method and budget",
    "drafts": "what a draft may leave unread",
    "self": "what a target accepts that drafts for itself",
    "identity": "whether all ways of serving give the same tokens",
}


def add_evaluate_flags(task: str, parser: argparse.ArgumentParser) -> None:
    """Declare what `evaluate TASK` takes; task: one of EVALUATIONS, which load the models themselves."""
    parser.set_defaults(task=task)
    _add_pair(parser, required=False)
    parser.add_argument("--plan", default=str(models.PLAN), help="default: the bundled pair's")
    source = parser.add_mutually_exclusive_group()
    demo = " (default: the demo's text)" if task == "identity" else ""
    source.add_argument("--text", nargs="+", metavar="FILE", help=f"files, or ids of Hugging Face data sets{demo}")
    source.add_argument("--books", metavar="DIR", help=".txt files, those left out that the plan was calibrated on")
    context = {"drafts": 3000, "identity": 1000}.get(task, 4096)
    parser.add_argument("--context", type=int, default=context, help="tokens of each case (default: %(default)s)")
    gamma = {"drafts": 4, "identity": 4, "self": 8}.get(task, 3)
    drafted = "drafted tokens a round; γ + 1 are verified (default: %(default)s)"
    parser.add_argument("--gamma", type=int, default=gamma, help=drafted)
    if task in ("perplexity", "drafts", "self"):
        parser.add_argument("--passages", type=int, default=4 if task == "drafts" else 1, help="of each text")
    if task in ("recall", "copy", "drafts"):
        of = "in all" if task == "copy" else "of each kind"
        parser.add_argument("--cases", type=int, default=12, help=f"{of} (default: 12)")
    if task in ("drafts", "identity", "self"):
        parser.add_argument("--generated", type=int, default=64, help="tokens after each passage")
        parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    else:
        _add_method_flags(task, parser)
    if task == "self":
        parser.add_argument(
            "--draft-quantization", choices=QUANTIZATIONS, default="none", help="how drafting passes read the weights"
        )
    elif task == "identity":
        parser.add_argument("--hot", default="0.5,0.25", metavar="X,Y", help="GPU pages, of the pages of all sessions")
    else:
        parser.add_argument("--workers", type=int, default=0, help="processes; 0: one a core")


def _add_method_flags(task: str, parser: argparse.ArgumentParser) -> None:
    """Declare what the tasks take that compare methods."""
    compared, others = "streaming,quest,ahead,oracle", "also twilight, tidal, sts, specattn (default: %(default)s)"
    parser.add_argument("--methods", default=compared, metavar="A,B", help=others)
    parser.add_argument("--budgets", default="0.06,0.12", metavar="X,Y", help="shares of the KV that are read")
    if task == "perplexity":
        parser.add_argument("--prefilled", type=int, help="tokens read densely (default: all but the last 512)")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto", help="of the target's KV")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none", help="of the target's weights")
    parser.add_argument(
        "--json", nargs="?", const=True, metavar="FILE", help="rows and sums, as they come; without FILE: print rows"
    )
    parser.add_argument("--resume", action="store_true", help="measure nothing again that the --json file has")


def add_sharing_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `evaluate sharing`."""
    parser.add_argument(
        "--model", nargs="+", default=[str(models.TARGET)], help="folders or Hugging Face ids (default: the bundled)"
    )
    parser.add_argument("--text", nargs="+", metavar="FILE", default=[str(models.DEMO_TEXT)])
    parser.add_argument("--context", type=int, default=2048, help="tokens of a passage")
    parser.add_argument("--passages", type=int, default=1, help="of each text")
    parser.add_argument("--shared", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="tokens that share a choice")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    by_sizes = "measure nothing; print the operations for each byte that verifying --shared tokens reads, from sizes"
    parser.add_argument("--intensity", action="store_true", help=by_sizes)
