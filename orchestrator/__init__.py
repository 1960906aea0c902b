"""Launch, cluster, session ledger, routing and the client gateways. Holds no tensors."""
