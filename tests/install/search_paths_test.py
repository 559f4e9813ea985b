"""No program or library of the build has an empty or relative search path: search_paths_test.py BUILD COMPILER."""

import pathlib
import subprocess
import sys
import tempfile

from search_paths import bad_entries

build, compiler = sys.argv[1:]
count, bad = bad_entries(build)
print(count, "files", *bad, sep="\n")
assert count > 2 and not bad, bad
with tempfile.TemporaryDirectory() as folder:  # negative control: such paths are found
    source = pathlib.Path(folder, "a.cpp")
    source.write_text("int f() { return 0; }\n")
    for number, path in enumerate(("/usr/lib:", ":", "lib", "/usr/lib::/lib", "$ORIGIN/../lib:../lib", "$ORIGIN:/usr/lib")):
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", f"{folder}/{number}.so", f"-Wl,--enable-new-dtags,-rpath,{path}"], check=True)
    count, bad = bad_entries(folder)
    assert count == 6 and {pathlib.Path(file).name[0] for file, _ in bad} == set("01234"), bad
