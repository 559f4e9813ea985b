"""Configures TESSERA_COMM_ONLY: what it would compile and link is communication alone. Warnings are errors where a preset says so,
and not for others. Nothing is compiled."""

import argparse
import json
import pathlib
import subprocess
import tempfile

parser = argparse.ArgumentParser()
parser.add_argument("--cmake", required=True)
parser.add_argument("--source", required=True)
parser.add_argument("--compiler", required=True)
args = parser.parse_args()


def configure(folder, *options):
    command = [args.cmake, "-S", args.source, "-B", folder, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={args.compiler}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


with tempfile.TemporaryDirectory() as scratch:
    build = pathlib.Path(scratch) / "build"
    done = configure(build, "-DTESSERA_COMM_ONLY=ON")
    assert done.returncode == 0, done.stdout + done.stderr
    commands = subprocess.run(["ninja", "-C", build, "-t", "commands", "all"], capture_output=True, text=True, timeout=60)
    assert commands.returncode == 0, commands
    lines = commands.stdout.splitlines()
    sources = {word for line in lines for word in line.split() if word.endswith((".cpp", ".cu")) and "/tests/" not in word}
    folder = pathlib.Path(args.source)
    for part in ("src/base/", "src/comm/", "backends/tcp/", "backends/shm/"):
        assert any(source.startswith(str(folder / part)) for source in sources), (part, sources)
    for part in ("src/nn/", "src/fsdp/", "src/plan/", "tests/", "examples/", "bench/"):
        assert not any(source.startswith(str(folder / part)) for source in sources), (part, sources)
    for library in ("openblas", "dnnl", "cublas"):
        assert library not in commands.stdout.lower(), library
    assert "-Wall" in commands.stdout and "-Werror" not in commands.stdout

    strict = configure(build, "-DTESSERA_WERROR=ON")
    assert strict.returncode == 0, strict.stdout + strict.stderr
    commands = subprocess.run(["ninja", "-C", build, "-t", "commands", "tessera_comm_library"], capture_output=True, text=True, timeout=60)
    assert all("-Werror" in line for line in commands.stdout.splitlines() if " -c " in line), commands
    presets = {preset["name"]: preset for preset in json.loads((folder / "CMakePresets.json").read_text())["configurePresets"]}
    assert presets["base"]["cacheVariables"]["TESSERA_WERROR"] == "ON"
    for name, preset in presets.items():
        assert name == "base" or preset["inherits"] == "base" and "TESSERA_WERROR" not in preset.get("cacheVariables", {}), name

    refused = configure(pathlib.Path(scratch) / "refused", "-DTESSERA_COMM_ONLY=ON", "-DTESSERA_TESTS=ON")
    assert refused.returncode != 0 and "TESSERA_COMM_ONLY leaves out what tests" in refused.stderr, refused
print(f"{len(sources)} sources, all of communication")
