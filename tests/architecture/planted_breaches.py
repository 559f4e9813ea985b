"""Negative control of architecture.py: a temporary tree with one breach of every rule, and valid code that resembles a breach."""

import pathlib
import tempfile

from architecture import ENGINE_METHODS, PATTERNS, TOOLS, all_breaches, circles

PLANTED = [  # rule, file, content
    ("layering", "src/base/a.cpp", '#include "tessera/comm/work.h"\n'),
    ("layering", "src/comm/a.cpp", '#include "tessera/nn/tensor.h"\n'),
    ("layering", "src/nn/a.cpp", '#include "tessera/comm/work.h"\n'),
    ("layering", "src/nn/b.h", '  #  include "tessera/fsdp/engine.h"\n'),
    ("layering", "src/fsdp/n.cpp", '#include "tessera/nn/module.h"\n'),
    ("model library", "src/fsdp/o.cpp", "void f(nn::Module& model);\n"),
    ("model library", "src/fsdp/p.cpp", 'if (name == "gpt2") {}\n'),
    ("layering", "backends/x/a.cpp", '#include "tessera/nn/tensor.h"\n'),
    ("layering", "backends/x/b.cpp", '#include "backends/y/b.h"\n'),
    ("layering", "plugins/x/a.cpp", '#include "tessera/nn/tensor.h"\n'),
    ("layering", "plugins/x/b.cpp", '#include "tessera/fsdp/engine/lease.h"\n'),
    ("layering", "src/base/b.cpp", '#include "tessera/plan/virtual_clock.h"\n'),
    ("layering", "src/comm/g.cpp", '#include "tessera/plan/network.h"\n'),
    ("layering", "src/nn/h.cpp", '#include "tessera/plan/kernel_costs.h"\n'),
    ("layering", "src/fsdp/n.cpp", '#include "tessera/plan/simulation.h"\n'),
    ("layering", "backends/x/f.cpp", '#include "tessera/plan/world.h"\n'),
    ("layering", "plugins/x/d.cpp", '#include "tessera/plan/simulation.h"\n'),
    ("layering", "assignments/x/a.cpp", '#include "tessera/fsdp/engine/lease.h"\n'),
    ("layering", "assignments/x/b.cpp", '#include "tessera/plan/simulation.h"\n'),
    ("layering", "src/fsdp/q.cpp", '#include "tessera/libtorch/engine.h"\n'),
    ("layering", "src/libtorch/a.cpp", '#include "tessera/nn/tensor.h"\n'),
    ("layering", "tools/d.cpp", '#include "tessera/libtorch/engine.h"\n'),
    ("vendor header", "src/fsdp/r.cpp", "#include <torch/torch.h>\n"),
    ("vendor header", "tools/e.cpp", "#include <ATen/ATen.h>\n"),
    ("public header", "src/libtorch/b.h", '#include "tessera/libtorch/hooks/boundary.h"\n'),
    ("layering", "tools/a.cpp", '#include "tests/harness/x.h"\n'),
    ("tools", "tools/cli/a.cpp", '#include "tools/train/options.h"\n'),
    ("tools", "tools/launch/a.h", '#include "tools/train/plan.h"\n'),
    ("tools", "tools/results/a.h", '#include "tools/pages/page.h"\n'),
    ("tools", "tools/results/b.h", "#include <CLI/CLI.hpp>\n"),
    ("tools", "tools/pages/a.cpp", '#include "tools/compare/compare.h"\n'),
    ("tools", "tools/train/a.cpp", '#include "tools/bench/runner.h"\n'),
    ("tools", "tools/plan/a.cpp", '#include "tools/compare/compare.h"\n'),
    ("tools", "tools/bench/a.cpp", '#include "tools/explain/explanation.h"\n'),
    ("tools", "tools/other/a.cpp", "#include <vector>\n"),
    ("spelling", "src/comm/b.cpp", '#include "work.h"\n'),
    ("vendor header", "src/comm/c.cpp", "#include <boost/asio.hpp>\n"),
    ("vendor header", "src/nn/c.cpp", "#include <cuda_runtime.h>\n"),
    ("vendor header", "backends/x/c.cpp", "#include <mpi.h>\n"),
    ("vendor header", "tests/comm/c.cpp", "#include <mpi.h>\n"),
    ("vendor header", "backends/x/d.cpp", "#include <nccl.h>\n"),
    ("vendor header", "tools/b.cpp", "#include <ucp/api/ucp.h>\n"),
    ("public header", "src/comm/d.h", "#include <nlohmann/json.hpp>\n"),
    ("public header", "src/comm/e.h", '#include "tessera/comm/core/x.h"\n'),
    ("public header", "src/nn/f.h", '#include "tessera/nn/kernels/cpu/simd-inl.h"\n'),
    ("environment", "src/comm/e.cpp", 'auto v = std::getenv("HOME");\n'),
    ("environment", "tools/c.cpp", 'auto v = secure_getenv("HOME");\n'),
    ("environment", "src/nn/e.cpp", "for (char** e = environ; *e; ++e) {}\n"),
    ("backend name", "src/comm/f.cpp", 'if (name == "shm") {}\n'),
    ("backend name", "src/fsdp/f.cpp", "int nccl = 0;\n"),
    ("device work", "src/nn/g.cpp", "context.stream().run([=] { *out = 1; });\n"),
    ("device work", "src/fsdp/m.cpp", "resources_.compute().run([=] { *out = 1; });\n"),
    ("host wait", "src/fsdp/g.cpp", "work.wait();\n"),
    ("host wait", "src/fsdp/h.cpp", "work->wait( );\n"),
    ("host wait", "src/fsdp/i.cpp", "work.wait_for(1ms);\n"),
    ("clock", "src/fsdp/j.cpp", "auto t = std::chrono::steady_clock::now();\n"),
    ("clock", "src/fsdp/k.cpp", "auto t = base::host_time_ns();\n"),
    ("raw copy", "src/fsdp/l.cpp", "std::memcpy(a, b, 4);\n"),
    ("strategy name", "src/fsdp/engine.cpp", "if (zero1) return;\n"),
    ("strategy name", "src/fsdp/engine/param_group.cpp", 'if (strategy.name == "fsdp") return;\n'),
    ("prediction", "src/base/c.cpp", "class VirtualClock;\n"),
    ("prediction", "src/comm/h.cpp", "// Its times are those of a task graph.\n"),
    ("prediction", "src/nn/i.h", "/// Kept in a cost table.\n"),
    ("prediction", "src/fsdp/o.cpp", "void f(plan::Step& step);\n"),
    ("prediction", "src/fsdp/p.cpp", "const bool is_simulated = true;\n"),
    ("strategy name", "src/plan/a.cpp", 'if (strategy.name == "fsdp") return;\n'),
    ("device work", "src/plan/b.cpp", "stream.run([=] { *out = 1; });\n"),
    ("clock", "src/plan/d.cpp", "auto t = std::chrono::steady_clock::now();\n"),
    ("spelling", "src/plan/c.cpp", '#include "tools/plan/step_plan.h"\n'),
    ("print or exit", "src/nn/d.cpp", 'std::cerr << "x";\n'),
    ("print or exit", "backends/x/e.cpp", "std::abort();\n"),
    ("print or exit", "plugins/x/c.cpp", 'printf("x");\n'),
    ("JSON without limits", "src/nn/q.cpp", "auto j = nlohmann::json::parse(text);\n"),
    ("JSON without limits", "tools/e.cpp", "auto j = ordered_json::parse(text);\n"),
    ("print without cleaning", "tools/f.cpp", 'fmt::print("{}", name);\n'),
    ("missing page", "src/nn/o.cpp", "// as docs/nowhere.md says\n"),
    ("missing page", "docs/o.md", "By the tree of DESIGN section 3.\n"),
    ("engine methods", "src/fsdp/engine.h",
     "class TESSERA_API Engine {\n public:\n" + "".join(f"  void f{i}();\n" for i in range(ENGINE_METHODS + 1)) + "};\n"),
    ("word", "src/nn/p.cpp", "// Nobody waits for it.\n"),
    ("word", "tools/d.cpp", "int colour_of_line = 0;\n"),
    ("length", "src/nn/long.cpp", "int x();\n" * 401),
    ("length", "examples/12_long.cpp", "int x();\n" * 101),
    ("length", "examples/parallel/long.cpp", "int x();\n" * 301),
]

