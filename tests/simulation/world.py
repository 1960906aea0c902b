"""One run: its processes, clients and faults, from the start until nothing may be left of any request."""

import asyncio
from collections import Counter
from typing import Any
from unittest.mock import patch

from draft_service.drafter import Drafter
from orchestrator.sessions.generation import Frontend
from specahead.wire.session_names import name_of_client
from target_service.verifier import Verifier
from tests.simulation import oracle
from tests.simulation.clients import Client, make_requests
from tests.simulation.cluster import Cluster, wait_for
from tests.simulation.faults import Faults
from tests.simulation.loop import Log, VirtualLoop
from tests.simulation.model import ScriptedRunner
from tests.simulation.network import Network
from tests.simulation.process import Process, current_process
from tests.simulation.scenario import Scenario
from tests.simulation.seams import replaced
from tests.simulation.services import run_draft, run_gateway, run_target

_START = 30.0  # virtual seconds within which everything must have found each other
# Virtual seconds within which every request must end after the last fault, without the pauses of its client. Longer if
# all requests one after the other, with a step for each token, take longer.
_PATIENCE = 120.0
_NOTICED, _REPLACED = 10.0, 30.0  # seconds for a service that hangs (docs/reliability.md)
_UNDISTURBED = 5.0  # seconds before a stop in which nothing else may have happened to the process
_UNOWNED = 4  # seconds for which a session may run after its stream has ended
_SETTLING = 40.0  # seconds after which nothing of any request may be left


