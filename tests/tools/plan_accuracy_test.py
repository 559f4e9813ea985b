"""tessera plan over a cluster that bench --cluster measured, against training on this machine.

    plan_accuracy_test.py TOOL

The bound leaves room for a machine that other programs use; bench/plan_accuracy.py measures how good a plan is on a
quiet one.
"""

import json
import pathlib
import statistics
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))
import plan_accuracy

TOOL = None
ROOM = 0.4
ATTEMPTS = 3


class PlanAccuracyTest(unittest.TestCase):
    def test_planned_steps_take_as_long_as_measured_ones(self):
        with tempfile.TemporaryDirectory() as folder:
            for attempt in range(ATTEMPTS):
                machine = plan_accuracy.Machine(TOOL, "shm", 2, folder, bench_options=["--iterations", 6, "--max-bytes", "1M", "--factor", 4])
                measured = machine.rounds("gpt-nano", rounds=3, steps=40)
                errors = self.errors(machine, measured)
                if max(errors) <= ROOM:
                    break
            self.assertLessEqual(max(errors), ROOM, errors)
            # The control: kernels that take three times as long are outside the bound.
            cluster = json.loads(machine.cluster.read_text())
            for table in cluster["compute"]["kernels"]:
                table["points"] = [[size, 3 * seconds] for size, seconds in table["points"]]
            machine.cluster.write_text(json.dumps(cluster))
            self.assertGreater(statistics.median(self.errors(machine, measured)), ROOM)

            self.check_memory(machine, cluster)

    def check_memory(self, machine, cluster):
        """Peaks are those of real runs to the byte, the backend's own memory included."""
        for model, options in (("odd", ()), ("gpt-nano", ("--precision", "bf16", "--clip-norm", 1)), ("gpt-nano", ("--accumulate", 2, "--checkpoint-activations"))):
            real = machine.measured(model, 4, *options)
            self.assertEqual(self.peaks(machine.planned(model, *options)), self.peaks(real), (model, options))
        # The control: without what bench measured of communicators the backend's memory is missing.
        del cluster["communicators"]
        machine.cluster.write_text(json.dumps(cluster))
        self.assertNotEqual(self.peaks(machine.planned(model, *options)), self.peaks(real))

    def peaks(self, runs):
        return {strategy: {kind: value for kind, value in run["peak_bytes"].items() if kind != "reserved"} for strategy, run in runs.items()}

    def errors(self, machine, measured):
        return [abs(planned / statistics.median(steps) - 1) for _, steps, planned, _, _ in machine.rows_of("gpt-nano", measured)]


if __name__ == "__main__":
    TOOL = sys.argv.pop(1)
    unittest.main()
