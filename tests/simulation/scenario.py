"""The scenario that a seed gives: how many processes, their sizes, and the kinds of faults.

Each kind of fault is in some of the runs (swarm testing): it meets others, is often absent, and is sometimes alone.
"""

from dataclasses import dataclass, fields, replace
from random import Random

from specahead import models

DRAFT = str(models.DRAFT)
FAULTS = (
    *("kill target", "kill draft", "kill gateway", "stop target", "stop draft", "stop gateway"),
    *("terminate target", "terminate draft", "drain target"),
    *("cut line", "cut service line", "cut link", "stall link", "lose ray"),
    *("slow steps", "failing target steps", "failing draft steps", "hanging step", "no numbers"),
)


@dataclass(frozen=True)
class Scenario:
    """The scenario of one run.

    gateways: the targets that each gateway routes to. names: how many names clients choose from
    for their requests. faults: the kinds that may happen, `fault_count` times in all within `seconds`. step_seconds:
    the most that a model's step takes, unless it is slow.
    """

    seed: int
    targets: int
    drafts: int
    gateways: tuple[tuple[int, ...], ...]
    sessions: int
    names: int
    seconds: float
    step_seconds: float
    gamma: int
    branches: int
    ahead: bool
    target_pages: int
    draft_pages: int
    max_sessions: int
    max_queued: int
    prefill_chunk: int
    draft_errs: int
    spread: float
    window: int
    repeated: float
    resume_timeout: float
    request_timeout: float
    faults: tuple[str, ...]
    fault_count: int

    @staticmethod
    def of(seed: int, crowd: bool = False) -> "Scenario":
        """Return the scenario of a seed. crowd: it has 2 to 4 targets and 50 sessions, which few seeds have."""
        random = Random(seed)
        targets = random.choice((2, 3, 4) if crowd else (1, 1, 1, 2, 2, 3, 4))
        gateways = _gateways(random, targets)
        calm = random.random() < 0.15
        some = tuple(kind for kind in FAULTS if random.random() < 0.4)
        faults = () if calm else some if random.random() < 0.7 else (random.choice(FAULTS),)
        return Scenario(
            seed=seed,
            targets=targets,
            drafts=random.choice((1, 1, 2, 3)),
            gateways=gateways,
            sessions=50 if random.random() < 0.03 or crowd else random.choice((2, 3, 4, 4, 6, 8, 8, 12, 16)),
            names=random.choice((2, 1000, 1000)),
            seconds=random.choice((0.3, 1.0, 3.0)),
            step_seconds=random.choice((0.02, 0.02, 0.1, 0.4)),
            gamma=random.choice((1, 2, 4, 4, 6)),
            branches=random.choice((1, 1, 2, 4)),
            ahead=random.random() < 0.8,
            target_pages=random.choice((12, 40, 400)),
            draft_pages=random.choice((12, 40, 400)),
            max_sessions=random.choice((3, 16, 64)),
            max_queued=random.choice((2, 1000, 1000)),
            prefill_chunk=random.choice((8, 64, 512)),
            draft_errs=random.choice((0, 2, 4, 12, 16)),
            spread=random.choice((0.001, 0.01, 0.1)),
            window=random.choice((4, 64, 64)),
            repeated=0.0 if calm else random.choice((0.0, 0.0, 0.05)),
            resume_timeout=random.choice((4.0, 30.0)),
            request_timeout=random.choice((0.0, 0.0, 20.0)),
            faults=faults,
            fault_count=random.choice((2, 4, 8)) if len(faults) > 1 else 1,
        )

    @staticmethod
    def full(seed: int) -> "Scenario":
        """Return a scenario of a seed in which one of two targets is killed while the other one's queue is nearly
        full."""
        return replace(
            Scenario.of(seed),
            targets=2,
            drafts=1,
            gateways=((0, 1), (0, 1)),
            sessions=12,
            names=1000,
            seconds=1.0,
            step_seconds=0.1,
            target_pages=400,
            max_sessions=2,
            max_queued=4,
            repeated=0.0,
            request_timeout=0.0,
            faults=("kill target",),
            fault_count=1,
        )

    @property
    def gamma_setting(self) -> int | None:
        """What the services are told of γ: in half of the seeds they choose it, up to `gamma`."""
        return None if self.seed % 3 == 0 or self.seed % 6 == 1 else self.gamma

    @property
    def hold(self) -> int | None:
        """How many tokens of an exact session sparse attention screens, at most: in a third of the seeds any. In a
        seventh of these, and where the target chooses γ, it chooses this as well.
        """
        number = self.seed // 3 % 14
        if self.seed % 3 != 1 or self.draft != DRAFT:
            return 0
        return None if number > 11 or not self.gamma_setting else self.gamma + 1 + number

    @property
    def lookup(self) -> bool:
        """Whether the text proposes before the draft does, by guesses of model.guess_by_script."""
        return self.seed % 4 == 2 and self.draft == DRAFT and self.hold == 0

    @property
    def goes_ahead(self) -> bool:
        """Whether targets launch steps of plain decoding ahead, as on a GPU."""
        return self.seed // 3 % 2 == 0

    @property
    def draft_in_target(self) -> bool:
        """Whether each target runs its draft itself, as in a fifth of the seeds, without draft services."""
        return self.seed % 5 == 4

    @property
    def draft(self) -> str:
        """What proposes, as --draft says: in a fifth of the seeds the targets themselves, and there are no drafts."""
        return ("self", "auto", "lookup", "self")[self.seed // 5 % 4] if self.seed % 5 == 3 else DRAFT

    @property
    def draft_services(self) -> int:
        """The number of draft services."""
        return self.drafts if self.draft == DRAFT and not self.draft_in_target else 0

    def targets_of(self, gateway: int) -> list[str]:
        """Return the names of the targets that a gateway routes to."""
        return [f"target-{target}" for target in self.gateways[gateway]]

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))


def _gateways(random: Random, targets: int) -> tuple[tuple[int, ...], ...]:
    """Return the targets of each gateway: all of them, some, or one; each target is somebody's."""
    everything = tuple(range(targets))
    if random.random() < 0.5:  # a cluster, with one gateway or more
        return (everything,) * random.choice((1, 1, 2))
    some = [(target,) for target in random.choices(everything, k=random.random() < 0.4)]
    return (*((target,) for target in everything), *some)
