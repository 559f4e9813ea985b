"""The built programs and libraries have the protections that docs/security.md names, as readelf shows them.

    hardening_test.py BUILD_FOLDER COMPILER [all]     all: also those of TESSERA_HARDENING
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

BUILD, COMPILER, ALL = None, None, False
HARDENING = ("BIND_NOW", "assertions of the C++ library")
CHECKED = ("tessera", "libtessera.so", "libtessera-comm.so")  # large enough that each protection must occur


def readelf(file, *options):
    return subprocess.run(["readelf", "-W", *options, str(file)], capture_output=True, text=True, timeout=60, check=True).stdout


def missing(file, every=True):
    """The protections that this file lacks. `every`: also those that only occur where code needs them."""
    segments, dynamic = readelf(file, "-l"), readelf(file, "-d")
    imported = {line.split()[7].split("@")[0] for line in readelf(file, "--dyn-syms").splitlines() if " UND " in line and len(line.split()) >= 8}
    static = "INTERP" not in segments and "no dynamic section" in dynamic
    found = {"RELRO": "GNU_RELRO" in segments, "BIND_NOW": static or "BIND_NOW" in dynamic or " NOW" in dynamic,
             "no executable stack": "RWE" not in segments}
    if every:
        found.update({"stack protector": "__stack_chk_fail" in imported, "fortified functions": any(name.endswith("_chk") for name in imported),
                      "assertions of the C++ library": any("__glibcxx_assert_fail" in name for name in imported)})
    return [name for name, there in found.items() if not there]


class HardeningTest(unittest.TestCase):
    def test_every_file_has_them(self):
        modules = [file for file in (BUILD / "tessera-modules").rglob("*") if file.is_file()]
        self.assertGreater(len(modules), 2)
        for file in (*(BUILD / name for name in CHECKED), *modules):
            lacks = missing(file, file.name in CHECKED)
            self.assertEqual([name for name in lacks if ALL or name not in HARDENING], [], file)

    def test_a_library_without_them_is_seen(self):  # the control
        with tempfile.TemporaryDirectory() as folder:
            source, library = pathlib.Path(folder, "plain.cpp"), pathlib.Path(folder, "plain.so")
            source.write_text("#include <cstring>\nvoid f(char*); void g(const char* s) { char b[64]; std::strcpy(b, s); f(b); }\n")
            plain = ["-fno-stack-protector", "-U_FORTIFY_SOURCE", "-Wl,-z,norelro", "-Wl,-z,lazy", "-Wl,-z,execstack"]
            subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", *plain, str(source), "-o", str(library)], check=True, timeout=60)
            self.assertEqual(missing(library), ["RELRO", "BIND_NOW", "no executable stack", "stack protector", "fortified functions",
                                                "assertions of the C++ library"])


if __name__ == "__main__":
    BUILD, COMPILER, ALL = pathlib.Path(sys.argv[1]), sys.argv[2], "all" in sys.argv[3:]
    unittest.main(argv=sys.argv[:1])
