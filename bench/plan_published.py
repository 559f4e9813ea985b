"""Predicts training steps that others measured on real clusters, and prints how far off the predictions are.

    python3 bench/plan_published.py ROWS.json [--json OUT] [--tool build/release/tessera]

The schedule of a step is that of the engine, from `tessera plan --json`; the cost of kernels is that of the framework that was
measured. docs/plan_published.md describes ROWS.json, the protocol and the results.
"""

import argparse
import json
import math
import os
import pathlib
import sys

from published_rows import Problem, is_number, read_rows
from published_step import Step
from published_workload import MEGATRON, Workload

LARGE_ERROR = 0.10
MEASUREMENT_SPREAD = 0.05  # of the logarithm of a measured time, from leave-one-out errors
# Numbers that can be fitted: the spread is that of the logarithm; then the lowest and the highest value.
FITTED = {"products": (0.08, 0.45, 1), "memory": (0.12, 0.6, 1.15), "launch_s": (0.4, 3e-6, 8e-5), "overhead": (0.5, 0.1, 4), "link": (0.25, 0.05, 0.97)}
PRIOR = {"products": 0.87, "memory": 1.0, "launch_s": 12e-6, "overhead": 1.0, "link": 0.80}
METRICS = ("tokens_per_s_per_gpu", "step_time_s", "samples_per_s", "tflops_per_gpu")
NOT_MODELLED = ("tensor", "pipeline", "context parallel", "TP", "PP", "LoRA", "offload")


def prior_of(workload):
    """What is assumed of a workload's machine before any step is measured."""
    return {**PRIOR, "products": workload.device.prior, "launch_s": workload.launch_prior_s}


class Descent:
    """The parameters of highest posterior probability, by coordinate descent from the prior."""

    def __init__(self, prior, measured, names):
        self.prior, self.measured, self.names, self.best = prior, measured, names, prior
        self.cost = self.cost_of(prior)

    def cost_of(self, parameters):
        return (sum((math.log(step.seconds(parameters) / seconds) / MEASUREMENT_SPREAD) ** 2 for step, seconds in self.measured) +
                sum((math.log(parameters[name] / self.prior[name]) / FITTED[name][0]) ** 2 for name in self.names))

    def move(self, name, length):
        _, low, high = FITTED[name]
        for sign in (1, -1):
            tried = {**self.best, name: min(max(self.best[name] * math.exp(sign * length), low), high)}
            cost = self.cost_of(tried)
            if cost < self.cost - 1e-9:
                self.cost, self.best = cost, tried
                return True
        return False

    def run(self):
        lengths = {name: FITTED[name][0] / 2 for name in self.names}
        for _ in range(80):
            if any([self.move(name, lengths[name]) for name in self.names]):
                continue
            lengths = {name: length / 2 for name, length in lengths.items()}
            if max(lengths.values()) < 1e-3:
                break
        return self


def calibrate(workload, measured):
    """(parameters, the names of those that were fitted, at most three) of the machine of measured steps: (Step, seconds)."""
    prior = prior_of(workload)
    if not measured:
        return prior, ()
    choices = [("products", "memory")]
    if len(measured) > 1:
        choices = [("products", "memory", last) for last in ("overhead", "launch_s", "link")]
    best = None
    for names in choices:
        found = Descent(prior, measured, names).run()
        if best is None or found.cost < best.cost - 0.1:  # a later choice must be worth it
            best = found
    return best.best, best.names


class Candidate:
    """A row that can be predicted."""

    def __init__(self, row, step):
        self.row, self.step, w = row, step, step.workload
        tokens = w.tokens * w.microbatches
        per_step = (tokens, 1, tokens / w.seq_len * w.ranks, w.counted_flops() / 1e12)  # the metric times the seconds of a step
        self.metric, self.per_step = next((name, value) for name, value in zip(METRICS, per_step) if row.number(name) is not None)
        self.measured = row.number(self.metric)

    def value(self, seconds):
        """The metric of a step that takes so long, and the other way around."""
        return seconds if self.metric == "step_time_s" else self.per_step / seconds


