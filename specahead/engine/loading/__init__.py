"""From a model's name to a runner with room for KV: what is loaded, how large it is, and how it is run."""
