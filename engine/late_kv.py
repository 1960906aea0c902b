"""What may become of KV that a step needs, that lies on the host, and that nobody has announced.

A module of its own: settings are checked by command lines that load no model.
"""

LATE_KV = ("fetch", "means")
