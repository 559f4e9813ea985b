"""A solution of assignment 5."""

SHARD, ALL = ["shard"], ["replicate", "shard"]
STRATEGIES = {
    "lean": {"param_at_rest": [], "param_after_forward": [], "gradient": [], "optimizer": ALL},
    "near": {"param_at_rest": SHARD, "param_after_forward": [], "gradient": SHARD, "optimizer": SHARD},
    "twice": {"param_at_rest": ALL, "param_after_forward": SHARD, "gradient": ALL, "optimizer": ALL},
    "seldom": {"param_at_rest": SHARD, "param_after_forward": SHARD, "gradient": SHARD, "optimizer": SHARD, "sync": {"replicate": 2}},
}
