"""From a checked request to its tokens: the ledger, the router, generation and its metrics."""
