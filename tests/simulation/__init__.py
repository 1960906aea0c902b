"""The control path in one process, on virtual time, over a network and processes that fail as a seed says.

What runs is the product: gateway, router, ledger, target service, draft service, supervision, and every message as its
real bytes. What is replaced lies below it: the clock and the event loop (loop.py), processes (process.py), gRPC's
channels and servers (network.py, channels.py, servers.py), Ray (cluster.py) and the models (model.py). world.py puts a
run together, faults.py says what goes wrong in it, oracle.py what must hold; `make simulate` runs seeds.
"""
