"""A session's name on a target: its client's name for it, and what makes it differ from all others."""


def name_on_target(session: str, origin: str, number: int) -> str:
    """Return the name of a session of a client where an orchestrator opens it. origin: the orchestrator's own."""
    return f"{session}@{origin}.{number}"


def name_of_client(name: str) -> str:
    """Return what the client calls the session that a target knows by this name; a name without more stays."""
    return name.rpartition("@")[0] or name
