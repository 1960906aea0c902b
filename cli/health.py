"""`specahead health`: ask a service or the client endpoints for their health, as containers are probed."""

import argparse

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from wire.options import OPTIONS
from wire.tls import read_tls

_SERVING = health_pb2.HealthCheckResponse.SERVING


def run(flags: argparse.Namespace) -> None:
    """End without a word if it serves. Raises ValueError if it says that it does not, grpc.RpcError for no answer."""
    tls = read_tls(flags.tls_cert, flags.tls_key, flags.tls_ca)
    options = [*OPTIONS, *([("grpc.ssl_target_name_override", flags.tls_name)] if flags.tls_name else [])]
    if tls is None:
        channel = grpc.insecure_channel(flags.address, options)
    else:
        channel = grpc.secure_channel(flags.address, tls.channel_credentials(), options)
    with channel:
        ask = health_pb2_grpc.HealthStub(channel).Check
        answer = ask(health_pb2.HealthCheckRequest(), timeout=flags.timeout)
    if answer.status != _SERVING:
        raise ValueError(f"{flags.address} answers that it does not serve")
