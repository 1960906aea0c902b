"""`python -m tests.launch_at_node HOST FLAGS…`: a launch that joins Ray at the node with this address.

Where several nodes run on one machine, Ray would choose the head by itself.
"""

import sys
from functools import partial

import ray

from orchestrator import launch

if __name__ == "__main__":
    ray.init = partial(ray.init, _node_ip_address=sys.argv.pop(1))
    launch.main()
