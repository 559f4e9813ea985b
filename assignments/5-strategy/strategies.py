"""Assignment 5: four strategies as data. The handout is README.md beside this file.

The grader makes a plug-in of this table. An axis is "replicate" (between the hosts) or "shard" (inside a host).
"""

# TODO which axes shard what? Here nothing is sharded: each of the four is ddp.
STRATEGIES = {
    "lean": {"param_at_rest": [], "param_after_forward": [], "gradient": [], "optimizer": []},
    "near": {"param_at_rest": [], "param_after_forward": [], "gradient": [], "optimizer": []},
    "twice": {"param_at_rest": [], "param_after_forward": [], "gradient": [], "optimizer": []},
    # Also "sync": {axis: period}: the ranks of the axis exchange parameter deltas every `period` steps, no gradients.
    "seldom": {"param_at_rest": [], "param_after_forward": [], "gradient": [], "optimizer": [], "sync": {}},
}
