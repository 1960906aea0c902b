"""How much a program of each kernel takes at once. None of these changes what comes out."""

LISTED = 512  # listed pages
PARTS = 2  # programs that share a list, at most
FOUND = 1024  # listed pages whose cache lines a program looks up
JOINED = 16  # programs' claims that one program joins
CLAIMS = 32  # of each of these, at once
SWEPT = 1024  # cache lines whose fate a program decides
SWEEPERS = 32  # programs that share a row's lines: all are there at once, and gone where nothing is missing


def warps_for(chunk: int) -> int:
    """Few enough that no two threads hold the same number of a chunk: so what an atomic gave is theirs alone."""
    return max(1, min(4, chunk // 128))
