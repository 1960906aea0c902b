"""The bundled draft/target pair: where its folders lie. Loads nothing, so importing it costs nothing."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

TARGET = _HERE / "tiny-target"
DRAFT = _HERE / "tiny-draft"
PLAN = _HERE / "tiny-plan.json"
