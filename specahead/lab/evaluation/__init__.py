"""Quality of the sparsity methods, measured through the engine's own verify path."""
