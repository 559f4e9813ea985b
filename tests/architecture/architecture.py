"""Checks the source tree against the rules of the architecture.

    architecture.py ROOT        prints `path:line: rule: what` for each breach and exits with 1 if there is one

`ARROWS` lists what each folder may include. planted_breaches.py proves that one breach of every rule is found.
"""

import pathlib
import re
import sys

ARROWS = {  # folder: the layers of src/ that it may include
    "src/base": {"base"},
    "src/comm": {"comm", "base"},
    "src/nn": {"nn", "base"},
    "src/fsdp": {"fsdp", "comm", "base"},
    "src/fsdp/nn_model": {"fsdp", "nn", "comm", "base"},  # the engine's view of an nn model, and its training task
    "src/plan": {"plan", "fsdp", "nn", "comm", "base"},
    "src/libtorch": {"libtorch", "fsdp", "comm", "base"},
    "backends": {"comm", "base"},
    "plugins": {"fsdp", "comm", "base"},
    "tools": {"plan", "fsdp", "nn", "comm", "base"},
    "examples": {"libtorch", "plan", "fsdp", "nn", "comm", "base"},
    "assignments": {"fsdp", "nn", "comm", "base"},
}
TOOLS = {  # folder of tools/, lowest first: those before it that its files may include. main.cpp may include all of them.
    "cli": set(),  # the terminal, files, quantities, checks of options
    "launch": {"cli"},  # ranks as processes
    "results": {"cli"},  # what runs leave: data, their JSON and text; no command
    "pages": {"cli", "results"},  # HTML of results
    "train": {"cli", "launch", "results"},
    "plan": {"cli", "results", "pages", "train"},
    "compare": {"cli", "launch", "results", "pages", "train", "plan"},
    "bench": {"cli", "launch", "results", "pages", "train", "plan"},
    "explain": {"cli", "launch", "results", "pages", "train", "plan"},
    "checkpoint": {"cli", "train"},
    "doctor": {"cli", "launch"},
    "info": {"cli", "launch", "train"},
    "report": {"cli", "launch", "results", "pages"},
}
WITHOUT_COMMANDS = ("tools/results/", "tools/pages/")  # data, and pages of them
# Installed headers lie directly in a layer's folder, or in these; headers ending in -inl.h are not installed.
PUBLIC = re.compile(r"^(src|tessera)/((base|comm|nn|fsdp|plan|libtorch)|nn/(layers|models|ops|kernels))/[^/]+(?<!-inl)\.h$")
VENDORS = [  # header, and the folders that may include it
    (re.compile(r"^(cuda|cublas|cudnn|curand|nvrtc|nvtx|nvml)\w*(/.*)?\.(h|hpp)$|^cub/|^cooperative_groups"),
     ("src/base/cuda/", "src/comm/kernels/cuda/", "src/nn/kernels/cuda/", "backends/nccl/", "tests/", "bench/")),
    (re.compile(r"^nccl(_\w+)?\.h$"), ("backends/nccl/",)),
    (re.compile(r"^mpi(-ext|cxx)?\.h$"), ("backends/mpi/", "tests/backends/mpi/", "bench/peers/")),
    (re.compile(r"^(ucp|uct|ucs|ucm|ucc)/"), ("backends/ucx/",)),
    (re.compile(r"^(torch|ATen|c10)/"), ("src/libtorch/", "tests/libtorch/", "examples/11_libtorch.cpp", "bench/libtorch_step.cpp")),
    (re.compile(r"^(boost/)?asio([./]|$)"), ("backends/tcp/", "src/comm/bootstrap/", "tests/backends/tcp/")),
]
STANDARD = re.compile(r"^[a-z0-9_]+$|^c(assert|errno|math|std\w+|string|time|float|limits|inttypes|signal)$")
LIBRARY = ("src/", "backends/", "plugins/")
COPY_HELPER = re.compile(r"^src/fsdp/(.*/)?copier\.(h|cpp)$")
MODEL_ADAPTER = re.compile(r"^src/fsdp/nn_(model|task)\.(h|cpp)$")
STRATEGY_FILE = re.compile(r"^src/fsdp/strategy[^/]*\.(h|cpp)$|^src/fsdp/strategy/")
STRATEGY_NAME = re.compile(r'\b(ddp|zero1|zero2|hsdp|shard_grad_op|no_shard|full_shard|hybrid_shard)\b|"fsdp"')
PAGE = re.compile(r"([\w-]+\.md)\b|\bDESIGN\b")
PROSE = {".h", ".cpp", ".cu", ".cuh", ".py", ".md", ".cmake", ".txt"}
LINES, EXAMPLE_LINES, PROGRAM_LINES = 400, 100, 300
ENGINE_METHODS = 20  # public ones of fsdp::Engine, beside constructors and destructor
# Words for which docs/glossary.md has others; in identifiers and comments.
WORDS = re.compile(r"(?<![a-zA-Z])(ledger|foretell|heed|settle[ds]?|stir|nobody|somebody|whoever|himself|colour|crew|booked|brain|sleeper)(?![a-zA-Z])", re.I)
# What src/plan alone predicts with: the layers below it contain and name none of it, in comments either.
PREDICTION = re.compile(r"virtual.?clock|task.?graph|cost.?table|cost.?model|simulat|tessera/plan/|\bplan::", re.I)
BELOW_PLAN = ("src/base/", "src/comm/", "src/nn/", "src/fsdp/")
METHOD = re.compile(r"^  (?:[\w:<>,&*\[\] ]+ [*&]?)?(~?\w+)\(", re.M)
DEFINITION = re.compile(r"^(?! |return )(?:[\w:<>,&* ]+ [*&]?)?((?:[a-z]\w*::)*)([A-Z]\w+)::(?:\w+::)*~?\w+\(", re.M)

