"""What holds for every test: no page is looking, one thread, no window."""

from __future__ import annotations

import os

# Before NumPy or torch start their thread pools; kernels and subprocesses inherit these.
os.environ["WORKBENCH_LIVE"] = "0"
os.environ["MPLBACKEND"] = "Agg"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"
os.environ.pop("WORKBENCH_DEBUG", None)
