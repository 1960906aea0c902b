"""The bundled draft/target pair and a text for it: where they lie. Loads nothing, so importing it costs nothing."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

TARGET = _HERE / "tiny-target"
DRAFT = _HERE / "tiny-draft"
PLAN = _HERE / "tiny-plan.json"
DEMO_TEXT = _HERE / "demo_text.txt"  # the opening of "The Wonderful Wizard of Oz", in the public domain
NATIVE_SPARSE = "native_sparse"  # model_type in the config.json of native_sparse.py; such models are never served
