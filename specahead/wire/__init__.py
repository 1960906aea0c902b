"""Domain types to messages and back, the selection codec, status mapping. Knows no sessions and no models."""

import os

# gRPC reads this when it is loaded. A gateway that starts Ray again forks while it serves; gRPC's own handlers of forks
# may kill the child then before it becomes Ray's server, for which Ray waits 30 s with the interpreter's lock held.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
