"""Services without Ray, which this module starts again: they are killed and stopped, the lines between them are slow,
stand still or are cut, and the gateway dies."""

import contextlib
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from specahead.models import DRAFT, TARGET
from tests.chaos.setting import DRAFTS, EACH, TARGETS, Held, Outcome, Pace, break_things, grown, make_cases
from tests.chaos.traffic import Traffic
from tests.lines import Line, lines
from tests.plans import sparse_plan_file
from tests.stack import start_service, start_stack

SHARED = ("--plan", sparse_plan_file(), "--kv-tokens", "40000")
STILL_SECONDS = 1.0, 12.0  # the ends of a line give each other up after 8


def _lasting_port() -> int:
    """Return a free port below the range from which connections get theirs, so that it stays free between two
    starts."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Service:
    """A process that starts again on the same port after it is killed."""

    def __init__(self, module: str, *flags: str) -> None:
        port = _lasting_port()
        self._command = ("-m", module, *flags, *SHARED, "--port", str(port))
        self.address = f"127.0.0.1:{port}"
        self._start()

    def _start(self) -> None:
        self.process, _ = start_service(*self._command)
        self._restart: threading.Thread | None = None

    def kill(self) -> bool:
        """Kill the process and start it again. Return whether it was running."""
        if self._restart is not None:
            return False
        self._restart = threading.Thread(target=self._start)
        self.process.kill()
        self.process.wait()
        self._restart.start()
        return True

    def stop(self, seconds: float) -> bool:
        """Stop the process for this time. Return whether it was running."""
        if self._restart is not None:
            return False
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)
        return True

    def end(self) -> None:
        if self._restart is not None:
            self._restart.join()
        self.process.kill()
        self.process.wait()


class Gateway:
    """Client endpoints that start again after they are killed. stack: the running launch."""

    def __init__(self, flags: tuple[str, ...], patience: float) -> None:
        self._flags, self._patience = flags, patience
        self.stack = start_stack(*flags, patience=patience)

    def kill(self) -> None:
        self.stack.process.kill()
        self.stack.process.wait()
        self.stack = start_stack(*self._flags, patience=self._patience)

    def end(self) -> None:
        self.stack.stop()


@dataclass(frozen=True)
class World:
    """All that can break. of_drafts, of_gateway: the lines from drafts and gateway to the targets."""

    services: dict[str, Service]
    gateway: Gateway
    of_drafts: list[Line]
    of_gateway: list[Line]


def run(pace: Pace, seed: int, clients: int) -> Outcome:
    """Run the part and return its outcome."""
    with lines() as opened, contextlib.ExitStack() as ends:

        def start(module: str, *flags: str) -> Service:
            service = Service(module, *flags)
            ends.callback(service.end)
            return service

        targets = [start("target_service", "--model", str(TARGET)) for _ in range(EACH)]
        of_drafts, drafts = [], []
        for _ in range(EACH):
            own = [opened.to(target.address) for target in targets]
            dialled = [word for line in own for word in ("--target", line.address)]
            drafts.append(start("draft_service", "--model", str(DRAFT), *dialled))
            of_drafts += own
        of_gateway = [opened.to(target.address) for target in targets]
        flags = ("--target-address", ",".join(line.address for line in of_gateway), "--tool-call-parser", "hermes")
        flags += ("--plan", sparse_plan_file())
        gateway = Gateway((*flags, "--draft-address", ",".join(draft.address for draft in drafts)), pace.recovery)
        ends.callback(gateway.end)
        services = dict(zip((*TARGETS, *DRAFTS), (*targets, *drafts), strict=True))
        return _break(World(services, gateway, of_drafts, of_gateway), pace, seed, clients)


def _break(world: World, pace: Pace, seed: int, clients: int) -> Outcome:
    """Break the world. With an odd seed the first target is spared, and must hold no more at the end than at first."""
    gateway, spared = world.gateway, world.services[TARGETS[0]] if seed % 2 else None
    traffic = Traffic(make_cases(gateway.stack), lambda: (gateway.stack.grpc, gateway.stack.http), clients, seed)
    before = Held.by(spared.process.pid) if spared else None
    traffic.start()
    faults = _faults(world, spared, random.Random(seed))
    outcome = break_things("services", faults, traffic, lambda: gateway.stack, pace, seed, lambda: _be_fast(world))
    if spared and before:
        outcome.violations.extend(grown("services", before, spared.process.pid))
    return outcome


def _be_fast(world: World) -> None:
    for line in (*world.of_drafts, *world.of_gateway):
        line.delay = 0


def _faults(world: World, spared: Service | None, rng: random.Random) -> dict[str, Callable[[], bool]]:
    every = [*world.of_drafts, *world.of_gateway]

    def be_slow() -> None:
        delay = rng.uniform(0.005, 0.2)
        for line in every:
            line.delay = delay

    def stand_still() -> None:
        line = rng.choice(every)
        line.still = True
        time.sleep(rng.uniform(*STILL_SECONDS))
        line.still = False

    always: dict[str, Callable[[], None]] = {
        "cut a draft's line": lambda: rng.choice(world.of_drafts).cut(),
        "cut a gateway's line": lambda: rng.choice(world.of_gateway).cut(),
        "slow lines": be_slow,
        "a line that stands still": stand_still,
        "kill the gateway": world.gateway.kill,
    }
    faults: dict[str, Callable[[], bool]] = {name: lambda act=act: act() is None for name, act in always.items()}
    for name, service in world.services.items():
        if service is not spared:
            faults[f"kill {name}"] = faults[f"kill {name} again"] = service.kill
    faults["stop a service"] = lambda: rng.choice([*world.services.values()]).stop(rng.uniform(*STILL_SECONDS))
    return faults
