"""What draft and target share to run a model. It knows nothing of gRPC or Ray.

Read it in this order: `inputs` (what a runner is given and gives), `model_runner` (which inputs run together, and how),
`pass_runner` (a pass of one shape), `shapes`, `buffers`, `layout`, `launches` and `outputs`, `layer_attention` (how
a layer attends), `decoder` (the model's own work). Beside it stand `round_runner` and `round_launches` (a draft's whole
rounds), `device_chain` (what launches leave to each other), `kv/` (where keys and values lie) and `loading/` (from a
model's name to a runner).
"""
