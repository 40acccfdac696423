"""Published peaks of training steps on real cards, as workloads that can be traced without one.

`benchmarks/data/gpu_memory_cases.json` holds the figures with their sources. A file per family says how each source
trained; `case.py` joins the two. `cd benchmarks && python -m gpu_cases` lists them.
"""

from gpu_cases.case import Case, all_cases, is_calibration

__all__ = ["Case", "all_cases", "is_calibration"]
