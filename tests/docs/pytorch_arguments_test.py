"""docs/pytorch-to-tessera.md has a row for every argument that pytorch_arguments.json lists, and no other; the options that its rows
name exist. With --collect it prints that list from the PyTorch that is installed, to be compared by hand after a release."""

import json
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def rows(page):
    """The first cells of each section's tables, and the cells about this project."""
    sections = {}
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        title, _, text = section.partition("\n")
        cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("| `")]
        sections[title] = {row[0].strip().strip("`"): row[1].strip() for row in cells}
        assert len(sections[title]) == len(cells), f"{title}: an argument has two rows"
    return sections


def problems(page, arguments, help_text, headers):
    found = []
    sections = rows(page)
    for title, names in arguments.items():
        have = sections.get(title, {})
        found += [f"{title}: {name} has no row" for name in names if name not in have]
        found += [f"{title}: {name} is no argument of PyTorch" for name in have if name not in names]
        found += [f"{title}: {name} has no counterpart and no reason" for name, here in have.items() if not here]
        for name, here in have.items():
            for option in re.findall(r"--[a-z][a-z0-9-]*", here):
                if not re.search(re.escape(option) + r"[ ,{=]", help_text):
                    found.append(f"{title}: {name}: train has no option {option}")
            for field in re.findall(r"`\.([a-z_0-9]+)", here):
                if not re.search(rf"\b{field}\b *[;={{]", headers):
                    found.append(f"{title}: {name}: no options have a field {field}")
    return found


def collect():
    import inspect

    import torch
    from torch.distributed import fsdp
    from torch.distributed.fsdp import wrap
    groups = {
        "FullyShardedDataParallel": [fsdp.FullyShardedDataParallel.__init__],
        "MixedPrecision and MixedPrecisionPolicy": [fsdp.MixedPrecision, fsdp.MixedPrecisionPolicy],
        "CPUOffload and CPUOffloadPolicy": [fsdp.CPUOffload, fsdp.CPUOffloadPolicy],
        "Wrap policies": [wrap.size_based_auto_wrap_policy, wrap.transformer_auto_wrap_policy, wrap.lambda_auto_wrap_policy, wrap.ModuleWrapPolicy],
        "fully_shard": [fsdp.fully_shard],
        "DistributedDataParallel": [torch.nn.parallel.DistributedDataParallel.__init__],
        "Adam, AdamW and SGD": [torch.optim.Adam.__init__, torch.optim.AdamW.__init__, torch.optim.SGD.__init__],
    }
    listed = {title: list(dict.fromkeys(name for one in members for name in inspect.signature(one).parameters if name != "self"))
              for title, members in groups.items()}
    listed["ShardingStrategy and BackwardPrefetch"] = [*fsdp.ShardingStrategy.__members__, *fsdp.BackwardPrefetch.__members__]
    print(json.dumps({"version": torch.__version__} | listed, indent=1))


def main():
    if sys.argv[1] == "--collect":
        return collect()
    root, tool = pathlib.Path(sys.argv[1]), sys.argv[2]
    arguments = json.loads((HERE / "pytorch_arguments.json").read_text())
    del arguments["version"]
    page = (root / "docs" / "pytorch-to-tessera.md").read_text()
    help_text = subprocess.run([tool, "train", "--help"], check=True, capture_output=True, text=True).stdout
    headers = "".join((root / "src" / name).read_text() for name in ("fsdp/engine_options.h", "base/optimizer.h"))
    found = problems(page, arguments, help_text, headers)
    assert not found, "\n".join(found)
    # Controls: an argument without a row, a row without a counterpart, an option and a field that do not exist.
    for old, new, message in (("| `dampening` |", "| `damping` |", "dampening has no row"),
                              ("| `module` | first argument of `Engine` |", "| `module` | |", "no counterpart"),
                              ("`--cpu-offload`", "`--offload-cpu`", "no option --offload-cpu"),
                              ("`.ignored`", "`.ignores`", "a field ignores")):
        assert any(message in one for one in problems(page.replace(old, new), arguments, help_text, headers)), message


if __name__ == "__main__":
    main()
