"""``vime trace stats``: dwell times, reasons, stalls and lags in numbers."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from vime.fsm.stats import Stats, Summary, stats
from vime.fsm.text import clean, count, duration
from vime.trace_cli import common


def setup(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``vime trace stats``."""
    common.add_file(parser)
    common.add_json(parser)
    common.add_filters(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the numbers."""
    trace = common.open_trace(args.file)
    numbers = stats(trace, common.filter_of(args))
    common.tell_problems(trace)
    if args.json:
        _write_json(numbers)
    else:
        _print(numbers)
    return common.OK


def _write_json(numbers: Stats) -> None:
    def summary(values: Summary | None) -> dict[str, float] | None:
        return None if values is None else asdict(values)

    common.write_json(
        {
            "records": numbers.num_records,
            "rejected": numbers.num_rejected,
            "span_s": numbers.span_s(),
            "ends": numbers.ends,
            "dwell_s": [
                {"machine": machine, "state": state, **asdict(dwell)}
                for machine, state, dwell in numbers.states()
            ],
            "reasons": [
                {"machine": machine, "reason": reason, "count": number}
                for (machine, reason), number in sorted(numbers.reasons.items())
            ],
            "stall_s": summary(Summary.of(numbers.stall_s)),
            "lag_steps": summary(Summary.of(numbers.lag_steps)),
            "duration_s": summary(Summary.of(numbers.duration_s)),
        }
    )


def _print(numbers: Stats) -> None:
    from vime.fsm.render import plain_table

    out = common.console()
    ends = ", ".join(f"{number} {clean(state, 40)}" for state, number in numbers.ends.items())
    rejected = f"; {count(numbers.num_rejected, 'illegal trigger')} refused"
    out.print(
        f"{count(numbers.num_records, 'record')} over {duration(numbers.span_s() * 1e9)}"
        f"{'; points: ' + ends if ends else ''}{rejected if numbers.num_rejected else ''}"
    )
    rows = [
        [clean(machine, 20), clean(state, 40), *_cells(dwell, 1e9)]
        for machine, state, dwell in numbers.states()
    ]
    for name, values in (("stall", numbers.stall_s), ("duration", numbers.duration_s)):
        if summary := Summary.of(values):
            rows.append(["point", f"({name})", *_cells(summary, 1e9)])
    if lag := Summary.of(numbers.lag_steps):
        rows.append(["point", "(lag in steps)", *_cells(lag, None)])
    if rows:
        out.print()
        heads = ("machine", "state", "count", "p50", "p90", "p99", "max")
        common.print_table(out, plain_table(heads, rows, right=range(2, 7)))
    if numbers.reasons:
        out.print()
        reasons = sorted(numbers.reasons.items(), key=lambda item: (-item[1], item[0]))
        rows = [[clean(machine, 20), clean(why, 60), str(n)] for (machine, why), n in reasons]
        common.print_table(out, plain_table(("machine", "reason", "records"), rows, right=[2]))


def _cells(summary: Summary, unit_ns: float | None) -> list[str]:
    values = (summary.p50, summary.p90, summary.p99, summary.max)
    if unit_ns is None:
        return [str(summary.count), *(f"{value:g}" for value in values)]
    return [str(summary.count), *(duration(value * unit_ns) for value in values)]