class World:
    """Owns all parts of a run.

    violations: descriptions, in the order in which they were seen. made: the Verifier, Drafter or Frontend of each
    process. accepted: names of the sessions that targets had when they ended, waiting ones included. drafters: of
    targets that run their draft themselves.
    """

    def __init__(self, scenario: Scenario, keep_log: bool = False) -> None:
        self.scenario = scenario
        self.log = Log(keep_log)
        self.loop = VirtualLoop(scenario.seed + 2, self.log)
        self.network = Network(self.loop)
        self.network.spread, self.network.window = scenario.spread, scenario.window
        self.network.repeated = scenario.repeated
        self.violations: list[str] = []
        self.made: dict[Process, Any] = {}
        self.accepted: set[str] = set()
        self.drafters: dict[Process, Drafter] = {}
        aborted: set[str] = set()
        self.clients = [Client(request, aborted) for request in make_requests(scenario)]
        self.faults = Faults(scenario, self.loop, self.network)
        self.gateways = self._cluster()
        self.launches = [self._cluster() for _ in scenario.gateways]
        self.faults.clusters = [self.gateways, *self.launches]
        self.faults.on_stop = self._watch_stopped
        self.faults.on_drain = self._drain
        self.loop.thread_seconds = self.faults.thread_seconds

    def _cluster(self) -> Cluster:
        return Cluster(self.loop, self.network, self._report_end, lambda: self.loop.random.random() < 0.5)

    def report(self, violation: str) -> None:
        """Record a violation."""
        if not self.violations:
            self.log.note(f"{self.loop.time():.6f} violation: {violation}")
        self.violations.append(f"event {self.log.length}, at {self.loop.time():.3f} s: {violation}")

    def _report_end(self, name: str, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if not ("failed in a row" in str(error) and "InjectedError" in str(error)):
            self.report(f"{name} ended with {error!r}")

    @property
    def processes(self) -> dict[str, Process]:
        """All processes that run or will be started again, by name."""
        clusters = (self.gateways, *self.launches)
        return {name: process for cluster in clusters for name, process in cluster.processes.items()}

    # Starting.

    def _place(self) -> None:
        scenario = self.scenario
        services: list[list[str]] = [[] for _ in scenario.gateways]
        for side, count in (("target", scenario.targets), ("draft", scenario.draft_services)):
            for index in range(count):
                services[index % len(services)].append(f"{side}-{index}")
        for launch, names in zip(self.launches, services, strict=True):
            for name in names:
                launch.place(name, lambda name=name: self._run_service(name))
        for index, names in enumerate(services):
            self.gateways.place(f"gateway-{index}", lambda index=index, names=names: self._run_gateway(index, names))

    async def _run_service(self, name: str) -> None:
        scenario = self.scenario
        if name.startswith("draft"):
            await run_draft(name, scenario, self._runner(name, scenario.draft_pages, scenario.draft_errs), self._keep)
            return
        draft = None
        if scenario.draft_in_target:
            draft = self._runner(name, scenario.draft_pages, scenario.draft_errs)
        target = self._runner(name, scenario.target_pages, scenario.draft_errs)
        await run_target(name, scenario, target, draft, self._keep_drafter)

    def _runner(self, name: str, pages: int, errs: int) -> ScriptedRunner:
        """Return a model for the process of this name."""
        runner = ScriptedRunner(pages, errs, self.report, lambda: self.faults.before_step(name))
        runner.is_sick = lambda: self.faults.is_sick(name)
        runner.chains_steps = runner.chains_rounds = self.scenario.goes_ahead
        runner.beside = 3  # alternatives, always right, where a step runs behind rounds
        return runner

    def _keep_drafter(self, drafter: Drafter) -> None:
        process = current_process()
        assert process is not None
        self.drafters[process] = drafter

    async def _run_gateway(self, index: int, services: list[str]) -> None:
        name, targets = f"gateway-{index}", self.scenario.targets_of(index)
        await run_gateway(name, targets, self.scenario, services, self.launches[index], self._keep)

    def _keep(self, made: Any) -> None:
        process = current_process()
        assert process is not None
        self.made[process] = made
        if isinstance(made, Verifier):
            process.at_end.append(lambda error: self._note_accepted(made))

    def _note_accepted(self, target: Verifier) -> None:
        self.accepted.update(name_of_client(session.id) for session in target.admission.everyone())

    def _drain(self, process: Process, draining: bool) -> None:
        if isinstance(verifier := self.made.get(process), Verifier):
            verifier.admission.draining = draining

    # Processes that hang.

    def _watch_stopped(self, process: Process) -> None:
        """Check later that a stopped service was noticed and replaced by all that no other fault disturbed."""
        side = process.name.partition("-")[0]
        if side == "gateway":
            return
        at = self.loop.time()
        keeper = next(index for index, launch in enumerate(self.launches) if process.name in launch.processes)
        gateways = range(len(self.scenario.gateways))
        routers = [index for index in gateways if process.name in self.scenario.targets_of(index)]

        def is_undisturbed(gateway: int) -> bool:
            names = {f"gateway-{gateway}", process.name}
            return process.stopped and self.faults.count(names, at - _UNDISTURBED, self.loop.time()) == 1

        def check_noticed() -> None:
            for gateway in filter(is_undisturbed, routers):
                frontend = self.made[self.gateways.processes[f"gateway-{gateway}"]]
                if frontend.router.targets[process.name].connected:
                    self.report(f"gateway-{gateway} believes that {process.name}, stopped at {at:.3f} s, is connected")

        def check_replaced() -> None:
            if is_undisturbed(keeper):
                self.report(f"{process.name} was stopped at {at:.3f} s and is not replaced")

        self.loop.call_outside(at + _NOTICED, check_noticed)
        self.loop.call_outside(at + _REPLACED, check_replaced)

    # Running.

    def run(self) -> None:
        """Run to the end. `violations` then has what was wrong."""

        def keep(*args: Any, **options: Any) -> Verifier:
            made = Verifier(*args, **options)
            self._keep(made)
            return made

        with replaced(self.loop, self.network), patch("target_service.service.Verifier", keep):
            try:
                self.loop.run(self._run())
            finally:
                self._end()
        self._check()

    def _end(self) -> None:
        """End all processes, and let Python free their tasks."""

        async def end() -> None:
            for cluster in (self.gateways, *self.launches):
                cluster.is_up = False
                for process in cluster.processes.values():
                    process.end()
            await asyncio.sleep(3)

        self.loop.run(end())

    async def _run(self) -> None:
        self._place()
        if not await wait_for(self._is_connected, _START):
            self.report("the processes do not find each other")
            return
        at_rest = await self._count_tasks()
        watch = asyncio.create_task(self._watch_sessions())
        clients = [asyncio.create_task(client.run()) for client in self.clients]
        await self.faults.happen()
        tokens = sum(client.request.max_tokens * client.request.choices for client in self.clients)
        patience = max(_PATIENCE, tokens * self.scenario.step_seconds)
        await asyncio.gather(*(_wait_for_end(*each, patience) for each in zip(self.clients, clients, strict=True)))
        for client, task in zip(self.clients, clients, strict=True):
            if not task.done():
                self.report(f"client {client.request.name} has no end after {patience} s: {client.got}")
                task.cancel()
            elif (error := task.exception()) is not None:
                self.report(f"client {client.request.name}: {error!r}")
        if not await wait_for(lambda: self._is_connected() and not self._left_over(at_rest), _SETTLING):
            for left in self._left_over(at_rest) or ["the processes do not find each other again"]:
                self.report(left)
        watch.cancel()

    async def _watch_sessions(self) -> None:
        """Report sessions that run without an owner. The end of a stream takes at most a second."""
        seen = Counter[tuple[str, str]]()
        while True:
            await asyncio.sleep(1.0)
            seen = Counter({each: seen[each] + 1 for each in oracle.unowned_sessions(self.processes, self.made)})
            for (target, session), times in seen.items():
                if times == _UNOWNED:
                    self.report(f"{target} has run {session} for {times} s after its stream ended")

    def _is_connected(self) -> bool:
        return oracle.is_connected(self.processes.values(), self.made, self.scenario)

    async def _count_tasks(self) -> dict[str, int]:
        """Return how many tasks each process has without requests. Some come and go, so the least number counts."""
        counts: list[dict[str, int]] = []
        for _ in range(6):
            counts.append({name: len(process.running) for name, process in self.processes.items()})
            await asyncio.sleep(0.07)
        return {name: min(count[name] for count in counts) for name in counts[0]}

    def _left_over(self, at_rest: dict[str, int]) -> list[str]:
        left_over = [
            left
            for name, process in self.processes.items()
            for made in (self.made.get(process), self.drafters.get(process))
            for left in oracle.left_over(process, made, at_rest[name])
        ]
        return left_over + list(oracle.wrong_views(self.processes, self.made))

    def _check(self) -> None:
        """Report what is wrong at the end of the run."""
        verifiers = [made for made in self.made.values() if isinstance(made, Verifier)]
        frontends = [made for made in self.made.values() if isinstance(made, Frontend)]
        for violation in (
            *(violation for client in self.clients for violation in client.violations),
            *oracle.refused_after_all(self.clients, self.accepted),
            *oracle.wrong_outcomes(self.clients, self.faults, self.scenario),
            *oracle.wrong_counters(self.clients, frontends, verifiers),
            *oracle.useless_drafts(self.clients, verifiers, self.scenario),
            *self.loop.errors,
        ):
            self.report(violation)

    # The report.

    @property
    def coverage(self) -> Counter[str]:
        """How often each situation of the protocol occurred, by name."""
        found = Counter(self.network.counters)
        for process, made in self.made.items():
            counters = made.router.ledger.counters if isinstance(made, Frontend) else made.counters
            found.update({f"{process.name.partition('-')[0]}: {name}": count for name, count in counters.items()})
        for drafter in self.drafters.values():
            found.update({f"draft in target: {name}": count for name, count in drafter.counters.items()})
        found.update(f"client: {client.outcome}" for client in self.clients)
        return found


async def _wait_for_end(client: Client, task: asyncio.Task[None], patience: float) -> None:
    """Wait for the end of a client, at most `patience` seconds beyond its own pauses."""
    while patience > 0 and not task.done():
        paused = client.paused
        await asyncio.wait([task], timeout=patience)
        patience = client.paused - paused
