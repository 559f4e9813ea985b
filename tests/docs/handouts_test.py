"""What teachers have: the sums on the page of formulas, its print on one page, the slides, and wrong answers for each question.

handouts_test.py ROOT
"""

import html.parser
import pathlib
import re
import sys
import tempfile

sys.dont_write_bytecode = True  # the scripts lie in the source tree
sys.path.insert(0, str(pathlib.Path(sys.argv[1]) / "docs" / "learn"))
import handout  # noqa: E402
import slides  # noqa: E402

LEARN = pathlib.Path(sys.argv[1]) / "docs" / "learn"


def wrong_sums(page):
    """The sums of a page that are not so, to the digits shown."""
    found = []
    for text in re.findall(r'class="sum">([^<]+)<', page):
        left, right = text.replace(",", "").replace("×", "*").replace("−", "-").split("=")
        if not re.fullmatch(r"[0-9. */+()-]+", left):
            raise SystemExit(f"'{text}': no sum")
        digits = len(right.strip().partition(".")[2])
        if round(eval(left), digits) != float(right):  # only digits and operators, see above
            found.append(text)
    return found


class Slides(html.parser.HTMLParser):
    """Counts the slides of a file, and what it would load."""

    def __init__(self, page):
        super().__init__()
        self.slides = self.items = self.pictures = 0
        self.loaded = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.slides += tag == "section"
        self.items += tag == "li"
        for name, value in attributes:
            if name in ("src", "href"):
                self.pictures += value.startswith("data:image/svg+xml;base64,")
                self.loaded += [] if value.startswith("data:") else [value]


def check_slides():
    lessons = sorted(LEARN.glob("[0-9]-*.md"))
    pages = [path.read_text() for path in lessons]
    read = Slides(slides.document(pages))
    if read.loaded:
        raise SystemExit(f"slides load {read.loaded}")
    pictures = sum(len(re.findall(r"^!\[[^\]]*\]\([\w-]+\.svg\)$", page, flags=re.M)) for page in pages)
    if read.pictures != pictures or pictures < len(lessons):
        raise SystemExit(f"{read.pictures} pictures on slides, {pictures} in lessons")
    for path, page in zip(lessons, pages):
        one = slides.document([page])
        questions, answers = (one.split(f"<h2>{heading}</h2>")[1].split("</section>")[0].count("<li>") for heading in ("Predict", "Answers"))
        if questions != answers or questions < 3:
            raise SystemExit(f"{path.name}: {questions} questions and {answers} answers on slides")
    try:  # Negative control: a lesson without its last part.
        slides.document([pages[0].split("\n## Remember")[0]])
    except ValueError:
        return
    raise SystemExit("control: a lesson without a part is not seen")


def unanswered(teachers, lessons):
    """(lesson, question) without a wrong answer in the tables for teachers."""
    found = []
    for path in lessons:
        predict = slides.part(path.read_text(), "Predict").partition("<details>")[0]
        table = re.search(rf"^\*\*Lesson {path.name[0]}\*\*$(.*?)(?=^\*\*|^## |\Z)", teachers, flags=re.M | re.S)
        rows = re.findall(r"^\| (\d) ", table[1] if table else "", flags=re.M)
        found += [(path.name, number) for number in re.findall(r"^(\d)\. ", predict, flags=re.M) if number not in rows]
    return found


def check_teachers():
    teachers, lessons = (LEARN / "teachers.md").read_text(), sorted(LEARN.glob("[0-9]-*.md"))
    if missing := unanswered(teachers, lessons):
        raise SystemExit(f"teachers.md has no wrong answer for {missing}")
    if not unanswered(teachers.replace("| 4 weights |", "| 9 weights |"), lessons):
        raise SystemExit("control: a question without a wrong answer is not seen")


def check_print():
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "formulas.pdf"
        handout.write(file)
        count = len(re.findall(rb"/Type\s*/Page\b", file.read_bytes()))
    if count != 1:
        raise SystemExit(f"formulas.html needs {count} pages of paper")


def main():
    page = (LEARN / "formulas.html").read_text()
    if wrong := wrong_sums(page):
        raise SystemExit(f"not so: {wrong}")
    if len(re.findall('class="sum"', page)) < 5 or not wrong_sums(page.replace("2,522,880", "2,522,881")):
        raise SystemExit("control: a wrong sum is not seen")
    check_slides()
    check_teachers()
    if not handout.browser():
        raise SystemExit("no Chromium, which prints the page of formulas: scripts/setup --tests installs it")
    check_print()


main()
