"""deepchecks' train-validation suite on the data that `tests.zoo.peers` kept; it adds its alarms to each case's JSON.

    pip install deepchecks==0.19.1 "numpy<2" "pandas<2.3" scikit-learn==1.6.1 "category_encoders<2.7" "setuptools<80"
    python tests/zoo/peers_data.py build/zoo-peers

Imports nothing of the workbench: the versions that deepchecks needs are older than ours.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

import numpy as np

COLUMNS = 64


def alarms(path: Path) -> list[str]:
    """Return the conditions of the suite that fail, by the name of their check."""
    import pandas as pd
    from deepchecks.tabular import Dataset
    from deepchecks.tabular.suites import train_test_validation

    held = np.load(path)
    splits = []
    for split in ("train", "validation"):
        x, y = held[f"{split}_x"], held[f"{split}_y"]
        frame = pd.DataFrame(x[:, :COLUMNS], columns=[f"x{k}" for k in range(min(COLUMNS, x.shape[1]))])
        frame["target"] = y
        few = np.issubdtype(y.dtype, np.integer)
        kind = "multiclass" if few else "regression"
        splits.append(Dataset(frame, label="target", cat_features=[], label_type=kind))
    result = train_test_validation().run(*splits)
    failed = []
    for check in result.results:
        if any(c.category.name == "FAIL" for c in getattr(check, "conditions_results", [])):
            failed.append(type(check.check).__name__)
    return failed


def main() -> None:
    """Ask about every case that has data."""
    warnings.simplefilter("ignore")
    for path in sorted(Path(sys.argv[1]).glob("*.npz")):
        told = path.with_suffix(".json")
        found = json.loads(told.read_text())
        if "deepchecks" in found:
            continue
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                found["deepchecks"] = alarms(path)
            except Exception as error:  # a tool that raises is a result
                found["deepchecks"] = f"raised {type(error).__name__}: {str(error)[:200]}"
        told.write_text(json.dumps(found, indent=1))
        print(path.stem, found["deepchecks"], flush=True)


if __name__ == "__main__":
    main()
