"""A process that parses a large body of JSON for a gateway, whose event loop it would hold up.

Run by `http_requests`. It reads JSON and writes what it says in the form of `marshal`, or ends with status
INVALID and the reason.
"""

import marshal
import sys

from pydantic_core import from_json

INVALID = 3


def main() -> int:
    try:
        value = from_json(sys.stdin.buffer.read())
    except ValueError as error:
        sys.stderr.write(str(error))
        return INVALID
    sys.stdout.buffer.write(marshal.dumps(value))
    return 0


if __name__ == "__main__":
    sys.exit(main())
