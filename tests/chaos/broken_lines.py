"""Services without Ray: the lines between them are slow, stand still or are cut, and the gateway dies."""

import random
import time

from models import DRAFT, PLAN, TARGET
from tests.chaos.setting import Held, break_things, conclude, make_cases
from tests.chaos.traffic import Traffic
from tests.lines import Line, lines
from tests.stack import Stack, start_service, start_stack

SERVICE = ("--plan", str(PLAN), "--kv-tokens", "40000", "--threads", "1", "--port", "0")


def run(seconds: float, seed: int, clients: int) -> list[str]:
    """Return what must not be."""
    rng = random.Random(seed)
    with lines() as opened:
        target, target_address = start_service("-m", "target_service", "--model", str(TARGET), *SERVICE)
        to_target, to_serve = opened.to(target_address), opened.to(target_address)
        draft, draft_address = start_service(
            "-m", "draft_service", "--model", str(DRAFT), "--target", to_target.address, *SERVICE
        )
        gateway: list[Stack] = [_start_gateway(to_serve, draft_address)]
        try:
            cases = make_cases(gateway[0])
            traffic = Traffic(cases, lambda: (gateway[0].grpc, gateway[0].http), clients, seed)
            before = Held.by(target.pid)
            traffic.start()

            def kill_gateway() -> None:
                gateway[0].process.kill()
                gateway[0].process.wait()
                gateway[0] = _start_gateway(to_serve, draft_address)

            faults = {
                "cut the draft's line": to_target.cut,
                "cut the gateway's line": to_serve.cut,
                "slow lines": lambda: _be_slow((to_target, to_serve), rng.uniform(0.005, 0.2)),
                "a line that stands still": lambda: _stand_still(rng.choice((to_target, to_serve)), rng.uniform(1, 12)),
                "kill the gateway": kill_gateway,
            }
            try:
                count = break_things(faults, lambda: gateway[0].http, seconds, seed)
            except AssertionError as error:
                return [f"lines: {error}\n{gateway[0].output.read_text()[-3000:]}"]
            to_target.delay = to_serve.delay = 0
            return conclude("lines", traffic, count, gateway[0].http, before, target.pid)
        finally:
            gateway[0].stop()
            for process in (target, draft):
                process.kill()
                process.wait()


def _start_gateway(line: Line, draft: str) -> Stack:
    flags = ("--target-address", line.address, "--draft-address", draft, "--tool-call-parser", "hermes")
    return start_stack(*flags)


def _be_slow(slowed: tuple[Line, ...], delay: float) -> None:
    for line in slowed:
        line.delay = delay


def _stand_still(line: Line, seconds: float) -> None:
    """For up to 12 s, since the ends give each other up after 8."""
    line.still = True
    time.sleep(seconds)
    line.still = False
