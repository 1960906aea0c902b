"""`python -m tests.altered JSON MODULE FLAGS…`: run a module whose targets have other values for fields without a flag.

PATIENT: targets wait a minute for their draft, so that a busy machine, too, decodes no round plainly.
"""

import json
import runpy
import sys

from specahead.config import TargetSettings

PATIENT = '{"draft_timeout": 60.0}'

if __name__ == "__main__":
    values, module = json.loads(sys.argv.pop(1)), sys.argv.pop(1)
    defaults = TargetSettings.__init__.__kwdefaults__
    assert values.keys() <= defaults.keys()
    defaults.update(values)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
