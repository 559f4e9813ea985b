"""The tours of CONTRIBUTING: each addition touches the files that its tour lists, builds, and passes the tests that it names.

    tour_test.py ROOT BUILD [CASE]

tests/tour/KIND.patch is the addition of a tour, with a name in place of the tour's NAME.
"""

import dataclasses
import pathlib
import re
import sys
import tempfile
import unittest

from scratch_build import Failed, ScratchBuild

ROOT = BUILD = None


@dataclasses.dataclass(frozen=True)
class Tour:
    kind: str
    files: frozenset
    tests: str  # a regular expression of CTest names


def tours(page):
    """The tours of a page, by kind."""
    found = {}
    for section in re.split(r"^##+ ", page, flags=re.M):
        about = re.search(r"`tests/tour/(\w+)\.patch` adds `(\w+)`", section)
        if about:
            heads = re.findall(r"^\d+\. ((?:`[^`]+`,?\s)*`[^`]+`):", section, re.M)
            files = frozenset(path.replace("NAME", about[2]) for head in heads for path in re.findall(r"`([^`]+)`", head))
            found[about[1]] = Tour(about[1], files, re.search(r"scripts/test -R '([^']+)'", section)[1])
    return found


def patch_of(tour):
    return (ROOT / "tests" / "tour" / f"{tour.kind}.patch").read_text()


def compare_files(tour, patch):
    """Raises Failed unless the patch touches the files of the tour."""
    touched = set(re.findall(r"^\+\+\+ b/(\S+)", patch, re.M))
    if touched != tour.files:
        raise Failed(f"{tour.kind}: CONTRIBUTING and the patch disagree on {sorted(touched ^ tour.files)}")


class Case(unittest.TestCase):
    def setUp(self):
        self.tours = tours((ROOT / "CONTRIBUTING.md").read_text())
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)


class ToursTest(Case):
    def follow(self, kind):
        """Follows the tour in a scratch build, which is returned with its targets."""
        tour = self.tours[kind]
        patch = patch_of(tour)
        compare_files(tour, patch)
        scratch = ScratchBuild(ROOT, BUILD, self.folder)
        scratch.apply(patch)
        scratch.configure()
        targets = scratch.programs(tour.tests)
        self.assertTrue(targets)
        print(f"{kind}: compiled {', '.join(scratch.make(targets))}")
        scratch.test(tour.tests)
        return scratch, targets

    def plant(self, scratch, file, find, replace):
        path = scratch.tree / file
        text = path.read_text()
        self.assertEqual(text.count(find), 1)
        path.write_text(text.replace(find, replace))

    def test_algorithm(self):
        self.follow("algorithm")

    def test_backend(self):
        scratch, targets = self.follow("backend")
        # Negative control: the tour's tests detect a mistake in what it adds. Short messages stay right: a rank that gets other
        # numbers than its peers could wait for its deadline.
        self.plant(scratch, "backends/inproc/backend.cpp", "std::memcpy(to.data, from.data, bytes)",
                   "std::memcpy(to.data, from.data, bytes > 1000 ? bytes - 1 : bytes)")
        scratch.make(targets)
        with self.assertRaisesRegex(Failed, "a test fails"):
            scratch.test(r"^conformance_threads\.inproc\.2$")

    def test_layer(self):
        self.follow("layer")

    def test_strategy(self):
        scratch, targets = self.follow("strategy")
        # Negative control: what does not compile is reported.
        self.plant(scratch, "src/fsdp/strategy.cpp", '{.name = "hzero1",', '{.named = "hzero1",')
        with self.assertRaisesRegex(Failed, "it does not build:(.|\n)*strategy.cpp"):
            scratch.make(targets)


class ListsTest(Case):
    def test_every_patch_has_a_tour_with_its_files(self):
        self.assertEqual({path.stem for path in (ROOT / "tests" / "tour").glob("*.patch")}, set(self.tours))
        for tour in self.tours.values():
            compare_files(tour, patch_of(tour))

    def test_a_wrong_list_is_detected(self):
        tour = self.tours["strategy"]
        for files in (tour.files | {"src/fsdp/mesh.cpp"}, tour.files - {"src/fsdp/strategy.cpp"}):
            with self.assertRaisesRegex(Failed, r"disagree on \['src/fsdp/\w+.cpp'\]"):
                compare_files(dataclasses.replace(tour, files=files), patch_of(tour))

    def test_a_patch_that_does_not_apply_is_detected(self):
        patch = patch_of(self.tours["strategy"])
        changed = re.sub(r"^ (.*\S.*)$", r" \1 changed", patch, count=1, flags=re.M)
        scratch = ScratchBuild(ROOT, BUILD, self.folder)
        with self.assertRaisesRegex(Failed, "the patch does not apply"):
            scratch.apply(changed)


if __name__ == "__main__":
    ROOT, BUILD = (pathlib.Path(sys.argv.pop(1)).resolve() for _ in range(2))
    unittest.main(verbosity=2)
