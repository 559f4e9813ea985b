"""The lessons as slides, one HTML file that needs no network: slides.py OUT.html [LESSON ..].

A lesson gives its question, what to predict, its commands, its pictures, the answers and the three lines to remember. In a browser the
arrow keys, Space, Home and End turn the slides, F shows them on the whole screen, and the address (#12) names one. Printed, each is a page.
"""

import base64
import html
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Why FSDP is not DDP: slides</title><style>
:root{{color-scheme:light dark;--paper:#fff;--ink:#1c2024;--soft:#5c6670;--panel:#f2f4f7;--mark:#0072b2}}
@media (prefers-color-scheme:dark){{:root{{--paper:#15181b;--ink:#e6e9ec;--soft:#9aa5b0;--panel:#20262b;--mark:#3d9bd8}}}}
*{{box-sizing:border-box}} body{{margin:0;background:var(--paper);color:var(--ink);font:clamp(16px,2.1vw,30px)/1.4 system-ui,sans-serif}}
section{{min-height:100vh;padding:4vh 5vw;display:flex;flex-direction:column;justify-content:center}}
.one section{{display:none}} .one section.now{{display:flex}}
h1{{font-size:1.9em;margin:0 0 .5em}} h2{{font-size:1.1em;margin:0 0 .8em;color:var(--mark)}} p,ol,ul{{margin:0 0 .6em}} li{{margin-bottom:.4em}}
pre,code{{font-family:ui-monospace,monospace;font-size:.82em}} pre{{background:var(--panel);padding:.7em;overflow-x:auto;font-size:.62em;line-height:1.35}}
code{{background:var(--panel);padding:0 .2em}} pre.run{{white-space:pre-wrap}} img{{display:block;width:100%;max-height:82vh;object-fit:contain}}
footer{{position:fixed;right:1vw;bottom:1vh;font-size:13px;color:var(--soft)}}
@media print{{@page{{size:A4 landscape;margin:8mm}} body{{font-size:16px}} section,.one section{{display:flex;min-height:0;height:180mm;break-after:page}} footer{{display:none}}}}
</style></head><body>
{slides}
<footer></footer><script>
const all = [...document.querySelectorAll('section')], foot = document.querySelector('footer');
const wanted = () => Math.min(all.length, Math.max(1, parseInt(location.hash.slice(1)) || 1));
let now = wanted();
function show(n) {{
  now = Math.min(all.length, Math.max(1, n));
  all.forEach((slide, i) => slide.classList.toggle('now', i + 1 === now));
  const slide = all[now - 1];
  slide.style.fontSize = '';
  for (let size = 1; slide.scrollHeight > innerHeight && size > 0.5; size -= 0.05) slide.style.fontSize = size + 'em';
  foot.textContent = `${{now}} / ${{all.length}}`;
  history.replaceState(null, '', '#' + now);
}}
document.body.classList.add('one');
document.addEventListener('keydown', event => {{
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const to = {{ArrowRight: now + 1, ArrowDown: now + 1, PageDown: now + 1, ' ': now + 1, ArrowLeft: now - 1, ArrowUp: now - 1,
              PageUp: now - 1, Home: 1, End: all.length}}[event.key];
  if (to !== undefined) {{ show(to); event.preventDefault(); }}
  if (event.key === 'f') document.documentElement.requestFullscreen?.();
}});
addEventListener('hashchange', () => show(wanted()));
addEventListener('resize', () => show(now));
show(now);
</script></body></html>
"""


def inline(text):
    """Emphasis, code and links of a line; links become their text."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", html.escape(text, quote=False))
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", text)
    return re.sub(r"(?<![\w*])\*([^*\s][^*]*)\*", r"<em>\1</em>", text)


def blocks(markdown):
    """Paragraphs, lists and code as HTML; tables, pictures and comments are left out."""
    markdown = re.sub(r"<!--.*?-->|^!\[.*?\]\(.*?\)$", "", markdown, flags=re.M | re.S)
    out = []
    for part in re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S):
        if part.startswith("```"):
            out.append(f"<pre>{html.escape(part.split(chr(10), 1)[1].rsplit(chr(10), 1)[0])}</pre>")
            continue
        for text in filter(None, (paragraph.strip() for paragraph in part.split("\n\n"))):
            items = re.split(r"^(?:\d\.|-) ", text, flags=re.M)
            kind = "ol" if re.match(r"\d\. ", text) else "ul" if text.startswith("- ") else None
            if text.startswith(("|", "#")):
                continue
            if kind:
                out.append(f"<{kind}>" + "".join(f"<li>{inline(' '.join(item.split()))}</li>" for item in items[1:]) + f"</{kind}>")
            else:
                out.append(f"<p>{inline(' '.join(text.split()))}</p>")
    return out


def picture(path, alt):
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/svg+xml;base64,{data}">'


def pictures_in(text, folder):
    """A slide for each picture of a text."""
    return [("", picture(folder / name, alt)) for alt, name in re.findall(r"^!\[(.*?)\]\((\w[\w-]*\.svg)\)$", text, flags=re.M | re.S)]


def part(page, heading):
    """The text of a lesson below a heading. Raises ValueError if there is none."""
    found = re.search(rf"^## {heading}[^\n]*\n(.*?)(?=^## |\Z)", page, flags=re.M | re.S)
    if not found:
        raise ValueError(f"no heading '{heading}'")
    return found[1]


def slides_of(page, folder):
    """(heading, body as HTML) of each slide of a lesson."""
    title = page.split("\n", 1)[0].removeprefix("# ")
    intro = page.split("\n", 1)[1].split("\n## ")[0]
    predict, _, rest = part(page, "Predict").partition("<details>")
    answers = rest.split("</summary>")[1].split("</details>")[0]
    shown = [line[2:] for block in re.findall(r"^```console\n(.*?)^```$", page, flags=re.M | re.S) for line in block.splitlines() if line.startswith("$ ")]
    commands = [re.sub(r" --json \S+", "", line) for line in shown]
    text, code = [block for block in blocks(intro) if block.startswith("<p>")], [block for block in blocks(intro) if not block.startswith("<p>")]
    slides = [("", f"<h1>{inline(title)}</h1>" + "".join(text[:2]))]
    slides += [("", "".join(code[:2]))] if code else []
    slides += pictures_in(intro, folder)
    slides += [("Predict", "".join(blocks(predict))), ("Run", f'<pre class="run">{html.escape(chr(10).join(commands))}</pre>')]
    slides += pictures_in(page[len(intro):], folder)
    slides.append(("Answers", "".join(blocks(answers))))
    slides.append(("Remember", "".join(blocks(part(page, "Remember")))))
    return slides


def document(pages, folder=HERE):
    """The HTML file of some lessons."""
    slides = [(f"<h2>{heading}</h2>" if heading else "") + body for page in pages for heading, body in slides_of(page, folder)]
    return PAGE.format(slides="\n".join(f"<section>{slide}</section>" for slide in slides))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    chosen = sys.argv[2:] or ["[0-9]"]
    lessons = sorted(path for number in chosen for path in HERE.glob(f"{number}-*.md"))
    if not lessons:
        raise SystemExit(f"no lesson {', '.join(chosen)}: give numbers of docs/learn, such as 0 or 5")
    pathlib.Path(sys.argv[1]).write_text(document([path.read_text() for path in lessons]))
