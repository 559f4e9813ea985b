"""Judges assignment 7: find the bug. The answers are kept as digests."""

from __future__ import annotations

import hashlib
import json

POINTS = 16
CAUSES = ("a lost microbatch", "a wrong divisor", "a parameter left out of a bucket", "an extra optimizer step",
          "a parameter changed outside the optimizer", "other settings of the optimizer", "another order of additions",
          "a skipped all_reduce", "another seed", "swapped ranks")
STRATEGIES = ("zero1", "zero2", "fsdp", "hsdp", "shard_grad_op")
TERMS = ("volume", "latency", "overlap", "optimizer", "contention", "copies", "late", "transport", "rest")
LISTS = {"cause": CAUSES, "strategy": STRATEGIES, "term": TERMS}
DIGESTS: dict[str, dict[str, str]] = {  # by tests/assignments/planted_trainings.py
    "1": {"step": "84f04e2d759557caaf364087", "tensor": "4420e9db0f7a096dfb31b1bf", "cause": "6f1c224f55ea7d5bab7aac21"},
    "2": {"step": "5d2c81b82bb96d4814e11591", "tensor": "c7366ecbd4acfa18907f8731", "cause": "982c47c564b858fc5137a8a0"},
    "3": {"step": "32a823146a5110af77118418", "tensor": "890064260582e9c1cd1434a5", "cause": "7ec523a856ce697236fe84d4"},
    "4": {"step": "71fb34b75414b5128b3981d5", "tensor": "5c9e19c8af8f588f924b32ad", "cause": "043c4dd64f67ee32bd947a62"},
    "5": {"step": "e5b1121ceaf3fe7c49889f3b", "tensor": "f96f4137d9b2441eb57fe170", "cause": "a5206d5a27295ff1c05949a4"},
    "6": {"step": "f9845829ad2e05335a8a0371", "tensor": "a9e15367b7bcb6379adbddc2", "cause": "a5581b76c65412f49356ad16"},
    "7": {"strategy": "e9be46829ae1afa3332c89a8", "term": "e0909b2feee0949cf5d1b821"},
    "8": {"strategy": "39e224575855775caa1659b8", "term": "bcb90d74068c62823a56a6db"},
}
HINTS = {
    "step": "the first line of the report names it",
    "tensor": "the first line of the report names the first one that differs, as module.parameter",
    "cause": "read what the report says below: which operations differ, whether their inputs do, what the norms' ratio is, and the likely "
             "causes; then say what in a program would make exactly that",
    "strategy": "compute the bytes that each of the strategies sends more than ddp, and how long the links take for them; then run --why",
    "term": "it is the largest one in the table, by magnitude",
}


def digest(number: str, field: str, value: object) -> str:
    text = f"{number}.{field}={str(value).strip().lower()}"
    return hashlib.pbkdf2_hmac("sha256", text.encode(), b"tessera assignment 7", 20_000).hex()[:24]


def wrong(number: str, field: str, value: object) -> str:
    """What is wrong with an answer, or ""."""
    if value in (None, ""):
        return f"training {number}: {field} is not answered"
    known = LISTS.get(field)
    if known and str(value).strip().lower() not in known:
        return f"training {number}: {field} is '{value}'; choose one of: {', '.join(known)}"
    if digest(number, field, value) != DIGESTS[number][field]:
        return f"training {number}: {field} is not '{value}': {HINTS[field]}"
    return ""


def grade(student, worlds, report) -> None:
    try:
        answers = json.loads(student.file.read_text())
        assert isinstance(answers, dict)
    except (ValueError, AssertionError) as error:
        report.test("the answers are read", POINTS, [f"{student.file.name} is not a JSON object: {error}"])
        return
    for number, fields in DIGESTS.items():
        answer = answers.get(number)
        answer = answer if isinstance(answer, dict) else {}
        place = [text for field in fields if field not in ("cause", "term") for text in [wrong(number, field, answer.get(field))] if text]
        last = next(field for field in fields if field in ("cause", "term"))
        why = [text for text in [wrong(number, last, answer.get(last))] if text]
        report.test(f"training {number}: {'which strategy it is' if last == 'term' else 'where it parts'}", 1, place)
        report.test(f"training {number}: {'which term makes most of the gap' if last == 'term' else 'what is wrong'}", 1, why)
