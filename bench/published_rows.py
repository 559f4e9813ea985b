"""Measurements that others published: reads the rows of plan_published.py."""

import json
import pathlib

WHOLE_NUMBERS = ("n_gpus", "micro_batch", "accum", "seq")
NUMBERS = ("global_batch", "tokens_per_s_per_gpu", "step_time_s", "samples_per_s", "tflops_per_gpu")
TEXTS = ("framework", "strategy", "act_ckpt", "attention", "prefetch", "overlap", "optimizer", "reduce_dtype", "precision", "gpu",
         "why", "loc", "outlier", "reach", "role", "wrap")
MOST_RANKS = 1 << 20


class Problem(Exception):
    """A mistake in the input, in one line."""


def brief(value):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Check:
    """The fields of one object of a row."""

    def __init__(self, file, row, fields):
        self.place, self.fields = f"{file}: row {row}", fields

    def fail(self, problem):
        raise Problem(f"{self.place}: {problem}")

    def number(self, key, whole=False):
        """Absent, or a number above 0."""
        value = self.fields.get(key)
        if value is None:
            return
        if not is_number(value) or not 0 < value <= (1e9 if whole else 1e15) or (whole and value != int(value)):
            self.fail(f"{key} is {brief(value)}; expected a {'whole number' if whole else 'number'} above 0")

    def text(self, key):
        value = self.fields.get(key)
        if value is not None and not isinstance(value, str):
            self.fail(f"{key} is {brief(value)}; expected a text")

    def training(self):
        for key in WHOLE_NUMBERS:
            self.number(key, whole=True)
        for key in NUMBERS:
            self.number(key)
        if (self.fields.get("n_gpus") or 0) > MOST_RANKS:
            self.fail(f"n_gpus is {brief(self.fields['n_gpus'])}; at most {MOST_RANKS} are supported")
        for key in TEXTS:
            self.text(key)
        if self.fields.get("reach") not in (None, "", "yes", "partial", "no"):
            self.fail(f"reach is {brief(self.fields['reach'])}; expected yes, partial or no")

    def model(self):
        for key in ("layers", "hidden", "heads", "vocab"):
            if self.fields.get(key) is None:
                self.fail(f"model.{key} is missing; expected a whole number above 0")
        self.place += ": model"
        for key in ("layers", "hidden", "heads", "vocab", "kv_heads", "ffn"):
            self.number(key, whole=True)
        for key in ("family", "name"):
            self.text(key)
        if self.fields.get("tied") not in (None, True, False) or is_number(self.fields.get("tied")):
            self.fail(f"tied is {brief(self.fields['tied'])}; expected true or false")

    def machine(self):
        self.place += ": cluster"
        self.text("gpu")
        self.number("gpus_per_node", whole=True)
        self.number("inter_Gbps_per_node")

    def referred(self, key, objects):
        """What the row refers to by id, or holds in place; None if the field is absent."""
        value = self.fields.get(key)
        if value is None or isinstance(value, dict):
            return value
        if not isinstance(value, str):
            self.fail(f"{key} is {brief(value)}; expected an id or an object")
        if value not in objects.get(key, {}):
            self.fail(f"{key} is {brief(value)}, which the file does not have")
        return objects[key][value]


def name_of(value, otherwise):
    """The id of something that a row refers to; objects in place may have none."""
    if isinstance(value, str):
        return value
    names = [value[key] for key in ("id", "name") if isinstance(value.get(key), str)] if value else []
    return names[0] if names else otherwise


class Row:
    """A training row, joined with its source's defaults, its model and its cluster."""

    def __init__(self, training, objects, file):
        self.id = training["id"]
        if training.get("source") is None:
            Check(file, self.id, {}).fail("source is missing; expected an id or an object")
        source = Check(file, self.id, training).referred("source", objects)
        defaults = source.get("defaults")
        if defaults is not None and not isinstance(defaults, dict):
            Check(file, self.id, {}).fail("source.defaults is no object")
        self.fields = {**(defaults or {}), **training}
        check = Check(file, self.id, self.fields)
        check.training()
        self.reach, self.calibrates = self.text("reach"), self.text("role") == "calibrate"
        self.source, self.cluster = name_of(training["source"], self.id), name_of(self.fields.get("cluster"), "")
        self.machine, self.model = check.referred("cluster", objects), check.referred("model", objects)
        if self.machine is not None:
            Check(file, self.id, self.machine).machine()
        if self.model is not None:
            Check(file, self.id, self.model).model()
        elif self.reach != "no":
            check.fail("model is missing; expected an id or an object")

    def text(self, key):
        return self.fields.get(key) or ""

    def number(self, key, otherwise=None):
        value = self.fields.get(key)
        return otherwise if value is None else value


def refuse(constant):
    raise ValueError(f"{constant} is no number of JSON")


def objects_of(text, file):
    """A JSON list, or one object per line."""
    def parse(part, place):
        try:
            return json.loads(part, parse_constant=refuse)
        except (ValueError, RecursionError) as error:
            raise Problem(f"'{place}' is not JSON: {' '.join(str(error).split())}") from None
    if not text.strip():
        raise Problem(f"{file}: is empty; expected a list of rows")
    if text.lstrip()[0] == "[":
        return parse(text, file)
    return [parse(line, f"{file}: line {i + 1}") for i, line in enumerate(text.split("\n")) if line.strip()]


def parse_rows(text, file):
    objects, training = {}, []
    for i, thing in enumerate(objects_of(text, file)):
        if not isinstance(thing, dict):
            Check(file, i + 1, {}).fail(f"is {brief(thing)}; expected an object")
        check = Check(file, i + 1, thing)
        if thing.get("id") is None:
            check.fail("id is missing; expected a text")
        check.text("id")
        check.text("kind")
        kind = thing.get("kind") or "training"
        if thing["id"] in objects.setdefault(kind, {}):
            Check(file, thing["id"], {}).fail("id is given twice")
        objects[kind][thing["id"]] = thing
        if kind == "training":
            training.append(thing)
    if not training:
        raise Problem(f'{file}: has no training rows; expected objects with "kind": "training"')
    return [Row(row, objects, file) for row in training]


def read_rows(path):
    try:
        return parse_rows(pathlib.Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise Problem(f"{path}: {getattr(error, 'strerror', None) or error}") from None
