"""Where more at once no longer bring more: found behind a dip, and not claimed before it was reached."""

import pytest
from tests import records

from untax.meter.gather import Series, gather
from untax.meter.knee import Load, Point, loads
from untax.meter.record import Batch, Case


def load(**per_s):
    return Load(Series("a"), "T0", 0, tuple(Point(int(at[1:]), rate, 1.0, 10) for at, rate in per_s.items()))


@pytest.mark.parametrize(
    ("points", "knee"),
    [
        ({"n1": 10, "n8": 60, "n32": 61}, 8),
        ({"n1": 10, "n2": 9, "n8": 60}, None),  # a dip is not the end
        ({"n1": 10, "n8": 11, "n32": 11}, 1),
        ({"n1": 10, "n8": 70, "n32": 260}, None),
        ({"n1": 10, "n8": 60, "n32": 40, "n64": 20}, 8),
    ],
)
def test_the_knee(points, knee):
    assert load(**points).knee == knee


def test_rates_come_from_batches_and_leave_failures_out(tmp_path):
    one, eight = Case("namespace", tier="T0"), Case("namespace", tier="T0", concurrency=8)
    batches = [Batch("r1", eight, n, n, n == 0, "", 8, n, 2_000_000_000) for n in range(3)]  # the first is warm-up
    trials = [records.a_trial(case, n) for case in (one, eight) for n in range(4)]
    run = gather(records.write(tmp_path / "records.jsonl", [records.a_run(), *trials, *batches]))
    (found,) = loads(run)
    alone, many = found.points
    assert many.per_s == pytest.approx((7 + 6) / 4.0)
    assert alone.per_s == pytest.approx(4 / sum(trial.total_ns / 1e9 for trial in trials[:4]))
