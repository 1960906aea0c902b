"""From logits to tokens: sampling, rules that change logits, and the verdicts on drafted tokens."""
