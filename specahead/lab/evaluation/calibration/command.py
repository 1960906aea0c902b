"""`specahead calibrate`: make a plan for a pair of models."""

import argparse
from dataclasses import fields
from pathlib import Path

from specahead.lab.evaluation.calibration.files import calibrate_files
from specahead.lab.evaluation.calibration.plans import overlap_shares
from specahead.lab.evaluation.calibration.sums import CalibrationSettings
from specahead.lab.evaluation.plans import save_plan
from specahead.lab.evaluation.plots import plot_maps, plot_prunable


def run(flags: argparse.Namespace) -> None:
    """Write the plan, draw its maps if asked for, and print where they lie. Raises ValueError for unfit settings."""
    names = {field.name for field in fields(CalibrationSettings)} - {"dense_layers"}
    given = {name: value for name, value in vars(flags).items() if name in names and value is not None}
    settings = CalibrationSettings(queries=flags.gamma + 1, dense_layers=tuple(flags.dense_layers), **given)
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
