"""What measures: quality evaluation, calibration and benchmarks. The services import none of it."""