def beyond(row):
    """Why a row can't be predicted, by its fields alone; empty: it may be."""
    precision, strategy = row.text("precision"), row.text("strategy")
    if row.reach == "no":
        return row.text("why") or "out of reach as marked"
    if all(row.number(name) is None for name in METRICS):
        return "no measured rate or time"
    if row.reach:
        return ""
    if "fp8" in precision:
        return "kernels of fp8 are not modelled"
    if precision.startswith("fp32"):
        return "kernels of fp32 are not modelled"
    if row.fields.get("compile") is True:
        return "compiled kernels are not modelled"
    return f"{strategy} is not modelled" if any(other in strategy for other in NOT_MODELLED) else ""


def measured_memory(row):
    """In GiB, or None."""
    for key, size in (("mem_active_gib", 1), ("mem_gib", 1), ("mem_allocated_gb", 1e9 / 2**30), ("mem_gb", 1e9 / 2**30)):
        if is_number(row.fields.get(key)):
            return row.fields[key] * size
    return None


def cause_of(candidate, step_error, calibrated):
    """The likely cause of a large error."""
    row, w = candidate.row, candidate.step.workload
    if abs(step_error) <= LARGE_ERROR:
        return ""
    if row.text("outlier"):
        return "marked as an outlier: " + row.text("outlier")
    if not calibrated:
        return "no row calibrates this machine: the software's speed is assumed"
    state_bytes, full, wide, slow_link = 16, 0.4, 8192, 50e9
    used = state_bytes * (w.root_parameters + w.layers * w.block_parameters) / w.shards / w.device.capacity
    if w.sharded and step_error < 0 and (used > full or w.width >= wide):
        return f"near the memory limit: the model's state fills {100 * used:.0f} % and units are large, so the allocator may stall"
    if w.ranks > w.ranks_per_host and step_error < 0 and w.host_rate < slow_link:
        return "slow link between hosts" + ("" if w.host_rate_stated else " whose rate is not stated")
    if w.style is MEGATRON:
        return "host and device need about the same time: which one waits is uncertain"
    return "; ".join(["details of the software that the row doesn't state", *filter(None, (row.text("why"), row.text("loc")))])


