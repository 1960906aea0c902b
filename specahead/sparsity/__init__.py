"""Which KV blocks matter: selections, policies, the draft-to-target head map, calibration, the plan file."""
