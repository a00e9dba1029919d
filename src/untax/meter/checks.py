"""Reasons not to trust a result, each with what to do about it. Pure: a run in, findings out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from untax.meter import units
from untax.meter.gather import Gathered, Samples, Series, is_plain
from untax.meter.stats import difference, percentile, ratio, two_modes

Level = Literal["warn", "note"]

FEW_TRIALS = 20
"""Below, one trial in twenty is less than one trial: the p95 is the slowest."""
FEWEST_TRIALS = 5
RESOLUTION = 50
"""Durations below so many span costs are below resolution."""

_CHANCE = 0.05  # that a run without drift is said to have some
_DRIFT_SHARE = 0.05  # of the median; less is lost among the other 95 %
_DRIFT_DELTA = 0.33  # Cliff's delta from which an effect is called medium
_FEWEST_FOR_DRIFT = 15  # five in a third
_BUSY_LOAD = 0.5  # runnable tasks for each core before the run
_NAMED = 3  # cases that a finding names in its sentence
_STOLEN = 0.01  # of all processor time
_TICK_NS = 10_000_000  # what /proc/stat counts in, on every Linux that we know
_NOISY = 1.25  # p99 ÷ p50 of a probe that does the same work again and again


@dataclass(frozen=True, slots=True)
class Finding:
    """`cases` names what it is about; empty for the run as a whole."""

    name: str
    level: Level
    found: str
    remedy: str
    cases: tuple[str, ...] = ()


def check(run: Gathered) -> list[Finding]:
    """Everything that there is to say against a run, warnings first."""
    found = [finding for one in _CHECKS for finding in one(run)]
    return sorted(found, key=lambda finding: finding.level != "warn")


def below_resolution(samples: Samples, span_cost_ns: int) -> list[str]:
    """The metrics of a case whose median is not long enough for the clock and the harness."""
    least = RESOLUTION * span_cost_ns * 1e-9
    columns = {"fresh_episode": samples.total, **samples.metrics}
    return [name for name, column in columns.items() if column and percentile(column, 50) < least]


# ---- the run as a whole ----


def _is_whole(run: Gathered) -> Iterator[Finding]:
    if run.truncated:
        remedy = "go on with `untax bench --resume`; until then the trial that was being written is missing"
        yield Finding("cut off", "warn", "the last line of the file was cut off while it was written", remedy)
    if run.end is None:
        yield Finding("not complete", "warn", "the run has not come to its end", "go on with `untax bench --resume`, or read it as a part")
    for resumed in run.resumes:
        remedy = "compare with a run made in one go where the difference matters"
        yield Finding("resumed", "note", f"the run was interrupted and went on at {resumed.at}, perhaps under other conditions", remedy)


def _gaps(run: Gathered) -> Iterator[Finding]:
    by_reason: dict[str, list[str]] = {}
    for gap in run.gaps:
        samples = run.cases.get(gap.case) if gap.case else None
        missing = f", {gap.trials_missing} trials missing" if gap.trials_missing else ""
        what = f"{gap.case or gap.substrate}{f' (has {samples.n}{missing})' if samples else ''}"
        by_reason.setdefault(gap.reason, []).append(what)
    remedy = "give them more time or mend the cause, and run them again; what there is of them is shown with its n"
    for reason, cases in by_reason.items():
        more = f" and {len(cases) - _NAMED} more" if len(cases) > _NAMED else ""
        yield Finding("gap", "warn", f"{', '.join(cases[:_NAMED])}{more}: {reason}", remedy, tuple(cases))


def _noisy_host(run: Gathered) -> Iterator[Finding]:
    host = run.run.host
    cores = _number(host, "cores") or _number(host, "cpus")
    load = _load(host)
    if cores and load is not None and load > _BUSY_LOAD * cores:
        remedy = "stop what else runs, or use a machine that nobody else works on, and run again"
        yield Finding("busy host", "warn", f"the load was {load:.2f} on {cores:g} cores before the run began", remedy)
    noisy = []
    for when, facts in (("before", host), ("after", run.end.host if run.end else {})):
        probe = facts.get("noise_probe")
        if isinstance(probe, Mapping):
            median, tail = (_number(probe, f"{name}_ns") for name in ("p50", "p99"))
            if median and tail and tail > _NOISY * median:
                noisy.append(f"{tail / median:.2f} × its median {when} the run")
    if noisy:
        remedy = "look for other work, frequency scaling and a hypervisor's neighbours; read medians rather than tails until then"
        yield Finding("noisy host", "warn", f"the p99 of a probe that does the same again and again was {' and '.join(noisy)}", remedy)
    yield from _stolen(run)
    clock = host.get("clock")
    if isinstance(clock, Mapping) and clock.get("ok") is False:
        yield Finding(
            "clock", "warn", f"the clock check failed: {clock.get('reason', clock)}", "use a host with a stable clock source (tsc)"
        )


def _stolen(run: Gathered) -> Iterator[Finding]:
    """Processor time that a hypervisor gave to others, from the first line to the last."""
    if run.end is None or not run.end.wall_ns:
        return
    probes = [facts.get("noise_probe") for facts in (run.run.host, run.end.host)]
    before, after = (_number(probe, "steal_ticks") if isinstance(probe, Mapping) else None for probe in probes)
    if before is not None and after is not None:
        share = (after - before) * _TICK_NS / run.end.wall_ns / max(1.0, _number(run.run.host, "cores") or 1.0)
        if share > _STOLEN:
            remedy = "the hypervisor's other guests are busy: use a machine of your own, or read medians rather than tails"
            yield Finding("stolen time", "warn", f"{units.share(share)} of processor time went to other guests during the run", remedy)


# ---- each case ----


def _failures(run: Gathered) -> Iterator[Finding]:
    by_series: dict[Series, list[Samples]] = {}
    for samples in run.cases.values():
        if samples.failed:
            by_series.setdefault(samples.series, []).append(samples)
    for series, found in by_series.items():
        kinds = sum((one.errors for one in found), Counter[str]())
        failed, all_ = sum(one.failed for one in found), sum(one.failed + one.n for one in found)
        words = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common(3))
        example = next((one.example for one in found if one.example), "")
        said = f"; the first said “{example[:200]}”" if example else ""
        remedy = "their time is in the worker-hours and not in the latencies; mend the cause, `untax doctor` may know it"
        text = f"{series}: {failed} of {all_} trials failed in {len(found)} cases ({words}){said}"
        yield Finding("failed trials", "warn", text, remedy, tuple(f"{one.case}: {one.failed} of {one.failed + one.n}" for one in found))


def _too_few(run: Gathered) -> Iterator[Finding]:
    few = {str(one.case): one.n for one in run.cases.values() if one.n < FEW_TRIALS}
    if few:
        least = min(few.values())
        level: Level = "warn" if least < FEWEST_TRIALS else "note"
        said = f"{len(few)} of {len(run.cases)} cases have fewer than {FEW_TRIALS} good trials (the fewest: {least}); their p95 is their slowest trial"
        yield Finding("too few trials", level, said, "run more, 100 is the default: `untax bench --trials 100`", tuple(few))


def _drift(run: Gathered) -> Iterator[Finding]:
    found = {}
    long = [samples for samples in run.cases.values() if samples.n >= _FEWEST_FOR_DRIFT]
    # Of a hundred cases five would look as if they had drifted by chance alone, so the more there are, the more is asked of each.
    least_z = NormalDist().inv_cdf(1 - _CHANCE / 2 / max(1, len(long)))
    for samples in long:
        in_order = [total for _, total in sorted(zip(samples.order, samples.total, strict=True))]
        third = samples.n // 3
        change = difference(in_order[:third], in_order[-third:])
        z = abs(change.delta) / math.sqrt((2 * third + 1) / (3 * third * third))  # of the rank-sum test
        if abs(change.ratio - 1) > _DRIFT_SHARE and abs(change.delta) > _DRIFT_DELTA and z > least_z:
            found[str(samples.case)] = change.ratio
    if found:
        worst = max(found, key=lambda case: abs(found[case] - 1))
        said = f"between the first and the last third of the run, medians moved in {len(found)} cases, most in {worst}: {units.times(found[worst])}"
        remedy = (
            "something filled up, warmed up or throttled meanwhile: look at disk, temperature and caches, and run again with more warm-up"
        )
        yield Finding("drift", "warn", said, remedy, tuple(found))


def _bimodal(run: Gathered) -> Iterator[Finding]:
    found = {}
    for samples in run.cases.values():
        if modes := two_modes(samples.total):
            found[str(samples.case)] = modes
    if found:
        case, (low, high, share) = max(found.items(), key=lambda one: one[1][1] / one[1][0])
        said = f"{len(found)} cases fall into two groups of trials, for example {case}: {units.seconds(low)} and {units.seconds(high)} ({units.share(share)})"
        remedy = "two things are being measured (a cache hit and a miss, two CPUs): the median hides it, so look at figure 3 and part them"
        yield Finding("bimodal", "warn", said, remedy, tuple(found))


def _resolution(run: Gathered) -> Iterator[Finding]:
    cost = run.run.span_cost_ns
    found = {f"{one.case}: {', '.join(names)}": 1 for one in run.cases.values() if (names := below_resolution(one, cost))}
    if found:
        said = f"a span costs {units.seconds(cost * 1e-9)}; {len(found)} cases have medians under {RESOLUTION} × that"
        yield Finding("below resolution", "warn", said, "do not compare these; measure more actions in one trial", tuple(found))


def _unattributed(run: Gathered) -> Iterator[Finding]:
    found = {str(one.case): worst for one in run.cases.values() if one.n and (worst := percentile(one.unattributed, 95)) > 1}
    if found:
        case = max(found, key=lambda name: found[name])
        said = f"time that no part covers is above max(1 %, 50 µs) at p95 in {len(found)} cases, most in {case}: {units.times(found[case])} of what is allowed"
        yield Finding(
            "unattributed",
            "warn",
            said,
            "the harness was held up between two parts: use a quieter host; if it stays, report it",
            tuple(found),
        )


def _not_inside(run: Gathered) -> Iterator[Finding]:
    found = tuple(str(one.case) for one in run.cases.values() if "inside" in one.detail)
    if found:
        said = f"{len(found)} cases could not time commands inside the sandbox: their dispatch is counted as the agent's own time"
        yield Finding("not timed inside", "warn", said, "use an image that has bash 5, or the held channel", found)


def _uploaded(run: Gathered) -> Iterator[Finding]:
    found = tuple(str(one.case) for one in run.cases.values() if one.detail.get("packages") == "uploaded")
    if found:
        said = f"{len(found)} cases got the workload's packages anew in every trial, which is left out of the account"
        yield Finding("packages uploaded", "note", said, "rollouts in earnest would pay for it: use an image that has the packages", found)


def _other_name(run: Gathered) -> Iterator[Finding]:
    by_name: dict[tuple[str, str, bool], list[str]] = {}
    for one in run.cases.values():
        if one.n and one.ran_as != one.case.substrate:
            by_name.setdefault((one.case.substrate, one.ran_as, "isolation" in one.detail), []).append(str(one.case))
    for (asked, ran_as, has_boundary), cases in by_name.items():
        if has_boundary:
            said = f"{asked} ran as {ran_as} in {len(cases)} cases, with the boundary that {asked} promises"
            yield Finding("another substrate", "note", said, f"read these numbers as those of {ran_as}", tuple(cases))
            continue
        said = f"{asked} ran as {ran_as} in {len(cases)} cases: neither its speed nor its boundary is what {asked} stands for"
        remedy = f"read these numbers as those of {ran_as}, or measure on a host that has what {asked} needs (`untax doctor`)"
        yield Finding("another substrate", "warn", said, remedy, tuple(cases))


def _missed(run: Gathered) -> Iterator[Finding]:
    found = [one for one in run.cases.values() if one.missed]
    if found:
        missed, all_ = sum(one.missed for one in found), sum(one.n for one in found)
        said = f"{missed} of {all_} trials in {len(found)} cases were not served as the case says: warm ones that found no sandbox ready, or cold ones that did"
        remedy = "these cases mix two things: see `substrate_detail.missed` of their records, and run them again with fewer at once"
        yield Finding("not served as asked", "warn", said, remedy, tuple(f"{one.case}: {one.missed} of {one.n}" for one in found))


def _same_ground(run: Gathered) -> Iterator[Finding]:
    for what in ("limits", "software"):
        by_tier: dict[str, set[str]] = {}
        for samples in run.cases.values():
            if samples.n:
                by_tier.setdefault(samples.case.tier, set()).update(samples.limits if what == "limits" else samples.software)
        apart: dict[str, list[str]] = {}
        for tier, values in by_tier.items():
            if len(values) > 1:
                apart.setdefault(_apart(values), []).append(tier)
        for words, tiers in apart.items():
            said = f"{', '.join(sorted(tiers))}: substrates were measured with different {what}: {words[:300]}"
            yield Finding(f"different {what}", "note", said, "compare shapes rather than sizes, or give every substrate the same")


def _apart(values: set[str]) -> str:
    """Lists of facts, without those that all have."""
    facts = [value.split(", ") for value in sorted(values)]
    common = set.intersection(*map(set, facts))
    return "; ".join(", ".join(fact for fact in one if fact not in common) or "none" for one in facts)


# ---- what the paper found ----


@dataclass(frozen=True, slots=True)
class Narrowing:
    """Slowest ÷ fastest among the same substrates at each step of an axis."""

    axis: Literal["tier", "length"]
    series: tuple[Series, ...]
    steps: tuple[str, ...]
    gaps: tuple[float, ...]

    @property
    def narrows(self) -> bool:
        return self.gaps[-1] < self.gaps[0]


def narrowing(run: Gathered) -> list[Narrowing]:
    """How the relative gap between substrates goes with the tier, and with the length. Only what was measured throughout is compared."""
    cold = [series for series in run.series if series.warmth == "cold"]
    found = []
    axes: list[tuple[Literal["tier", "length"], list[tuple[str, str, int]]]] = [("tier", [(tier, tier, 0) for tier in run.tiers])]
    axes += [("length", [(f"{tier} × {length}", tier, length) for length in run.lengths(tier)]) for tier in run.tiers]
    for axis, steps in axes:
        everywhere = [s for s in cold if all(run.of(s, tier, length) for _, tier, length in steps)]
        if len(everywhere) < 2 or len(steps) < 2:
            continue
        gaps = []
        for _, tier, length in steps:
            medians = [percentile(samples.total, 50) for s in everywhere if (samples := run.of(s, tier, length))]
            gaps.append(ratio(max(medians), min(medians)))
        found.append(Narrowing(axis, tuple(everywhere), tuple(name for name, _, _ in steps), tuple(gaps)))
    return found


def _as_in_the_paper(run: Gathered) -> Iterator[Finding]:
    for one in narrowing(run):
        if not one.narrows:
            way = ", ".join(f"{step} {units.times(gap)}" for step, gap in zip(one.steps, one.gaps, strict=True))
            said = f"the relative gap between substrates does not narrow with the {one.axis}, as it did in the paper: {way}"
            remedy = "see figure 1 for what grows with the work: on a slower disk, network or CPU path a heavier tier widens the gap"
            yield Finding("gap does not narrow", "note", said, remedy)
    if not any(is_plain(case) for case in run.cases):
        yield Finding(
            "no plain case",
            "note",
            "every case has a further axis (concurrency, contention, image)",
            "run the plain ones too, for figures 1–6",
        )


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _load(host: Mapping[str, Any]) -> float | None:
    load = host.get("load", host.get("load_1m"))
    if isinstance(load, (list, tuple)) and load:
        load = load[0]
    return float(load) if isinstance(load, (int, float)) else None


_CHECKS: tuple[Callable[[Gathered], Iterator[Finding]], ...] = (
    _is_whole,
    _gaps,
    _noisy_host,
    _failures,
    _too_few,
    _drift,
    _bimodal,
    _resolution,
    _unattributed,
    _not_inside,
    _uploaded,
    _other_name,
    _missed,
    _same_ground,
    _as_in_the_paper,
)
