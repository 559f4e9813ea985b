// Memory of the rank that needs most, over the step, stacked by kind.
"use strict";
const totalOf = (sample) => d3.sum(sample.slice(1, 9));
function peakOf(run) {
  let best = null;
  for (const rank of run.ranks)
    for (const sample of rank.memory) if (!best || totalOf(sample) > best.total) best = {rank, sample, total: totalOf(sample)};
  return best;
}
function drawMemory(view, root) {
  const slot = d3.select(root).append("div").attr("class", "slot").node();
  let cursors = [];
  function build() {
    slot.textContent = "";
    cursors = [];
    const whole = widthOf(slot), runs = view.shown.filter((r) => peakOf(r));
    const side = whole > 640 && runs.length > 1, width = side ? (whole - 16) / 2 : whole, height = 240, left = 60, bottom = 22, top = 34;
    const most = d3.max(runs, (r) => Math.max(peakOf(r).total, r.predicted || 0, r.held || 0));
    const y = d3.scaleLinear().domain([0, most]).nice(5).range([height - bottom, top]);
    for (const run of runs) {
      const peak = peakOf(run), samples = [...peak.rank.memory, [run.end, ...peak.rank.memory[peak.rank.memory.length - 1].slice(1)]];
      const x = d3.scaleLinear().domain([0, view.longest]).range([left, width - 8]);
      const svg = picture(slot, "memory", `Memory of ${run.name} over the step; the table below has the peak`, width, height);
      const under = peak.rank.compute.filter((p) => p.start <= peak.sample[0]).pop();
      svg.append("text").attr("x", left).attr("y", 12).attr("class", "strong").text(`${run.name}, rank ${peak.rank.rank}`);
      svg.append("text").attr("x", left).attr("y", 27).attr("class", "soft peak")
        .text(`peak ${bytes(peak.total)} at ${ms(peak.sample[0])}` + (under ? `: ${under.event.kind.replace("_", " ")} ${under.event.unit}` : ""));
      svg.append("g").attr("class", "axis grid").attr("transform", `translate(${left},0)`)
        .call(d3.axisLeft(y).ticks(5).tickFormat(bytes).tickSize(-(width - left - 8)));
      const stack = d3.stack().keys(d3.range(8)).value((d, k) => d[k + 1])(samples);
      const area = d3.area().curve(d3.curveStepAfter).x((d) => x(d.data[0])).y0((d) => y(d[0])).y1((d) => y(d[1]));
      svg.append("g").selectAll("path").data(stack).enter().append("path").attr("class", (d, i) => `area k${i}`).attr("d", area)
        .append("title").text((d, i) => run.kinds[i]);
      svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - bottom})`)
        .call(d3.axisBottom(x).ticks(4).tickFormat((v) => `${v / 1e6} ms`));
      if (run.predicted) {
        svg.append("line").attr("class", "predicted").attr("x1", left).attr("x2", width - 8).attr("y1", y(run.predicted)).attr("y2", y(run.predicted));
        svg.append("text").attr("class", "onarea").attr("x", width - 12).attr("y", y(run.predicted) - 4).attr("text-anchor", "end")
          .text(`ZeRO's formula ${bytes(run.predicted)}`);
      }
      if (run.held) {
        svg.append("line").attr("class", "held").attr("x1", left).attr("x2", width - 8).attr("y1", y(run.held)).attr("y2", y(run.held));
        svg.append("text").attr("class", "onarea").attr("x", width - 12).attr("y", y(run.held) - 4).attr("text-anchor", "end")
          .text(`with what pools reserve at most ${bytes(run.held)}`);
      }
      svg.append("circle").attr("class", "dot").attr("r", 3.5).attr("cx", x(peak.sample[0])).attr("cy", y(peak.total));
      const cursor = svg.append("line").attr("class", "cursor").attr("y1", top).attr("y2", height - bottom);
      cursors.push({cursor, x});
    }
    const key = d3.select(slot).append("ul").attr("class", "legend");
    if (runs.length) runs[0].kinds.slice(0, 8).forEach((name, i) => {
      if (!runs.some((r) => r.ranks.some((rank) => rank.memory.some((m) => m[i + 1] > 0)))) return;
      const item = key.append("li");
      item.append("i").style("background", `var(--c${i})`);
      item.append("span").text(name.replace("_", " "));
    });
    move();
  }
  const move = () => cursors.forEach(({cursor, x}) => cursor.attr("x1", x(view.moment)).attr("x2", x(view.moment)));
  view.onChange((what) => what.includes("chosen") ? build() : what.includes("moment") && move());
  view.rebuild.push(build);
  build();
}
