"""Making a plan for a pair of models from text: where both look, block by block, at sampled rounds."""
