// The losses of all runs, each line inside the one before, and below how far they are from those of the first run.
"use strict";
function largestDifference(runs) {
  const first = runs[0].losses;
  let most = {value: 0};
  for (const run of runs.slice(1)) run.losses.forEach((loss, i) => {
    const value = loss === first[i] ? 0 : loss === null || !isFinite(first[i]) || first[i] === null ? Infinity : Math.abs(loss - first[i]);
    if (value > most.value) most = {value, run, step: i + 1};
  });
  return most;
}
function drawLoss(runs, view, root) {
  const slot = d3.select(root).append("div").attr("class", "slot").node();
  const verdict = d3.select(root).append("p").attr("class", "sentence");
  const most = runs.length > 1 ? largestDifference(runs) : {value: 0};
  if (runs.length > 1) verdict.text(most.value ? `The largest difference from ${runs[0].name} is ${most.value.toPrecision(3)}: ${most.run.name}, step ${most.step}.`
    : `The largest difference from ${runs[0].name} is 0 at every step: the losses are equal to the last bit.`);

  function build() {
    slot.textContent = "";
    const lines = nested(runs.map((run) => ({name: run.name, values: run.losses})));
    const plot = (some, label, height, words) => plotLines(slot, {lines: some, label, kind: "loss", height, words, marks: (i) => `step ${i + 1}`});
    plot(lines, "Losses over the steps, one line inside the other; the table below has the numbers", 240, (v) => `${v}`);
    if (most.value && isFinite(most.value)) {
      const apart = runs.slice(1).map((run, i) => ({name: run.name, values: run.losses.map((v, k) => v - runs[0].losses[k]), color: (i + 1) % 8, width: 2}));
      plot(apart, `Losses minus those of ${runs[0].name}`, 140, d3.format(".1e"));
    }
    legendOf(slot, lines);
  }
  view.rebuild.push(build);
  build();
}
