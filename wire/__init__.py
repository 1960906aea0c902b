"""Domain types to messages and back, the selection codec, status mapping. Knows no sessions and no models."""
