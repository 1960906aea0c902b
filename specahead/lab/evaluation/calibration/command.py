"""`specahead calibrate`: make a plan for a pair of models."""

import argparse
from dataclasses import fields
from pathlib import Path

from specahead.lab.evaluation.calibration.files import calibrate_files
from specahead.lab.evaluation.calibration.plan_report import write_report
from specahead.lab.evaluation.calibration.sums import CalibrationSettings
from specahead.lab.evaluation.plans import save_plan


def run(flags: argparse.Namespace) -> None:
    """Write the plan and its report, and print where they lie. Raises ValueError for unfit settings."""
    names = {field.name for field in fields(CalibrationSettings)} - {"dense_layers"}
    given = {name: value for name, value in vars(flags).items() if name in names and value is not None}
    settings = CalibrationSettings(queries=flags.gamma + 1, dense_layers=tuple(flags.dense_layers), **given)
    progress = Path(f"{flags.out}.progress")
    plan = calibrate_files(flags.draft, flags.target, flags.text, flags.passages, settings, progress)
    save_plan(plan, flags.out)
    page = Path(flags.out).with_suffix(".html")
    write_report(plan, page)
    print(f"{flags.out}: plan {plan.hash}\n{page}: whether it is good, and what to expect")
