"""How most tests of worlds end."""

from tests.unit.world import World


def finish(world: World, *names: str) -> None:
    """Run to the end: these sessions have the tokens of plain decoding, and no session and no page is left."""
    world.run()
    for name in names:
        world.check_greedy(name)
    world.check_nothing_left()
