// The losses of all runs, each line inside the one before, and below how far they are from those of the first run.
"use strict";
const MOST_POINTS = 1000;
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

  function plot(lines, label, height, words) {
    const width = widthOf(slot), left = 62, steps = d3.max(lines, (l) => l.values.length), stride = Math.ceil(steps / MOST_POINTS);
    const values = [].concat(...lines.map((l) => l.values)).filter((v) => v !== null && isFinite(v));
    if (!values.length) return;
    const y = d3.scaleLinear().domain(d3.extent(values)).nice(4).range([height - 24, 8]);
    const x = d3.scaleLinear().domain([1, Math.max(2, steps)]).range([left, width - 12]);
    const svg = picture(slot, "loss", label, width, height);
    svg.append("g").attr("class", "axis grid").attr("transform", `translate(${left},0)`)
      .call(d3.axisLeft(y).ticks(4).tickFormat(words).tickSize(-(width - left - 12)));
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - 24})`)
      .call(d3.axisBottom(x).ticks(Math.min(steps, 8, width / 90)).tickFormat((v) => Number.isInteger(v) && v <= steps ? `step ${v}` : ""));
    const path = d3.line().defined((d) => d[1] !== null && isFinite(d[1])).x((d) => x(d[0])).y((d) => y(d[1]));
    svg.append("g").selectAll("path").data(lines).enter().append("path").attr("data-loss", (d) => d.name)
      .attr("d", (d) => path(d.values.map((v, i) => [i + 1, v]).filter((v, i) => i % stride === 0 || i + 1 === d.values.length)))
      .style("stroke", (d) => `var(--c${d.color})`).style("stroke-width", (d) => d.width).append("title").text((d) => d.name);
  }
  function build() {
    slot.textContent = "";
    const lines = runs.map((run, i) => ({name: run.name, values: run.losses, color: i % 8, width: 2 + 4 * (runs.length - 1 - i)}));
    plot(lines, "Losses over the steps, one line inside the other; the table below has the numbers", 240, (v) => `${v}`);
    if (most.value && isFinite(most.value)) {
      const apart = runs.slice(1).map((run, i) => ({name: run.name, values: run.losses.map((v, k) => v - runs[0].losses[k]), color: (i + 1) % 8, width: 2}));
      plot(apart, `Losses minus those of ${runs[0].name}`, 140, d3.format(".1e"));
    }
    const key = d3.select(slot).append("ul").attr("class", "legend").selectAll("li").data(lines).enter().append("li");
    key.append("i").style("background", (d) => `var(--c${d.color})`);
    key.append("span").text((d) => d.name);
  }
  view.rebuild.push(build);
  build();
}