# (rule, pattern, folders, exceptions); the patterns apply to code without comments.
PATTERNS = [
    ("environment", re.compile(r"\b(getenv|secure_getenv)\b|(?<![\w/])environ\b"), LIBRARY + ("tools/", "examples/"),
     re.compile(r"^src/base/env\.cpp$")),
    ("backend name", re.compile(r"(?<!ip::)(?<!/dev/)\b(shm|tcp|ucx|mpi|nccl)\b"), ("src/",), None),
    ("device work", re.compile(r"(\bstream\w*|\bcompute)(\(\))?\s*(\.|->)\s*run\s*\("), ("src/nn/", "src/fsdp/", "src/plan/"),
     re.compile(r"^src/nn/kernels/cpu/cpu_kernels\.cpp$")),  # host code that accesses tensors' memory
    ("host wait", re.compile(r"(\.|->)\s*wait\s*\(\s*\)|\bwait_for\s*\("), ("src/fsdp/",), None),
    ("clock", re.compile(r"\b\w+_clock\b|\bclock_gettime\b|\bgettimeofday\b|\bhost_time_ns\b|\bstd::time\b"), ("src/fsdp/", "src/plan/"),
     re.compile(r"^src/plan/world\.cpp$")),  # the deadlines of Work,
    ("raw copy", re.compile(r"\b(memcpy|memmove)\b"), ("src/fsdp/",), COPY_HELPER),
    ("model library", re.compile(r"\bnn::|\b(gpt\w*|llama\w*)\b", re.I), ("src/fsdp/",), MODEL_ADAPTER),
    ("strategy name", STRATEGY_NAME, ("src/fsdp/", "src/plan/"), STRATEGY_FILE),
    ("JSON without limits", re.compile(r"json::parse\s*\("), LIBRARY + ("tools/",),  # base::parse_json() has limits
     re.compile(r"^src/base/json/|^src/nn/models/config_json\.cpp$"  # its own text
                r"|^tools/(cli/output|train/step_recorder)\.cpp$")),  # messages of ranks
    ("print without cleaning", re.compile(r"\bfmt::print\b"), ("tools/",),  # print_clean() escapes control characters
     re.compile(r"^tools/(cli/progress_line|train/step_progress)\.cpp$")),
    ("print or exit", re.compile(r"\bstd::(cout|cerr|clog|printf|puts|exit|abort|terminate|quick_exit)\b|\b(f?printf|puts|perror)\s*\("
                                 r"|(?<![\w>.])::?exit\s*\("), LIBRARY, None),
]
TOKEN = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\((?:.|\n)*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.S)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)


