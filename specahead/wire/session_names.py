"""A session's name on a target: its client's name for it, and a suffix that makes it unique."""


def name_on_target(session: str, origin: str, number: int) -> str:
    """Return the name under which an orchestrator opens a client's session. origin: the orchestrator's own name."""
    return f"{session}@{origin}.{number}"


def name_of_client(name: str) -> str:
    """Return the client's name of a session from its name on a target; a name without suffix stays as it is."""
    return name.rpartition("@")[0] or name
