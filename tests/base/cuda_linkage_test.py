"""Which of NVIDIA's libraries the modules need to be loaded: none of the run-time library's, whose static form they contain.

    cuda_linkage_test.py CONTROL MODULE..

A module that needs the shared form would not load where the machine has another version of it, or none. Streams and memory pass between
the forms all the same, since both use the device's primary context. The modules load cuBLASLt and NCCL when they are first used.
"""
import re
import subprocess
import sys

VENDORS = re.compile(r"libcuda|libcudart|libnccl|libnvrtc")


def needed(path):
    shown = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+)\]", shown)


control, *modules = sys.argv[1:]
if not any(name.startswith("libstdc++") for name in needed(control)) or not VENDORS.match("libcudart.so.13"):
    raise SystemExit("control: what a module needs is not seen")
if not modules:
    raise SystemExit("no module was built")
wrong = [f"{path} needs {name}" for path in modules for name in needed(path) if VENDORS.match(name)]
if wrong:
    raise SystemExit("\n".join(wrong))
