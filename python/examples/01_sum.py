"""Every rank contributes a vector; all get the sum.

    tessera run -n 4 -- python python/examples/01_sum.py
    TESSERA_BACKEND=tcp torchrun --nproc-per-node 4 python/examples/01_sum.py
"""

import numpy as np

import tessera

with tessera.init() as world:
    shared = np.from_dlpack(world.allocate(4, "f64"))  # memory that moves without a copy; any other array works, too
    shared[:] = world.rank + 1
    world.all_reduce(shared).wait()
    if world.rank == 0:
        print(f"{world.size} ranks over {world.backend}: {shared.tolist()}")
