"""The control path in one process, on virtual time, over a network and processes that fail as a seed decides.

Gateway, router, ledger, target service, draft service and supervision are the product's, and each message travels as
its real bytes. Replaced are the clock and the event loop (loop.py), processes (process.py), gRPC's channels and servers
(network.py, channels.py, servers.py), Ray (cluster.py) and the models (model.py). world.py assembles a run, faults.py
lets things go wrong, and oracle.py checks it; `make simulate` runs seeds.
"""
