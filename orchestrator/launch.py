"""`specahead serve` and `python -m orchestrator.launch`: place the services, open the client endpoints, serve."""

import argparse
import importlib
import logging
import os
import secrets
import sys
import threading
from dataclasses import replace

from specahead.config import Config, add_launch_flags, read_launch
from specahead.config.arguments import Parser
from specahead.config.clock import clock
from specahead.config.logs import configure_logs
from specahead.config.process import prepare_process
from specahead.wire.errors import ClusterError

log = logging.getLogger(__name__)


def with_token(config: Config) -> Config:
    """Return the settings with a token for the services that this launch starts, so that nobody else calls them."""
    if config.cluster.target_address or config.cluster.join or config.target.read_token():
        return config
    token = secrets.token_urlsafe(32)
    target, draft = replace(config.target, service_token=token), replace(config.draft, service_token=token)
    return replace(config, target=target, draft=draft)


def main() -> None:
    parser = Parser(
        prog="python -m orchestrator.launch", description="Launch draft and target services and the client endpoints."
    )
    add_launch_flags(parser)
    run(parser.parse_args())


def run(flags: argparse.Namespace) -> None:
    """Serve by the flags of `add_launch_flags`, the environment and a file, until a signal ends it.

    Errors end in one line and status 1.
    """
    prepare_process()
    # Where two services cannot start we report one; Ray would print the other one's traceback.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray's client ends its process when the raylet dies, unless the raylet's process lives, which it takes to be the
    # parent, dead if that is process 1 (nohup, systemd, a container). We restart Ray instead, so it is given ourselves.
    # It reads this at `import ray`; to its own processes Ray gives the raylet's.
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        config = with_token(read_launch(flags, os.environ))
        configure_logs(config.clients)
        _launch(config)
    except (ValueError, OSError, NotImplementedError, ClusterError) as error:
        log.debug("the launch ends", exc_info=error)
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:  # SIGINT, or SIGTERM while services are placed
        log.info("stopped by a signal before the services had started")


def _launch(config: Config) -> None:
    # Imported here, so that --help and refused settings need neither torch nor Ray.
    from orchestrator.requests.access import read_access

    access = read_access(config)
    log.info("starting", extra={"target": config.target.model, "draft": config.draft.model})
    with clock("loading"):
        import uvloop

        from orchestrator.api import endpoints
        from orchestrator.cluster.placement import placed_services
        from orchestrator.sessions.tracing import tracing
        from specahead.wire.server import check_free

    with tracing(config.clients.logging.trace_share):
        pass  # what it needs is installed, which is known before the models are loaded
    config = endpoints.resolve_context(config)
    for port in (config.clients.grpc_port, config.clients.port):
        check_free(config.clients.host, port)
    # The tokenizers' modules take seconds to import; the services start meanwhile.
    of_tokenizers = "transformers.models.auto.tokenization_auto"
    threading.Thread(target=importlib.import_module, args=(of_tokenizers,), daemon=True).start()
    with placed_services(config) as placed:
        uvloop.run(endpoints.run(config, access, *placed))


if __name__ == "__main__":
    main()