class Validation:
    """Predictions of rows, by source and cluster."""

    def __init__(self, rows, tool):
        self.rows, self.machines, self.out_of_reach, self.memory = [], [], [], []  # memory: id, predicted and stated GiB
        groups = {}
        for row in rows:
            reason = beyond(row)
            try:
                if not reason:
                    candidate = Candidate(row, Step(Workload(row), tool))
                    groups.setdefault((row.source, row.cluster), []).append(candidate)
            except Problem as problem:
                reason = str(problem)
            if reason:
                self.out_of_reach.append({"id": row.id, "reason": reason})
        for key in sorted(groups):
            self.predict(key, groups[key])

    def predict(self, key, candidates):
        measured = [(one.step, one.value(one.measured)) for one in candidates if one.row.calibrates]
        parameters, fitted = calibrate(candidates[0].step.workload, measured)
        self.machines.append({"source": key[0], "cluster": key[1], "calibrated_by": [one.row.id for one in candidates if one.row.calibrates],
                              "fitted": list(fitted), **{name: parameters[name] for name in ("products", "memory", "launch_s", "overhead", "link")}})
        for one in candidates:
            seconds = one.step.seconds(parameters)
            predicted, step_error = one.value(seconds), seconds / one.value(one.measured) - 1
            more = {"reach": one.row.reach, "outlier": one.row.text("outlier"), "cause": cause_of(one, step_error, bool(measured))}
            self.rows.append({"id": one.row.id, "measured": one.measured, "predicted": predicted, "error": abs(predicted / one.measured - 1),
                              "calibration": one.row.calibrates, "source": key[0], "metric": one.metric, "step_error": step_error,
                              **{name: text for name, text in more.items() if text}})
            memory = measured_memory(one.row)
            if memory is not None:
                self.memory.append((one.row.id, one.step.peak_bytes / 2**30, memory))

    def errors(self, source, reach):
        """Of the predicted rows of a source (None: all) with this reach that are no outliers, or None. No reach counts as yes."""
        rows = [row for row in self.rows if not row["calibration"] and "outlier" not in row and source in (None, row["source"]) and
                row.get("reach", "yes") == reach]
        errors = sorted(row["error"] for row in rows)
        if not rows:
            return None
        return {"mean_error": sum(errors) / len(errors), "p90_error": errors[math.ceil(0.9 * len(errors)) - 1], "max_error": errors[-1],
                "rows": len(errors), "median_error": errors[len(errors) // 2], "bias": sum(row["step_error"] for row in rows) / len(rows)}

    def sources(self):
        return sorted({row["source"] for row in self.rows})

    def json(self):
        by_source = {source: self.errors(source, "yes") for source in self.sources()}
        return {"rows": self.rows, "by_source": {source: errors for source, errors in by_source.items() if errors}, "fitted": self.machines,
                "out_of_reach": self.out_of_reach}

    def text(self):
        lines = ["source, cluster: fitted numbers (calibrating rows)"]
        for machine in self.machines:
            fitted = "".join(f" {name} {machine[name]:.3g}" for name in machine["fitted"]) or " none"
            lines.append(f"{machine['source']}, {machine['cluster'] or 'no cluster'}:{fitted} ({', '.join(machine['calibrated_by']) or 'no row'})")
        lines += ["", "errors in %, of rows that calibrate nothing and are no outliers; bias: of the step's time",
                  f"{'source':<18} {'reach':<8} {'rows':>4} {'mean':>6} {'median':>7} {'P90':>6} {'max':>6} {'bias':>6}"]
        for reach in ("yes", "partial"):
            for source in [*self.sources(), None]:
                e = self.errors(source, reach)
                if e:
                    lines.append(f"{source or 'all':<18} {reach:<8} {e['rows']:>4} {100 * e['mean_error']:>6.1f} {100 * e['median_error']:>7.1f} "
                                 f"{100 * e['p90_error']:>6.1f} {100 * e['max_error']:>6.1f} {100 * e['bias']:>+6.1f}")
        causes = [(row, f"  {row['id']:<40} {100 * row['step_error']:+.1f} %: {row['cause']}") for row in self.rows if "cause" in row and not row["calibration"]]
        for title, part in (("misses of more than 10 % of the step's time, with their likely cause", [line for row, line in causes if "outlier" not in row]),
                            ("outliers, which are in no figure above", [line for row, line in causes if "outlier" in row]),
                            ("memory in GiB for information: the engine's peak, and what the row states (which may include reserves)",
                             [f"  {name:<40} {ours:>6.1f} {stated:>8.1f}" for name, ours, stated in self.memory]),
                            ("out of reach, not predicted", [f"  {one['id']}: {one['reason']}" for one in self.out_of_reach])):
            lines += ["", title, *part] if part else []
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", metavar="ROWS.json")
    parser.add_argument("--json", metavar="OUT", help="write the results as JSON")
    parser.add_argument("--tool", metavar="FILE", default=pathlib.Path(__file__).resolve().parents[1] / "build/release/tessera",
                        help="the program tessera (default: build/release/tessera)")
    options = parser.parse_args()
    if not os.path.isfile(options.tool) or not os.access(options.tool, os.X_OK):
        raise Problem(f"'{options.tool}' is no program; build it with scripts/setup, or give --tool")
    if options.json and not os.access(os.path.dirname(options.json) or ".", os.W_OK):
        raise Problem(f"can't write '{options.json}': no folder, or no permission")
    validation = Validation(read_rows(options.rows), options.tool)
    print(validation.text())
    if options.json:
        try:
            pathlib.Path(options.json).write_text(json.dumps(validation.json(), indent=1) + "\n")
        except OSError as error:
            raise Problem(f"can't write '{options.json}': {error.strerror}") from None


if __name__ == "__main__":
    try:
        main()
    except Problem as problem:
        print(f"plan_published: {problem}", file=sys.stderr)
        sys.exit(2)
