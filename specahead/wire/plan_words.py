"""The policy's choice in words, from the gauges in a target's status (target_service/policy/choice.py)."""

from collections.abc import Mapping

from specahead.wire.messages import Proposer

_WHO = {
    Proposer.LOOKUP: "the text itself proposes",
    Proposer.SELF: "the target's own sparse attention proposes",
    Proposer.DRAFT: "the draft model proposes",
}


def plan_in_words(gauges: Mapping[str, float]) -> str:
    """Return how a target makes its rounds at the moment, and the next best plan; empty for other services."""
    if "plan_gamma" not in gauges:
        return ""
    chosen = _plan(gauges, "plan")
    expected = gauges["plan_tokens_per_second"]  # 0 before the first step
    said = f"{chosen}; {expected:,.0f} tokens a second expected" if expected else chosen
    if not (rate := gauges["runner_up_tokens_per_second"]):
        return said
    other = _plan(gauges, "runner_up")
    return f"{said}; next best: {other}, {rate:,.0f}"


def _plan(gauges: Mapping[str, float], which: str) -> str:
    gamma, held = gauges[f"{which}_gamma"], gauges[f"{which}_held"]
    if not gamma:
        return "plain decoding"
    said = f"{_WHO[Proposer(int(gauges[f'{which}_proposer']))]} {gamma:g} token{'s' if gamma > 1 else ''} a round"
    reads = ", approximate requests read announced blocks" if gauges[f"{which}_sparse"] else ""
    return f"{said}{reads}{f', exact requests hold up to {held:g} tokens for one dense pass' if held else ''}"
