"""Every mistake of the table applies exactly once in this tree and names existing tests. None is made: see mutate.py.

    table_test.py BUILD_FOLDER
"""

import dataclasses
import pathlib
import sys
import unittest

import random_mistakes
import table

BUILD = None


class TableTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.mistakes = table.load()
        cls.tests = table.Tests(BUILD)

    def test_every_mistake_applies_exactly_once(self):
        self.assertGreaterEqual(len(self.mistakes), 80)
        self.assertEqual([problem for one in self.mistakes if (problem := table.problem_of(one, table.ROOT))], [])

    def test_every_mistake_has_a_name_of_its_own_and_tests_that_exist(self):
        names = [one.name for one in self.mistakes]
        self.assertEqual(len(set(names)), len(names))
        self.assertEqual([one.name for one in self.mistakes if not one.tests or not one.why], [])
        problems = {f"{one.name}: {problem}" for one in self.mistakes for test in one.tests if (problem := self.tests.problem_of(test))}
        self.assertEqual(problems, set())

    def test_random_mistakes_apply_and_are_the_same_for_a_seed(self):
        made = random_mistakes.generate(40, 1)
        self.assertEqual([one.name for one in made], [one.name for one in random_mistakes.generate(40, 1)])
        self.assertNotEqual([one.name for one in made], [one.name for one in random_mistakes.generate(40, 2)])
        self.assertEqual([problem for one in made if (problem := table.problem_of(one, table.ROOT))], [])
        self.assertEqual({folder for folder in random_mistakes.FOLDERS if not any(one.file.startswith(folder) for one in made)}, set())
        self.assertEqual(random_mistakes.generate(3, 1, executed={}), [])  # the control: lines that no test executes

    def test_random_changes(self):
        def made(line):
            return dict(random_mistakes.changes_of(line))

        self.assertEqual(made("  count(2);"), {"deleted": "", "2 to 3": "  count(3);"})
        self.assertEqual(made("  if (a < b) return;")["negated"], "  if (!(a < b)) return;")
        self.assertEqual(made("  x = f(y) && z;  // 1 + 1"), {"deleted": "", "&& to ||": "  x = f(y) || z;  // 1 + 1"})
        for untouched in ('  throw Error("1 + 1 < 3");', "  // a < b", "#if A == 1", "  const auto text = name;", "  return x;"):
            self.assertEqual(made(untouched), {}, untouched)

    def test_what_does_not_apply_and_what_does_not_exist_is_seen(self):
        good = self.mistakes[0]
        self.assertEqual(table.problem_of(good, table.ROOT), "")
        for change, said in (({"file": "src/nothing.cpp"}, "not there"), ({"find": "no such text"}, "0 times"), ({"find": ";"}, "times"),
                             ({"replace": good.find}, "changes nothing")):
            self.assertIn(said, table.problem_of(dataclasses.replace(good, **change), table.ROOT))
        self.assertEqual(self.tests.problem_of("^mutation.table$"), "")
        self.assertEqual(self.tests.problem_of("mutation.table::TableTest.test_what_does_not_apply_and_what_does_not_exist_is_seen"), "")
        for wrong in ("^no_such_test", "no.such::TableTest.test_x", "mutation.table::TableTest.test_no_such", "mutation.table::Nothing"):
            self.assertNotEqual(self.tests.problem_of(wrong), "", wrong)


if __name__ == "__main__":
    BUILD = pathlib.Path(sys.argv.pop(1))
    unittest.main()
