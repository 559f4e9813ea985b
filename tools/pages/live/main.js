// Puts the pictures in their places, and rebuilds them when the width changes.
"use strict";
function drawChips(view, root) {
  const chips = view.runs.map((run, i) => button(root, run.name, `Show ${run.name}`, () => {
    const without = view.chosen.filter((c) => c !== i);
    const chosen = without.length < view.chosen.length ? (without.length ? without : view.chosen) : [...without, i].slice(-2);
    view.set({chosen, moment: view.moment});
  }));
  const mark = () => chips.forEach((c, i) => c.attr("aria-pressed", view.chosen.includes(i)));
  view.onChange(mark);
  mark();
}

const redraws = [];  // of pictures as wide as the page
const redraw = () => redraws.forEach((build) => build());

// Charts with data of their own. Bars follow the width of the page by themselves.
document.querySelectorAll(".chart").forEach((place) => {
  const data = JSON.parse(place.querySelector("script").textContent), slot = d3.select(place).append("div").attr("class", "slot").node();
  const draw = {bars: drawBars, lines: drawLines, curves: drawCurves, heat: drawHeat}[place.dataset.picture];
  draw(data, slot);
  if (draw !== drawBars) redraws.push(() => draw(data, slot));
});

let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((d) => { d.open = true; });
});
addEventListener("afterprint", () => closed.forEach((d) => { d.open = false; }));

document.querySelectorAll("section").forEach((section, number) => {
  const holder = section.querySelector("script.data");
  if (!holder) return;
  const data = JSON.parse(holder.textContent);
  const place = (name) => section.querySelector(`[data-picture="${name}"]`);
  const view = section.view = new View(section, data, number === 0);
  view.rebuild = redraws;
  if (view.runs.length) {
    if (view.runs.length > 1) drawChips(view, place("chips"));
    if (place("map")) {
      drawMap(view, place("map"));
      drawFrames(view, place("map"));
    }
    drawTimeline(view, place("timeline"));
    drawMemory(view, place("memory"));
  }
  if (data.totals && place("bytes")) {
    drawBytes(bytesOf(data), view, place("bytes"));
    drawLoss(data.totals, view, place("loss"));
  }
  if (data.what_if) drawWhatIf(data.what_if, view, place("what-if"));
  if (data.why) drawWhy(data.why, view, place("why"));
  if (number === 0 && view.runs.length) addEventListener("hashchange", () => {
    view.read();
    redraw();
    view.listeners.forEach((f) => f(["moment"]));
  });
  section.setAttribute("data-drawn", performance.now().toFixed(0));
});
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth !== width) redraw();
  width = innerWidth;
});
startStage(redraw);
