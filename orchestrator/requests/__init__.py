"""What clients may ask for, and who asks: request models, keys and limits."""
