"""Typical mistakes in the solutions: each changes one text and must lose the points of a test, with a message that helps.

grader_test.py tries the first three of each and those marked `always`; all of them with --all.
"""

import dataclasses


@dataclasses.dataclass
class Mistake:
    name: str
    find: str
    replace: str
    test: str  # a part of the name of the test that it fails
    message: str  # a regular expression that its output matches
    keeps: str = ""  # a part of the name of a test that it passes nevertheless
    always: bool = False


RING_CPP = [
    Mistake("the last slices are the longer ones", "i * (count / n) + std::min(i, rest)", "i * (count / n)",
            "the messages", r"sends slice \d, which starts at [\d,]+, yours at [\d,]+", keeps="equal slices"),
    Mistake("one step of phase 1 is missing", "for (int k = 0; k < n - 1; ++k) {\n    const Slice out = slice(rank - k)",
            "for (int k = 0; k < n - 2; ++k) {\n    const Slice out = slice(rank - k)",
            "equal slices", r"holds only the values of rank 1"),
    Mistake("sends are waited for before receives", "    const std::array parts = {P2POp::send(view_of(x.data() + out.begin, out.count()), next),\n"
            "                              P2POp::recv(view_of(into, count), before)};\n    world.batch(parts).wait();",
            "    if (n > 1) world.send(view_of(x.data() + out.begin, out.count()), next).wait();\n"
            "    if (n > 1) world.recv(view_of(into, count), before).wait();",
            "large slices over tcp", r"the ranks wait for each other.*use batch", keeps="equal slices"),
    Mistake("an error is swallowed", "world.batch(parts).wait();", "try { world.batch(parts).wait(); } catch (const std::exception&) {}",
            "a rank that fails", r"returned as if all were well", keeps="equal slices"),
    Mistake("the whole ring runs the other way", "const int next = (rank + 1) % n, before = (rank + n - 1) % n;",
            "const int before = (rank + 1) % n, next = (rank + n - 1) % n;",
            "the messages", r"in the ring it sends only to rank \d"),
    Mistake("one rank crashes where there are four", "std::vector<float> arrived(slice(0).count());",
            "std::vector<float> arrived(slice(0).count());\n  if (n == 4 && rank == 1) __builtin_trap();", "equal slices",
            r"in the case '4 ranks, 1200 elements': tessera: rank 1 was killed by signal 4",
            keeps="a rank that fails", always=True),
    Mistake("one rank ends the process", "std::vector<float> arrived(slice(0).count());",
            "std::vector<float> arrived(slice(0).count());\n  if (n == 4 && rank == 1) exit(0);", "equal slices",
            r"4 ranks, 1200 elements: rank 1: your code ended the process by exit\(\)", keeps="a rank that fails"),
]
RING_PYTHON = [
    Mistake("slices are rounded up", "    length, rest = divmod(count, slices)\n    begin = index * length + min(index, rest)\n"
            "    return slice(begin, begin + length + (1 if index < rest else 0))",
            "    length = -(-count // slices)\n    return slice(index * length, min(count, (index + 1) * length))",
            "the messages", r"rank 0 sends slice 2, which starts at 33,327, yours at 33,328", keeps="equal slices"),
    Mistake("the library's own operation is used", "    for k in range(n - 1):\n        mine = part", "    world.all_reduce(x).wait()\n"
            "    for k in range(0):\n        mine = part", "the messages", r"calls all_reduce: only send, recv and batch are allowed"),
    Mistake("the sum is divided", "        mine[:] = arrived + mine\n", "        mine[:] = arrived + mine\n        if k == n - 2: mine /= n\n",
            "equal slices", r"off by a factor of \d: it should be the sum, not an average"),
    Mistake("what arrives is not added", "mine[:] = arrived + mine", "mine[:] = arrived", "equal slices", r"rank \d"),
    Mistake("one rank ends the process", "        mine[:] = arrived + mine", "        if n == 4: raise SystemExit\n        mine[:] = arrived + mine",
            "equal slices", r"4 ranks, 1200 elements: rank \d: your code ended the process by exit\(\)", keeps="a rank that fails", always=True),
]
FSDP_CPP = [
    Mistake("shards begin one element early", "const std::int64_t begin = per_rank_ * world_.rank(),",
            "const std::int64_t begin = world_.rank() == 0 ? 0 : per_rank_ * world_.rank() - 1,", "shards:",
            r"rank 1's shard of embed starts at 1,572, yours at 1,571 of the flat parameter"),
    Mistake("the last elements are left out where the ranks don't divide them", "(elements_ + world.size() - 1) / world.size()",
            "elements_ / world.size()", "shards:", r"rank \d's shard of block0 has [\d,]+ elements, needs [\d,]+: 5,953 are padded to"),
    Mistake("units stay unsharded after forward", ".post_forward = [this](nn::Phase) { reshard(); }", ".post_forward = {}", "memory in a step",
            r"while block0 computes its forward, embed is still unsharded", keeps="training:"),
    Mistake("gradients are summed", "comm::ReduceOp::avg()", "comm::ReduceOp::sum()", "training:",
            r"the loss of step 1.*your reduce_scatter sums, and a step needs the average", keeps="shards:"),
    Mistake("the gathered buffer is kept", "      handle.unbind(\"its unit is resharded\");\n    }\n    unsharded_ = {};",
            "      handle.unbind(\"its unit is resharded\");\n    }", "memory in a step", r"the peak of unsharded parameters is [\d,]+ bytes",
            keeps="training:"),
    Mistake("backward uses the parameters of forward", "  void begin_backward() {\n    unshard();", "  void begin_backward() {", "training:",
            r"is not readable: its unit is resharded", keeps="shards:"),
    Mistake("buffers of gradients are kept", "parameter->gradient().unbind();\n    unsharded_gradient_ = {};", "parameter->gradient().unbind();",
            "memory in a step", r"the peak of unsharded gradients is [\d,]+ bytes", keeps="training:"),
    Mistake("gradients are reduced before they are complete", ".pre_backward = [this] { begin_backward(); },\n"
            "                      .post_backward = [this] { end_backward(); }",
            ".pre_backward = [this] { begin_backward(); world_.reduce_scatter(view(unsharded_gradient_), view(gradient_), "
            "comm::ReduceOp::avg()).wait(); },\n                      .post_backward = [this] { reshard(); }", "training:",
            r"the loss of step 1 .*step 0 was right, so its gradients or its update are not; after step 0 rank \d's shard of head", keeps="shards:"),
    Mistake("one gradient is bound to another's place", "unsharded_gradient_.data<float>() + offsets_[i]",
            "unsharded_gradient_.data<float>() + offsets_[i == 3 && elements_ == 5953 ? 2 : i]", "training:",
            r"the loss of step 1 .*after step 0 rank \d's shard of block\d: element [\d,]+ of the flat parameter is", keeps="shards:"),
    Mistake("a gradient is not a number", "comm::ReduceOp::avg()).wait();", "comm::ReduceOp::avg()).wait();\n    gradient_.data<float>()[0] = __builtin_nanf(\"\");",
            "training:", r"the loss of step 1 on rank \d is nan, under ddp", keeps="shards:", always=True),
    Mistake("gradients are divided before they are added", "world_.reduce_scatter(view(unsharded_gradient_), view(gradient_), comm::ReduceOp::avg())",
            "for (std::int64_t i = 0; i < unsharded_gradient_.count(); ++i) unsharded_gradient_.data<float>()[i] /= static_cast<float>(world_.size());\n"
            "    world_.reduce_scatter(view(unsharded_gradient_), view(gradient_), comm::ReduceOp::sum())", "training:",
            r"3 ranks: the loss of step \d .*dividing before the sum rounds once for each rank", keeps="shards:"),
]
FSDP_PYTHON = [
    Mistake("initial values are those of the first rank", "initial(self.unit.name, name, seed, first - offset, last - offset)",
            "initial(self.unit.name, name, seed, 0, last - first)", "shards:", r"rank 1's shard of layer0 starts at 3,012, yours at 0"),
    Mistake("gathered buffers are kept", "        self.unit.parameters.update(self.views(flat))",
            "        self.flat = flat\n        self.unit.parameters.update(self.views(flat))", "memory between steps", r"keeps [\d,]+ bytes; shards of",
            keeps="training:"),
    Mistake("the last elements are left out where the ranks don't divide them", "-(-elements // world.size)", "elements // world.size", "shards:",
            r"rank 0's shard of layer2 has 22,060 elements, needs 22,061: 44,121 are padded to 44,122, divided by 2 ranks"),
    Mistake("the average is forgotten", 'op="avg"', 'op="sum"', "training:", r"your reduce_scatter sums", keeps="shards:"),
    Mistake("units stay unsharded after forward", "unit.pre_forward, unit.post_forward = self.unshard, self.reshard",
            "unit.pre_forward, unit.post_forward = self.unshard, None", "memory in a step", r"while layer1 computes its forward, layer0 is still"),
]
DDP_CPP = [
    Mistake("the hook waits", "bucket.work = world_.all_reduce(all, all, comm::ReduceOp::avg());",
            "bucket.work = world_.all_reduce(all, all, comm::ReduceOp::avg());\n    bucket.work.wait();", "overlap: a slow link",
            r"they don't overlap. Start each bucket in the hook, and wait only in finish", keeps="training:"),
    Mistake("gradients of an earlier step stay", "      std::ranges::fill(bucket.buffer, 0.0F);\n", "", "unused units",
            r"a unit that is not used calls no hook of backward.*not what the step before left", keeps="training:"),
    Mistake("buckets are filled from the first parameter", "for (std::size_t index = parameters_.size(); index-- > 0;) {",
            "for (std::size_t index = 0; index < parameters_.size(); ++index) {", "buckets:",
            r"bucket 0 holds head.out.weight to block2.down.bias, 3,216 elements of 6,000 that fit; yours has", keeps="training:"),
    Mistake("all is reduced at the end", "    while (next_ < buckets_.size() && buckets_[next_].missing == 0) reduce(buckets_[next_++]);\n", "",
            "overlap: each bucket", r"bucket 0 is complete after the backward of block2; it is reduced only in finish", keeps="training:"),
    Mistake("gradients are summed", "comm::ReduceOp::avg()", "comm::ReduceOp::sum()", "training:",
            r"your all_reduce sums, and a step needs the average over the ranks", keeps="buckets:"),
    Mistake("what is left is not reduced", "    while (next_ < buckets_.size()) reduce(buckets_[next_++]);\n", "", "unused units",
            r"Reduce its buckets in finish\(\), in the order of the others", keeps="training:"),
    Mistake("buckets are reduced before they are complete", "buckets_[next_].missing == 0", "buckets_[next_].missing <= 1", "overlap: each bucket",
            r"bucket 0 is complete after the backward of block2; it is reduced during the backward of head before all of its gradients"),
]
DDP_PYTHON = [
    Mistake("the hook waits", "self.works.append(self.world.all_reduce(self.buckets[len(self.works)].buffer, op=\"avg\"))",
            "self.works.append(self.world.all_reduce(self.buckets[len(self.works)].buffer, op=\"avg\"))\n        self.works[-1].wait()",
            "overlap: a slow link", r"they don't overlap", keeps="training:"),
    Mistake("finish does not wait", "            work.wait()", "            work.done()", "a rank that fails", r"and the step of rank \d went on"),
    Mistake("a bucket is closed one parameter late", "4 * (self.buckets[-1].elements + math.prod(row[2])) > bucket_bytes",
            "4 * self.buckets[-1].elements > bucket_bytes", "buckets:", r"bucket \d holds .* elements of .* that fit; yours has", keeps="training:"),
    Mistake("gradients of an earlier step stay", "        self.buffer[:] = 0  # what an unused unit contributes\n", "", "unused units",
            r"not what the step before left", keeps="training:"),
    Mistake("gradients are summed", 'op="avg")', 'op="sum")', "training:", r"your all_reduce sums"),
]
ZERO_CPP = [
    Mistake("slices begin anywhere", "r * parameters.size() / n / 8 * 8", "r * parameters.size() / n", "slices:",
            r"4 ranks, 49990 parameters: rank 0's slice has 12,496 elements, from 0 to 12,496; the one in your .* has 12,497|"
            r"rank \d's slice starts at [\d,]+, yours at [\d,]+", keeps="parameters:"),
    Mistake("each rank clips by its own norm", "    world_.all_reduce(view, view, comm::ReduceOp::sum()).wait();\n", "", "clipping",
            r"the squares of the slices are added over the ranks", keeps="parameters:"),
    Mistake("the state is that of all parameters", "values->resize(mine_.size());", "{\n      values->reserve(parameters.size());\n"
            "      values->resize(mine_.size());\n    }", "memory:", r"keeps [\d,]+ bytes between steps; two moments and the gradients of its slice",
            keeps="parameters:"),
    Mistake("steps are not counted", "++steps_);", "steps_ + 1);", "parameters:", r"after 3 steps .* parameters are wrong on rank 0", keeps="slices:"),
    Mistake("the root of each rank's sum is added", "double sum = squares(gradient_);", "double sum = std::sqrt(squares(gradient_));", "clipping",
            r"added over the ranks, in f64, before the root", keeps="parameters:"),
]
ZERO_PYTHON = [
    Mistake("updated slices are not gathered", "        self.world.all_gather(self.parameters, self.mine, counts=self.counts).wait()\n", "",
            "parameters:", r"your own slice is right, those of others did not arrive"),
    Mistake("gradients are reduced whole", "self.world.reduce_scatter(self.gradient, gradients, op=\"avg\", counts=self.counts).wait()",
            "begin = sum(self.counts[: self.world.rank])\n        self.world.all_reduce(gradients, op=\"avg\").wait()\n"
            "        self.gradient[:] = gradients[begin : begin + len(self.mine)]", "slices:",
            r"calls all_reduce, all_gather in a step; it needs one reduce_scatter", keeps="parameters:"),
    Mistake("the state is that of all parameters", "(np.zeros(len(self.mine), np.float32) for _ in range(3))",
            "(np.zeros(count, np.float32)[: len(self.mine)] for _ in range(3))", "memory:", r"a whole moment is 199,960", keeps="parameters:"),
    Mistake("slices are rounded to the nearest", "r * count // n // 8 * 8", "(r * count // n + 4) // 8 * 8", "slices:",
            r"starts at [\d,]+, yours at [\d,]+|the one in your", keeps="parameters:"),
    Mistake("each rank clips by its own norm", "        self.world.all_reduce(total).wait()\n", "", "clipping", r"before the root", keeps="parameters:"),
]
STRATEGIES_CPP = [
    Mistake("lean shards inside a host only", ".optimizer = all,\n               .two_axes = true},\n              {.name = \"near\"",
            ".optimizer = shard,\n               .two_axes = true},\n              {.name = \"near\"", "lean: memory",
            r"a rank keeps 482,304 bytes of optimizer state, should be 241,152: 8 bytes a parameter, divided by 4 ranks", keeps="near: memory"),
    Mistake("near gathers twice", ".param_at_rest = shard,\n               .param_after_forward = none",
            ".param_at_rest = shard,\n               .param_after_forward = shard", "near: calls and bytes",
            r"4 calls of all_gather and 341,120 bytes a step, should be 3 and 241,152.*stays until backward", keeps="near: memory"),
    Mistake("twice shards parameters and not the optimizer", ".gradient = all,\n               .optimizer = all",
            ".gradient = all,\n               .optimizer = shard", "twice: memory",
            r"refused: strategy twice: where parameters are sharded, the optimizer must be too"),  # so the library reads none of the file
    Mistake("seldom exchanges gradients", ".sync = {{kReplicateAxis, every_second_step}},", ".sync = {},", "seldom: the result",
            r"divided by 2 ranks|still exchange gradients", keeps="near: memory"),
]
STRATEGIES_PYTHON = [
    Mistake("an axis has another name", 'SHARD, ALL = ["shard"]', 'SHARD, ALL = ["shards"]', "the table is read",
            r"near: param_at_rest names the axis 'shards'; there are replicate and shard"),
    Mistake("seldom exchanges in every fourth step", '{"replicate": 2}', '{"replicate": 4}', "seldom: calls and bytes",
            r"calls of all_reduce and [\d,]+ bytes a step, should be 1.5 and 120,576", keeps="near: memory"),
    Mistake("twice is fsdp", '"param_at_rest": ALL, "param_after_forward": SHARD', '"param_at_rest": ALL, "param_after_forward": ALL',
            "twice: calls and bytes", r"so that backward gathers inside a host", keeps="twice: memory"),
]
WRAP_CPP = [
    Mistake("the prefetched unit is forgotten", "two = std::max(two, units[i - 1] + units[i]);", "two = std::max(two, units[i]);", "the same, 0.9 MB",
            r"gather 1,681,920 bytes at a time, 900,000 are allowed: the root, the unit that computes and the one that is prefetched",
            keeps="many tokens"),
    Mistake("latency is left out", "return port_ + situation_.latency;", "return port_;", "5 ms of latency, 1 GB/s",
            r"each of the 8 units pays the latency", keeps="many tokens"),
    Mistake("the fewest units are chosen", "if (best.empty() || seconds < least)", "if (seconds >= 0)", "many tokens",
            r"the first gather and the last reduction hide behind nothing", keeps="5 ms of latency, 1 GB/s"),
    Mistake("a block is left out", "units.push_back(std::min(size, blocks - begin))", "units.push_back(size)", "the same, 1.3 MB",
            r"have 9 blocks; the model has 8, each in one unit"),
]
WRAP_PYTHON = [
    Mistake("the limit is not looked at", " if bytes_at_once(situation, units) <= situation[\"unsharded_bytes\"]", "", "memory is never exceeded",
            r"gather [\d,]+ bytes at a time, 500,000 are allowed", keeps="many tokens"),
    Mistake("the fewest units are chosen", "key=lambda units: seconds(situation, units)", "key=len", "a fast link", r"hide behind nothing"),
    Mistake("latency is left out", "return port + situation[\"latency\"]", "return port", "5 ms of latency, 1 GB/s", r"pays the latency",
            keeps="many tokens"),
]
ANSWERS = [
    Mistake("the step before is named", '"4": {"step": 3', '"4": {"step": 2', "training 4: where", r"step is not '2': the first line of the report names it",
            keeps="training 4: what"),
    Mistake("a consequence is taken for the cause", '"cause": "a wrong divisor"', '"cause": "a lost microbatch"', "training 2: what",
            r"cause is not 'a lost microbatch': read what the report says below", keeps="training 2: where"),
    Mistake("zero2 for shard_grad_op", '"strategy": "shard_grad_op"', '"strategy": "zero2"', "training 8: which strategy",
            r"strategy is not 'zero2': compute the bytes", keeps="training 8: which term"),
    Mistake("an answer of another list", '"cause": "other settings of the optimizer"', '"cause": "the learning rate"', "training 6: what",
            r"choose one of: a lost microbatch, a wrong divisor"),
]
MISTAKES = {("ring", "cpp"): RING_CPP, ("ring", "python"): RING_PYTHON, ("fsdp", "cpp"): FSDP_CPP, ("fsdp", "python"): FSDP_PYTHON,
            ("ddp", "cpp"): DDP_CPP, ("ddp", "python"): DDP_PYTHON,
            ("zero", "cpp"): ZERO_CPP, ("zero", "python"): ZERO_PYTHON,
            ("strategies", "cpp"): STRATEGIES_CPP, ("strategies", "python"): STRATEGIES_PYTHON,
            ("wrap", "cpp"): WRAP_CPP, ("wrap", "python"): WRAP_PYTHON,
            ("answers", "cpp"): ANSWERS, ("answers", "python"): ANSWERS}
