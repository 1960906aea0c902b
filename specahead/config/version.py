"""Which version of specahead runs."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def running_version() -> str:
    """Return the version of the installed package; of a source tree that is not installed it says just that."""
    try:
        return version("specahead")
    except PackageNotFoundError:
        return "from a source tree that is not installed"
