"""A line that is cut without a word is noticed by the pings of every channel."""

import asyncio
import contextlib

import grpc
import pytest

from protos import control_pb2, control_pb2_grpc
from specahead.wire.options import OPTIONS

FASTER = 100  # times, so that the test takes less than a second


class CutLine:
    """Takes a connection and answers as a server does that has just begun to speak HTTP/2; nothing more comes."""

    async def speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")  # an empty SETTINGS frame
        with contextlib.suppress(ConnectionError):
            while await reader.read(4096):
                pass
        writer.close()


async def test_a_line_that_is_cut_is_noticed_by_its_pings() -> None:
    server = await asyncio.start_server(CutLine().speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    options = [(name, value // FASTER if name.endswith("_ms") else value) for name, value in OPTIONS]
    async with server, grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call = control_pb2_grpc.TargetControlStub(channel).Status(control_pb2.StatusRequest())
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            async with asyncio.timeout(10):
                await call
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "ping timeout" in (lost.value.details() or "")