def without_comments(text):
    def keep(match):
        token = match.group(0)
        return re.sub(r"[^\n]", " ", token) if token.startswith(("//", "/*")) else token
    return TOKEN.sub(keep, re.sub(r"(?<=\d)'(?=\d)", "_", text))  # digit separators don't begin character literals


def owner(path):
    """The key of ARROWS that governs a file, or None."""
    if MODEL_ADAPTER.match(path):
        return "src/fsdp/nn_model"
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "src" else parts[0]


def is_public_header(path):
    return path.startswith("src/") and PUBLIC.match(path)


def is_internal(name):
    return name.startswith("tessera/") and not PUBLIC.match(name)


def include_breaches(path, bracket, name):
    """The rules that an include line breaks, as (rule, text)."""
    for pattern, allowed in VENDORS:
        if pattern.search(name) and not path.startswith(allowed):
            yield "vendor header", f"<{name}> belongs to {', '.join(allowed)}"
    if is_public_header(path):
        own = path.startswith("src/libtorch/") and name.startswith("torch/")
        if not name.startswith("tessera/") and not STANDARD.match(name) and not own:
            yield "public header", f"<{name}> is not part of the standard library; move this header to a folder below its layer"
        if is_internal(name):
            yield "public header", f'"{name}" is not installed, a public header can\'t include it'
    arrows = ARROWS.get(owner(path))
    if arrows is None or bracket != '"':
        return
    parts = name.split("/")
    if parts[0] == "tessera":
        if parts[1] not in arrows:
            yield "layering", f'{owner(path)} may not include "{name}"'
        if owner(path) == "plugins" and parts[1] == "fsdp" and is_internal(name):
            yield "layering", f'plugins see only the public headers of fsdp, not "{name}"'
        if owner(path) == "assignments" and is_internal(name):
            yield "layering", f'assignments see only public headers, not "{name}"'
    elif name.startswith("hwy/"):  # Highway's headers for repeated inclusion need quotes
        return
    elif path.startswith("src/"):
        yield "spelling", f'"{name}" is spelled "tessera/..." inside src/'
    elif parts[0] in ("backends", "plugins", "tools", "tests", "bench", "examples", "assignments", ".."):
        if parts[:2] != path.split("/")[:2] and not (parts[0] == "tools" and path.startswith("tools/")):
            yield "layering", f'{path} may not include "{name}"'


def tool_breaches(path, name):
    """The rules of TOOLS that an include line of a file in a folder of tools/ breaks, as (rule, text)."""
    folder, other = path.split("/")[1], name.split("/")[1:-1]
    if folder not in TOOLS:
        yield "tools", f"folder {folder} is not in TOOLS of architecture.py"
    elif name.startswith("tools/") and other and other[0] != folder and other[0] not in TOOLS[folder]:
        yield "tools", f'tools/{folder} may not include "{name}"'
    if name.startswith("CLI/") and path.startswith(WITHOUT_COMMANDS):
        yield "tools", f"<{name}> is for commands; {folder} has none"


def circles(arrows):
    """Every folder that may include one that is not before it, in the form of breaches()."""
    before = set()
    for folder, others in arrows.items():
        for other in sorted(others - before):
            yield f"tools/{folder}", 1, "tools", f"may include {other}, which is not before it in TOOLS: a circle"
        before.add(folder)


