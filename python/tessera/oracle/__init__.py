"""Names the first step and tensor at which two trainings differ, with the collective that made the difference.

    python -m tessera.oracle a.py b.py

In a program, on every rank:

    with tessera.oracle.record("runs/a"):
        train()

and then `report(compare("runs/a", "runs/b"))`, where the result of `compare` has `equal`, `first` and more.
"""

from typing import Any

from tessera.oracle.comparison import Comparison, compare
from tessera.oracle.files import RecordError
from tessera.oracle.report import report

__all__ = ["Comparison", "RecordError", "Recorder", "compare", "record", "report"]


def __getattr__(name: str) -> Any:
    # Only recording needs PyTorch, whose import takes seconds.
    if name in ("record", "Recorder"):
        from tessera.oracle import recorder

        return getattr(recorder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
