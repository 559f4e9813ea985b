"""Every mistake of the table applies exactly once in this tree and names existing tests. None is made: see mutate.py.

    table_test.py BUILD_FOLDER
"""

import dataclasses
import pathlib
import sys
import unittest

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