def breaches(root):
    """Every breach below root as (path, line, rule, text)."""
    folders = ("src", "backends", "plugins", "tools", "examples", "assignments", "tests", "bench")
    files = sorted(f for folder in folders for f in (root / folder).rglob("*") if f.suffix in (".h", ".cpp", ".cu", ".cuh"))
    for file in files:
        path = file.relative_to(root).as_posix()
        text = file.read_text()
        code = without_comments(text)
        limit = EXAMPLE_LINES if re.match(r"examples/\d", path) else PROGRAM_LINES if path.startswith("examples/") else LINES
        if len(text.splitlines()) > limit:
            yield path, len(text.splitlines()), "length", f"more than {limit} lines"
        for match in INCLUDE.finditer(code):
            line = code.count("\n", 0, match.start(2)) + 1
            for rule, what in include_breaches(path, *match.groups()):
                yield path, line, rule, what
            if re.match(r"tools/\w+/", path):
                for rule, what in tool_breaches(path, match.group(2)):
                    yield path, line, rule, what
        if path.startswith(LIBRARY + ("tools/",)):
            for number, line in enumerate(text.split("\n"), 1):
                for match in WORDS.finditer(line):
                    yield path, number, "word", f"'{match.group(0)}': docs/glossary.md has the word for it"
        if path.startswith(BELOW_PLAN):
            for number, line in enumerate(text.split("\n"), 1):
                for match in PREDICTION.finditer(line):
                    if not INCLUDE.match(line):
                        yield path, number, "prediction", f"'{match.group(0)}' belongs to src/plan"
        body = INCLUDE.sub("", code) if path.startswith("src/") else code
        for rule, pattern, where, exempt in PATTERNS:
            if not path.startswith(where) or (exempt and exempt.search(path)):
                continue
            for number, line in enumerate(body.split("\n"), 1):
                for match in pattern.finditer(line):
                    yield path, number, rule, f"'{match.group(0).strip()}'"


def missing_pages(root):
    """Every mention of a Markdown page that is not in the tree, in the form of breaches()."""
    folders = ("", "src", "backends", "plugins", "tools", "examples", "assignments", "tests", "bench", "docs", "scripts", "cmake")
    files = sorted(f for folder in folders for f in ((root / folder).rglob("*") if folder else root.glob("*")) if f.is_file())
    pages = {f.name for f in files if f.suffix == ".md"}
    for file in files:
        path = file.relative_to(root).as_posix()
        if file.suffix not in PROSE or path.startswith(("tests/architecture/", "tests/docs/")) or "/data/" in path:
            continue
        for number, line in enumerate(file.read_text().split("\n"), 1):
            for match in PAGE.finditer(line):
                if match.group(1) not in pages:
                    yield path, number, "missing page", f"'{match.group(0)}' is not in the repository"


def crowded_engine(root):
    """The breach of an Engine with too many public methods, in the form of breaches()."""
    path = root / "src" / "fsdp" / "engine.h"
    if not path.exists():
        return
    code = without_comments(path.read_text())
    public = code[code.index("class TESSERA_API Engine {"):].split(" private:")[0]
    methods = {name for name in METHOD.findall(public) if name.lstrip("~") not in ("Engine", "operator")}
    if len(methods) > ENGINE_METHODS:
        yield "src/fsdp/engine.h", 1, "engine methods", f"{len(methods)} public methods, more than {ENGINE_METHODS}"


def scattered_classes(root):
    """Every class with member functions in several sources of a folder, in the form of breaches()."""
    sources = {}
    for folder in ("src", "backends", "plugins", "tools"):
        for file in sorted((root / folder).rglob("*.cpp")):
            path = file.relative_to(root).as_posix()
            for space, name in DEFINITION.findall(without_comments(file.read_text())):
                sources.setdefault((owner(path) if folder == "src" else "/".join(path.split("/")[:2]), space, name), set()).add(path)
    for (_, _, name), paths in sorted(sources.items()):
        if len(paths) > 1:
            yield sorted(paths)[1], 1, "one source", f"{name} is also defined in {sorted(paths)[0]}"


def all_breaches(root):
    return [*breaches(root), *missing_pages(root), *crowded_engine(root), *scattered_classes(root), *circles(TOOLS)]


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    if not (root / "src" / "base").is_dir():
        raise SystemExit(f"{root} is not the source tree")
    found = all_breaches(root)
    for path, line, rule, text in found:
        print(f"{path}:{line}: {rule}: {text}")
    print(f"{len(found)} breaches")
    raise SystemExit(1 if found else 0)


if __name__ == "__main__":
    main()
