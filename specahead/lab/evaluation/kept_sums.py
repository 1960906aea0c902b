"""The sums of an evaluation, kept in a JSON file as they come, so that a run that is cut off can go on."""

import json
from pathlib import Path
from typing import Any

from specahead.lab.evaluation.cases import Case
from specahead.lab.evaluation.report import QualityRow
from specahead.lab.evaluation.rounds import Variant, VariantSums
from specahead.lab.results import write_json


class KeptSums:
    """Sums by the numbers of a case and a variant, and their file, which may be that of an earlier run."""

    def __init__(
        self, path: Path | None, resume: bool, settings: dict[str, Any], cases: list[Case], variants: list[Variant]
    ) -> None:
        """path: None: there is no file. resume: whether sums in the file are used again. settings: what sums depend on
        beside case, method and budget. Raises ValueError for a file of something else."""
        self._path, self._settings, self._cases, self._variants = path, settings, cases, variants
        self.by_case: list[dict[int, VariantSums]] = [{} for _ in cases]
        if path is None or not resume or not path.exists():
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            kept = {(e["case"], e["method"], e["budget"]): VariantSums(**e["sums"]) for e in content["sums"]}
            if content["settings"] != settings:
                raise ValueError(f"made with {content['settings']}, now {settings}")
        except (ValueError, TypeError, LookupError) as error:
            raise ValueError(f"{path}: not the file of such a run ({error!r}); name another --json") from None
        for case, sums in zip(cases, self.by_case, strict=True):
            keys = [(case.name, variant.name, variant.budget) for variant in variants]
            sums.update({i: kept[key] for i, key in enumerate(keys) if key in kept})

    def add(self, case: int, variant: int, sums: VariantSums) -> None:
        """Keep sums, and write the file."""
        self.by_case[case][variant] = sums
        self.save([])

    def save(self, rows: list[QualityRow]) -> None:
        """Write the file, in which rows come before the sums."""
        if self._path is None:
            return
        entries = []
        for case, by_variant in zip(self._cases, self.by_case, strict=True):
            for i, sums in sorted(by_variant.items()):
                name = {"case": case.name, "method": self._variants[i].name, "budget": self._variants[i].budget}
                entries.append(name | {"sums": sums})
        write_json(self._path, {"settings": self._settings, "rows": rows, "sums": entries})
