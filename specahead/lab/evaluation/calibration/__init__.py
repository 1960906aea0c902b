"""Making a plan for a pair of models from text: where both look, block by block, at sampled rounds."""

from specahead.lab.evaluation.calibration.counting import calibrate
from specahead.lab.evaluation.calibration.files import calibrate_files
from specahead.lab.evaluation.calibration.plans import to_plan
from specahead.lab.evaluation.calibration.sums import CalibrationSettings, CalibrationSums, load_progress, save_progress

__all__ = [
    "CalibrationSettings",
    "CalibrationSums",
    "calibrate",
    "calibrate_files",
    "load_progress",
    "save_progress",
    "to_plan",
]
