"""Configures builds without some of the parts, with mistakes in the options, and without the packages that are needed. Nothing is compiled."""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

parser = argparse.ArgumentParser()
parser.add_argument("--cmake", required=True)
parser.add_argument("--source", required=True, type=pathlib.Path)
parser.add_argument("--compiler", required=True)
args = parser.parse_args()

PARTS = ("CUDA", "MPI", "UCX", "ONEDNN", "LIBTORCH", "TOOL")
WITHOUT = [f"-DTESSERA_{part}=OFF" for part in PARTS]
NO_PROGRAMS = ["-DTESSERA_TESTS=OFF", "-DTESSERA_EXAMPLES=OFF", "-DTESSERA_BENCH=OFF"]
# Every header, library and package file is looked for below a folder that doesn't exist.
NOWHERE = ["-DCMAKE_FIND_ROOT_PATH=/nowhere", "-DPKG_CONFIG_EXECUTABLE=0", "-DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON",
           *(f"-DCMAKE_FIND_ROOT_PATH_MODE_{kind}=ONLY" for kind in ("INCLUDE", "LIBRARY", "PACKAGE"))]


class Parts(unittest.TestCase):
    def setUp(self):
        self.build = pathlib.Path(tempfile.mkdtemp(prefix="tessera-parts-"))
        self.addCleanup(shutil.rmtree, self.build)

    def configure(self, *options):
        command = [args.cmake, "-S", args.source, "-B", self.build, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={args.compiler}", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=dict(os.environ, COLUMNS="80"))

    def refused(self, line, *options):
        """The configuration ends with that line, and the next one without the mistake succeeds in the same folder."""
        done = self.configure(*options)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertTrue(any(said.strip().startswith(line) for said in done.stderr.splitlines()), done.stderr)

    def lists(self):
        return "".join((self.build / "generated" / f"{kind}.cpp").read_text() for kind in ("backends", "devices"))

    def test_parts_left_out(self):
        done = self.configure(*WITHOUT)
        self.assertEqual(done.returncode, 0, done.stderr)
        for name, option in (("ucx", "UCX"), ("mpi", "MPI"), ("nccl", "CUDA"), ("cuda", "CUDA")):
            self.assertIn(f'NotBuilt{{"{name}", "left out of this build: -DTESSERA_{option}=OFF"}}', self.lists())
        commands = subprocess.run(["ninja", "-C", self.build, "-t", "commands", "all"], capture_output=True, text=True, timeout=60, check=True)
        for part in ("backends/ucx", "backends/mpi", "backends/nccl", "src/base/cuda", "-ldnnl", "libdnnl", "src/libtorch", "tools/main.cpp", "tests/"):
            self.assertNotIn(f"{part}", commands.stdout)
        for part in ("src/fsdp/engine.cpp", "backends/tcp/backend.cpp", "examples/01_hello_ranks.cpp"):
            self.assertIn(part, commands.stdout)

    def test_parts_left_out_later(self):
        self.assertEqual(self.configure(*NO_PROGRAMS).returncode, 0)
        self.assertNotIn("left out", self.lists())
        self.assertEqual(self.configure("-DTESSERA_MPI=OFF").returncode, 0)
        self.assertEqual(self.lists().count("left out"), 1)
        self.assertEqual(self.configure("-DTESSERA_MPI=ON").returncode, 0)
        self.assertNotIn("left out", self.lists())

    def test_mistakes(self):
        self.refused("TESSERA_CUDAA: no such option; known: ", "-DTESSERA_CUDAA=OFF")
        self.refused("TESSERA_CUDA is 'OF'; it is ON or OFF", "-DTESSERA_CUDA=OF")
        self.refused("TESSERA_SANITIZE is 'adress'", "-DTESSERA_SANITIZE=adress")
        self.refused("TESSERA_SANITIZE is 'address,thread'", "-DTESSERA_SANITIZE=address,thread")
        done = self.configure("-DTESSERA_CUDA=OFF", *NO_PROGRAMS)  # none of the mistakes is kept
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_contradictions(self):
        self.refused("TESSERA_TOOL=OFF leaves out the tool, which the tests run", "-DTESSERA_TOOL=OFF", "-DTESSERA_TESTS=ON")
        self.refused("TESSERA_COMM_ONLY leaves out what the tool needs", "-DTESSERA_COMM_ONLY=ON", "-DTESSERA_TOOL=ON")
        self.refused("TESSERA_TESTS=OFF leaves out tests/fuzz", "-DTESSERA_FUZZ=ON", "-DTESSERA_TESTS=OFF")
        self.refused("TESSERA_DEFAULT_BACKEND is shm+ucx, but ucx is not built: left out of this build: -DTESSERA_UCX=OFF",
                     "-DTESSERA_UCX=OFF", "-DTESSERA_DEFAULT_BACKEND=shm+ucx", "-DTESSERA_CUDA=OFF", *NO_PROGRAMS)

    def missing(self, *options):
        """The packages that the configuration names, in one line."""
        done = self.configure(*options)
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertEqual(done.stderr.count("CMake Error"), 1, done.stderr)
        lines = re.findall("apt-get install (.*)", done.stderr)
        self.assertEqual(len(lines), 1, done.stderr)
        return set(lines[0].split())

    def test_all_missing_packages_at_once(self):
        everything = self.missing(*NOWHERE, "-DTESSERA_CUDA=OFF", "-DTESSERA_D3=0")
        setup = (args.source / "scripts/setup").read_text()
        installed = {package for line in re.findall(r"packages\+?=\(([^)]*)\)", setup) for package in line.split()}
        self.assertLessEqual(everything, installed)  # scripts/setup installs what is asked for
        self.assertLessEqual({"pkg-config", "nlohmann-json3-dev", "libxxhash-dev", "libboost-dev", "libssl-dev", "libhwy-dev", "python3",
                              "libopenblas-pthread-dev", "libcli11-dev", "libfmt-dev", "node-d3",
                              "libgtest-dev", "libgmock-dev"}, everything)
        library = self.missing(*NOWHERE, *WITHOUT, *NO_PROGRAMS, "-DTESSERA_D3=0")
        self.assertFalse(library & {"libcli11-dev", "libgtest-dev", "node-d3"}, library)
        self.assertIn("libopenblas-pthread-dev", library)
        self.assertNotIn("libopenblas-pthread-dev", self.missing(*NOWHERE, "-DTESSERA_COMM_ONLY=ON", "-DTESSERA_CUDA=OFF", *NO_PROGRAMS))

    def test_some_missing_packages(self):
        gone = self.missing("-DCMAKE_DISABLE_FIND_PACKAGE_Boost=ON", "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON", "-DTESSERA_CUDA=OFF")
        self.assertEqual(gone, {"libboost-dev", "libgtest-dev", "libgmock-dev"})


class OptionNames(unittest.TestCase):
    def test_every_variable_of_a_search_is_known(self):
        """A place to look in that the command line gives is no mistake."""
        known = (args.source / "cmake/parts.cmake").read_text()
        files = [path for pattern in ("CMakeLists.txt", "*.cmake") for path in args.source.rglob(pattern)
                 if path.relative_to(args.source).parts[0] not in ("build", "python")]
        searches = {(name, path) for path in files
                    for name in re.findall(r"find_(?:path|library|program|file)\(TESSERA_(\w+)[ )]", path.read_text())}
        self.assertGreater(len(searches), 10)
        for name, path in searches:
            self.assertRegex(known, rf"\b{name}\b", path)


unittest.main(argv=sys.argv[:1], verbosity=2)
