"""What each strategy would keep on a GPU, and whether two of them train equally, from the tool's JSON.

    TESSERA_TOOL=build/release/tessera python python/examples/02_memory.py
"""

import tessera

table = tessera.plan(parameters="7.5e9", ranks=64, precision="bf16", strategies=["ddp", "zero1", "zero2", "fsdp"])
for row in table["rows"]:
    print(f"{row['strategy']:6} {row['model_state_bytes'] / 1e9:6.1f} GB per rank")
runs = tessera.compare(model="gpt-nano", ranks=2, steps=2, strategies=["ddp", "fsdp"])["runs"]
print("equal" if runs[0]["final_parameters_hash"] == runs[1]["final_parameters_hash"] else "different")
