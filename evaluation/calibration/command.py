"""`specahead calibrate`: make a plan for a pair of models."""

import argparse
from pathlib import Path

from evaluation.calibration.files import calibrate_files
from evaluation.calibration.plans import overlap_shares
from evaluation.calibration.sums import CalibrationSettings
from evaluation.plans import save_plan
from evaluation.plots import plot_maps, plot_prunable
from evaluation.run import add_pair


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `run` takes."""
    default = CalibrationSettings()
    add_pair(parser, required=True)
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--out", required=True, metavar="PLAN.JSON")
    parser.add_argument("--passages", type=int, default=3, help="passages read of each file, evenly spread")
    parser.add_argument("--gamma", type=int, default=4, help="tokens drafted a round; a sample is gamma + 1 queries")
    for name, text in (
        ("context", "tokens read of each passage"),
        ("stride", "tokens between samples"),
        ("skipped", "leading tokens without samples"),
        ("block_size", None),
        ("group_size", "tokens whose means stand in for unread blocks"),
        ("sink_blocks", None),
        ("window_blocks", None),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name), help=text)
    parser.add_argument(
        "--budget", type=float, default=default.budget, help="share of the KV that approximate reads by default"
    )
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[], help="target layers that read everything")
    parser.add_argument("--plots", metavar="DIR", help="draw the head and layer maps and the prunable share by layer")


def run(flags: argparse.Namespace) -> None:
    """Write the plan, draw its maps if asked for, and print where they lie. Raises ValueError for unfit settings."""
    settings = CalibrationSettings(
        context=flags.context,
        stride=flags.stride,
        skipped=flags.skipped,
        queries=flags.gamma + 1,
        block_size=flags.block_size,
        group_size=flags.group_size,
        budget=flags.budget,
        sink_blocks=flags.sink_blocks,
        window_blocks=flags.window_blocks,
        dense_layers=tuple(flags.dense_layers),
    )
    progress = Path(f"{flags.out}.progress")
    plan, sums = calibrate_files(flags.draft, flags.target, flags.text, flags.passages, settings, progress)
    save_plan(plan, flags.out)
    print(f"{flags.out}: plan {plan.hash}, mean top-k overlap by budget {plan.provenance['mean_overlap']}")
    if flags.plots:
        folder = Path(flags.plots)
        overlap = overlap_shares(sums, settings, plan.budget).numpy()
        paths = plot_maps(plan, overlap, (sums.similarity / sums.samples).numpy(), folder)
        for path in [*paths, plot_prunable(plan, folder / "prunable.png")]:
            print(path)