SCATTERED = {"src/fsdp/a.cpp": "void One::f() {}\nvoid Two::f() {}\n", "src/fsdp/b.cpp": "int One::g() const {}\n  two = Two::f();\n"}

CLEAN = {
    "src/fsdp/engine.h": "class TESSERA_API Engine {\n public:\n  Engine();\n"
                         + "".join(f"  const A<B>& f{i}() const;\n" for i in range(ENGINE_METHODS)) + " private:\n  void more();\n};\n",
    "docs/page.md": "[here](page.md)\n",
    "src/base/env.cpp": 'auto v = std::getenv("X");\n',
    "src/base/ok.h": "#include <cstdint>\n#include <vector>\n",
    "src/comm/ok.cpp": '#include "tessera/base/env.h"\n#include <nlohmann/json.hpp>\n'
                       "// shm, tcp: a comment may say std::getenv\n/* nccl\n mpi */ int shm_open_flags = 1'000;  // mpi\n"
                       "boost::asio::ip::tcp::socket socket_;\ncommunicator.abort(reason);\n",
    "src/comm/bootstrap/ok.cpp": "#include <boost/asio.hpp>\n",
    "src/comm/core/ok.h": "#include <nlohmann/json.hpp>\n",
    "src/nn/kernels/x.cpp": '#include "hwy/foreach_target.h"\n#include "tessera/nn/kernels/cpu/simd-inl.h"\n',
    "src/nn/kernels/cpu/simd-inl.h": "#include <hwy/highway.h>\n",
    "src/fsdp/copier.cpp": "std::memcpy(a, b, 4);\n",
    "src/fsdp/strategy.cpp": 'auto x = "zero1"; int ddp;\n',
    "src/fsdp/ok.cpp": "namespace tessera::fsdp {}\nstream.wait(event);\nwork.wait_on(stream);\n// work.wait()\n",
    "src/plan/ok.cpp": '#include "tessera/fsdp/engine.h"\n#include "tessera/plan/world.h"\nclass VirtualClock;  // of a simulation\nevent.wait();\n',
    "backends/x/ok.cpp": '#include "backends/x/x.h"\n#include "x.h"\n',
    "backends/mpi/ok.cpp": "#include <mpi.h>\n",
    "tests/backends/mpi/ok.cpp": "#include <mpi.h>\n",
    "bench/peers/ok.cpp": "#include <mpi.h>\n",
    "tools/ok.cpp": '#include "tools/launch/launcher.h"\n#include "tessera/plan/simulation.h"\nstd::cout << 1;\n',
    "tools/plan/ok.cpp": '#include "tools/plan/a.h"\n#include "tools/train/plan.h"\n#include "tools/version.h"\n#include <CLI/CLI.hpp>\n',
    "src/nn/kernels/cpu/cpu_kernels.cpp": "stream.run([=] { *out = 1; });\n",
    "src/base/json/ok.cpp": "return Json::parse(text, check);\n",
    "tools/cli/progress_line.cpp": 'fmt::print(stderr, "{}", line);\n',
    "src/nn/full.cpp": "int x();\n" * 400,
}


def found_in(files):
    with tempfile.TemporaryDirectory() as scratch:
        root = pathlib.Path(scratch)
        for path, content in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(content)
        return all_breaches(root)


def main():
    failures = [f"clean code reported: {breach}" for breach in found_in(CLEAN)]
    for rule, path, content in PLANTED:
        found = found_in({path: content})
        if [breach[2] for breach in found] != [rule]:
            failures.append(f"{path}: planted '{rule}' in {content[:50]!r}, found {found}")
    if [breach[2] for breach in found_in(SCATTERED)] != ["one source"]:
        failures.append(f"a class in two sources is not found: {found_in(SCATTERED)}")
    if [folder for folder, *_ in circles(TOOLS | {"train": TOOLS["train"] | {"bench"}})] != ["tools/train"] or list(circles(TOOLS)):
        failures.append("a circle among the folders of tools/ is not found, or one where there is none")
    untested = {rule for rule, *_ in PATTERNS} - {rule for rule, *_ in PLANTED}
    failures += [f"no breach planted for '{rule}'" for rule in untested]
    print("\n".join(failures) or f"{len(PLANTED)} planted breaches found, {len(CLEAN)} clean files left alone")
    raise SystemExit(1 if failures else 0)


main()
