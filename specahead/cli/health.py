"""`specahead health`: ask a service or the client endpoints for their health, as containers are probed."""

import argparse

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specahead.wire.access import open_channel
from specahead.wire.tls import read_tls


def run(flags: argparse.Namespace) -> None:
    """End without a word if it serves. Raises ValueError if it says that it does not, OSError for no answer."""
    tls = read_tls(flags.tls_cert, flags.tls_key, flags.tls_ca)
    with open_channel(flags.address, tls, flags.tls_name) as channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        try:
            answer = ask(health_pb2.HealthCheckRequest(), timeout=flags.timeout)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
            remedy = "check that a server runs there, the port, and whether it speaks TLS (--tls-ca)"
            raise OSError(f"{reason}; {remedy}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise ValueError(f"{flags.address} answers that it does not serve")
