"""Installs the build to a temporary prefix, builds an outside project against it and runs it and the installed tool."""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from search_paths import bad_entries


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], text=True, capture_output=True, timeout=250, **options)
    if done.returncode != 0:
        raise SystemExit(f"failed ({done.returncode}): {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def prefix_modules(prefix):
    found = list(prefix.rglob("tessera-modules"))
    assert len(found) == 1, found
    return found[0]


def main():
    parser = argparse.ArgumentParser()
    for name in ("cmake", "build", "compiler", "flags", "version"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    outside = pathlib.Path(__file__).resolve().parent / "outside"

    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        prefix = scratch / "prefix"
        run(args.cmake, "--install", args.build, "--prefix", prefix)

        count, bad = bad_entries(prefix)
        assert count > 2 and not bad, bad

        headers = sorted((prefix / "include" / "tessera").rglob("*.h"))
        assert len(headers) > 5, headers
        of_libtorch = [header for header in headers if header.parent.name == "libtorch"]
        headers = [header for header in headers if header not in of_libtorch]  # a component with needs of its own
        public = re.compile(r"((base|comm|nn|fsdp|plan)|nn/(kernels|layers|models|ops))/\w+\.h")
        for header in headers:
            assert public.fullmatch(str(header.relative_to(prefix / "include" / "tessera"))), header
        project = scratch / "project"
        shutil.copytree(outside, project)
        lines = [f'#include "{header.relative_to(prefix / "include")}"\n' for header in headers]
        (project / "all_headers.h").write_text("#pragma once\n" + "".join(lines))

        configure = [args.cmake, "-S", project, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}",
                     f"-DCMAKE_CXX_COMPILER={args.compiler}", f"-DCMAKE_CXX_FLAGS={args.flags}"]
        run(*configure, "-B", scratch / "build", f"-DWANTED_VERSION={args.version}")
        run(args.cmake, "--build", scratch / "build")
        output = run(scratch / "build" / "outside")
        assert output.startswith("1000 bytes; InvalidUsage; unknown dtype 'f33'"), output

        # tessera::comm loads no products; the control is the program beside it. OpenBLAS is loaded at its first product.
        assert run(scratch / "build" / "communication") == "sum 6\n"
        loaded = {program: run("ldd", scratch / "build" / program) for program in ("outside", "communication")}
        assert "libtessera.so" in loaded["outside"] and "libtessera.so" not in loaded["communication"], loaded
        assert "openblas" not in loaded["outside"] + loaded["communication"], loaded
        assert "libtessera-comm.so" in loaded["communication"], loaded

        # An outside backend, built against the package, runs in that program; without the path it is unknown.
        plugin = scratch / "plugin"
        run(args.cmake, "-S", outside.parents[2] / "examples" / "own_backend", "-B", plugin, *configure[3:])
        run(args.cmake, "--build", plugin)
        path = dict(os.environ, TESSERA_PLUGIN_PATH=str(plugin))
        assert "the queue backend: 6" in run(scratch / "build" / "outside", "queue", env=path)
        refused = subprocess.run([scratch / "build" / "outside", "queue"], text=True, capture_output=True, timeout=60)
        assert refused.returncode != 0 and "unknown backend 'queue'" in refused.stdout, refused
        lab = scratch / "lab"
        run(args.cmake, "-S", outside.parents[2] / "examples" / "own_strategy", "-B", lab, *configure[3:])
        run(args.cmake, "--build", lab)
        own = scratch / "own_model"
        run(args.cmake, "-S", outside.parents[2] / "examples" / "own_model", "-B", own, *configure[3:])
        run(args.cmake, "--build", own)
        modules = prefix_modules(prefix)
        assert modules / "module-probe" in modules.iterdir()

        # The component libtorch has its target where it was built; where it was not, it is refused in one line.
        component = scratch / "component"
        component.mkdir()
        (component / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(component LANGUAGES CXX)\n"
                                                  "find_package(tessera REQUIRED COMPONENTS libtorch)\n"
                                                  "get_target_property(library tessera::libtorch LOCATION)\nmessage(STATUS ${library})\n")
        asked = subprocess.run([str(p) for p in (args.cmake, "-S", component, "-B", scratch / "asked", *configure[3:])],
                               text=True, capture_output=True, timeout=250)
        if of_libtorch:
            assert asked.returncode == 0 and str(next(prefix.rglob("libtessera-libtorch.so*")).parent) in asked.stdout, asked
            config = next(prefix.rglob("tesseraConfig.cmake"))
            written = config.read_text()
            config.write_text(re.sub(r'VERSION STREQUAL "[\d.]+"', 'VERSION STREQUAL "0.9"', written))  # another Torch
            assert config.read_text() != written
            other = subprocess.run([str(p) for p in (args.cmake, "-S", component, "-B", scratch / "old", *configure[3:])],
                                   text=True, capture_output=True, timeout=250)
            config.write_text(written)
            assert other.returncode != 0 and "it was built with Torch" in other.stderr, other
        else:
            assert asked.returncode != 0 and "component libtorch: this package was built without it" in asked.stderr, asked

        # Negative control: a version that doesn't exist is rejected, so CMake really checks the package.
        refused = subprocess.run([str(p) for p in (*configure, "-B", scratch / "other", "-DWANTED_VERSION=99.0")],
                                 text=True, capture_output=True, timeout=250)
        assert refused.returncode != 0 and "99.0" in refused.stderr, refused.stderr

        tool = prefix / "bin" / "tessera"
        if tool.exists():  # found by its own run path: no LD_LIBRARY_PATH
            assert args.version in run(tool, "--version")
            states = {b["name"]: b for b in json.loads(run(tool, "info", "--json", env=path))["backends"]}
            assert states["queue"]["available"], states
            text = scratch / "text.txt"
            text.write_text("The clocks were striking thirteen. " * 100)
            compared = run(tool, "compare", "--model", "gpt-nano", "--seq-len", "16", "--steps", "1", "--data", text,
                           "--strategies", f"fsdp,{lab}/lab.so:hfsdp,fsdp+{lab}/lab.so:f16")
            assert f"fsdp {lab}/lab.so:hfsdp end bitwise equal" in compared, compared
            half = run(tool, "compare", "--model", "gpt-nano", "--seq-len", "16", "--steps", "1", "--data", text, "--precision", "bf16",
                       "--strategies", f"fsdp,fsdp+{lab}/lab.so:f16")
            assert f"fsdp fsdp+{lab}/lab.so:f16 end bitwise equal" in half, half  # what is half already is sent as it is
            compared = run(tool, "compare", "--model", f"{own}/model.so:counter,blocks=2", "--ranks", "2", "--steps", "2",
                           "--strategies", "ddp,fsdp")
            assert "ddp fsdp end bitwise equal" in compared, compared
            for module in modules.glob("*.so"):  # each installed module is loaded from its installed folder
                assert not states[module.stem.split("-")[0]]["reason"].startswith("not built"), states
        else:
            raise SystemExit("the tool was not installed")
        print(output, end="")


main()
