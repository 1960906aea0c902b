"""`specahead calibrate`: make a plan for a pair of models."""

import argparse
from pathlib import Path

from cli.pair import add_pair


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    add_pair(parser, required=True)
    parser.add_argument("--text", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--out", required=True, metavar="PLAN.JSON")
    parser.add_argument("--context", type=int, default=4096, help="tokens read of each passage")
    parser.add_argument("--passages", type=int, default=3, help="passages read of each file, evenly spread")
    parser.add_argument("--stride", type=int, default=64, help="tokens between samples")
    parser.add_argument("--skipped", type=int, default=1024, help="leading tokens without samples")
    parser.add_argument("--gamma", type=int, default=4, help="tokens drafted a round; a sample is gamma + 1 queries")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=512, help="tokens whose means stand in for unread blocks")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the KV that approximate reads by default")
    parser.add_argument("--sink-blocks", type=int, default=1)
    parser.add_argument("--window-blocks", type=int, default=4)
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[], help="target layers that read everything")
    parser.add_argument("--plots", metavar="DIR", help="draw the head and layer maps and the prunable share by layer")
    parser.set_defaults(run=_calibrate)


def _calibrate(flags: argparse.Namespace) -> None:
    # Models are imported only by the commands that run them.
    from evaluation.plots import plot_maps, plot_prunable
    from sparsity.calibration import CalibrationSettings, calibrate_files, overlap_shares
    from sparsity.plan import save_plan

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
