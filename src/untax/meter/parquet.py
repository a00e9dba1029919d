"""Records as a Parquet file, one row for each trial, for those who work with data frames. Needs `untax[parquet]`."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from untax.core.errors import RecordError, UsageError
from untax.meter.record import METRICS, PARTS, Case, Reader, Trial

_ROWS = 50_000  # at a time: the file may be larger than memory


def write(records: Path, target: Path) -> int:
    """Write `target` from a run's file and give its number of rows. Whole or not at all."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as exc:
        raise UsageError("Parquet needs pyarrow: pip install 'untax[parquet]'") from exc
    draft = target.with_name(f".{target.name}.part")
    count = 0
    try:
        with Reader(records) as reader:
            rows = (_row(record) for record in reader if isinstance(record, Trial))
            schema = _schema(pa)
            with parquet.ParquetWriter(draft, schema) as out:
                while chunk := list(islice(rows, _ROWS)):
                    out.write_table(pa.Table.from_pylist(chunk, schema=schema))
                    count += len(chunk)
        os.replace(draft, target)
    except OSError as exc:
        raise RecordError(f"{target}: {exc.strerror or exc}; the records themselves are in {records}") from exc
    finally:
        draft.unlink(missing_ok=True)
    return count


def _row(trial: Trial) -> dict[str, Any]:
    return {
        "run": trial.run,
        **{name: getattr(trial.case, name) for name in Case.__dataclass_fields__},
        **{name: getattr(trial, name) for name in _PLAIN},
        "error_type": trial.error["type"] if trial.error else None,
        "error_message": trial.error["message"] if trial.error else None,
        **{f"{part}_ns": trial.parts_ns[part] for part in PARTS},
        **{f"metric_{name}_ns": trial.metrics_ns.get(name) for name in METRICS},
    }


_PLAIN = (
    "trial",
    "order",
    "warmup",
    "started_at",
    "outcome",
    "total_ns",
    "actions",
    "attempts",
    "wasted_ns",
    "control_plane_ns",
    "setup_own_ns",
)


def _schema(pyarrow: Any) -> Any:
    text, number, flag = pyarrow.string(), pyarrow.int64(), pyarrow.bool_()
    kinds: dict[str, Any] = dict.fromkeys(("run", "substrate", "path", "warmth", "tier"), text)
    kinds |= {"length": number, "concurrency": number, "image": text, "contention": text}
    kinds |= dict.fromkeys(_PLAIN, number) | {"warmup": flag, "started_at": text, "outcome": text}
    kinds |= {"error_type": text, "error_message": text}
    kinds |= {f"{part}_ns": number for part in PARTS} | {f"metric_{name}_ns": number for name in METRICS}
    return pyarrow.schema(list(kinds.items()))
