"""The policy's choice in words, from the gauges in a target's status (target_service/policy/choice.py)."""

from collections.abc import Mapping


def plan_in_words(gauges: Mapping[str, float]) -> str:
    """Return how a target makes its rounds at the moment, and the next best plan; empty for other services."""
    if "plan_gamma" not in gauges:
        return ""
    chosen = _plan(gauges["plan_gamma"], gauges["plan_sparse"], gauges["plan_held"])
    expected = gauges["plan_tokens_per_second"]  # 0 before the first step
    said = f"{chosen}; {expected:,.0f} tokens a second expected" if expected else chosen
    if not (rate := gauges["runner_up_tokens_per_second"]):
        return said
    other = _plan(gauges["runner_up_gamma"], gauges["runner_up_sparse"], gauges["runner_up_held"])
    return f"{said}; next best: {other}, {rate:,.0f}"


def _plan(gamma: float, sparse: float, held: float) -> str:
    said = f"{gamma:g} proposed tokens a round" if gamma else "plain decoding"
    reads = ", approximate requests read announced blocks" if sparse else ""
    return f"{said}{reads}{f', exact requests hold up to {held:g} tokens for one dense pass' if held else ''}"
