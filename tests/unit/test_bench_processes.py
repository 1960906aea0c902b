"""The processes that a benchmark starts end with it, however it ends."""

import subprocess
import sys

import psutil
import pytest

from tests.client import wait_for
from tests.stack import ROOT

STARTS_ONE = """
import subprocess, sys
from specahead.lab.benchmarks.processes import children
with children() as start:
    child = start("timeit", "-n", "1", "import time; time.sleep(600)", stdout=subprocess.PIPE)
    print(child.pid, flush=True)
    {then}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them on Linux alone")
@pytest.mark.parametrize("then", ["sys.stdin.read()", "raise SystemExit(3)"])
def test_none_outlives_the_benchmark(then: str) -> None:
    """`sys.stdin.read()`: the benchmark is killed while it waits."""
    command = [sys.executable, "-c", STARTS_ONE.format(then=then)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as benchmark:
        child = psutil.Process(int(benchmark.stdout.readline()))
        if then == "sys.stdin.read()":
            wait_for(lambda: "-m" in child.cmdline(), 20, "it asked the kernel to be ended")
            benchmark.kill()
        child.wait(20)
        assert benchmark.wait(20) == (-9 if then == "sys.stdin.read()" else 3)
