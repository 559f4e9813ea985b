"""A solution of assignment 6."""


def units_of(blocks, size):
    return [min(size, blocks - begin) for begin in range(0, blocks, size)]


def bytes_at_once(situation, units):
    """The root, the unit that computes and the one that is prefetched."""
    two = max(sum(units[i : i + 2]) for i in range(len(units)))
    return 4 * (situation["root_parameters"] + two * situation["block_parameters"])


def seconds(situation, units):
    """A step: one link passes one operation after the other, and the latency follows; one unit is prefetched."""
    share = 4 * (situation["ranks"] - 1) / situation["ranks"] / situation["bytes_per_second"]
    port = now = 0.0

    def send(parameters, at):
        nonlocal port
        port = max(port, at) + share * parameters
        return port + situation["latency"]

    def gather(unit):
        return send(units[unit] * situation["block_parameters"], now)

    there = {}
    now = send(situation["root_parameters"], 0.0)
    there[0] = gather(0)
    for unit, size in enumerate(units):
        now = max(now, there[unit])
        if unit + 1 < len(units):
            there[unit + 1] = gather(unit + 1)
        now += size * situation["forward_seconds"]
    last = now
    for unit in reversed(range(len(units))):
        now = max(now, there[unit])
        if unit > 0:
            there[unit - 1] = gather(unit - 1)
        now += units[unit] * situation["backward_seconds"]
        last = send(units[unit] * situation["block_parameters"], now)
    return max(now, last, send(situation["root_parameters"], now))


def wrap(situation):
    choices = [units_of(situation["blocks"], size) for size in range(1, situation["blocks"] + 1)]
    fits = [units for units in choices if bytes_at_once(situation, units) <= situation["unsharded_bytes"]]
    return min(fits, key=lambda units: seconds(situation, units))
