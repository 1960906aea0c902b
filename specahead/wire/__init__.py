"""Domain types to messages and back, the selection codec, status mapping. Knows no sessions and no models."""

import os

# gRPC reads this when it is loaded. A gateway that starts Ray again forks while it serves. gRPC's handlers of
# forks may then kill the child before it becomes the server that Ray waits for, 30 s long and holding the lock of the
# interpreter.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
