// Why one strategy's step takes longer: the terms of the gap, one after the other.
"use strict";
function drawWhy(why, view, root) {
  const slot = d3.select(root).append("div").attr("class", "slot").node();
  function build() {
    slot.textContent = "";
    const width = widthOf(slot), left = Math.min(110, width / 4), right = 76, row = 26;
    const rows = [{name: why.from, from: 0, to: why.from_ms, step: true}];
    let at = why.from_ms;
    for (const [name, value] of Object.entries(why.terms)) {
      rows.push({name, from: at, to: at + value, value, interval: why.intervals[name]});
      at += value;
    }
    rows.push({name: why.to, from: 0, to: why.to_ms, step: true});
    const height = rows.length * row + 24;
    const x = d3.scaleLinear().domain([Math.min(0, d3.min(rows, (r) => r.to)), d3.max(rows, (r) => Math.max(r.from, r.to))]).nice().range([left, width - right]);
    const svg = picture(slot, "why", `Why ${why.to} takes ${why.gap_ms.toFixed(2)} ms more than ${why.from}; the table below has the terms`, width, height);
    svg.append("g").attr("class", "axis grid").attr("transform", `translate(0,${height - 22})`)
      .call(d3.axisBottom(x).ticks(5).tickSize(-(height - 22)).tickFormat((v) => `${v} ms`));
    const line = svg.append("g").selectAll("g").data(rows).enter().append("g").attr("transform", (d, i) => `translate(0,${i * row})`);
    line.append("text").attr("x", left - 6).attr("y", 16).attr("text-anchor", "end").attr("class", (d) => d.step ? "strong" : "").text((d) => d.name);
    const unsure = (d) => why.rounds > 1 && (why.coverage < 0.95 || d.interval && d.interval[0] <= 0 && d.interval[1] >= 0);
    line.append("rect").attr("y", 3).attr("height", row - 8).attr("x", (d) => x(Math.min(d.from, d.to)))
      .attr("width", (d) => Math.max(1, Math.abs(x(d.to) - x(d.from)))).attr("data-term", (d) => d.step ? null : d.name)
      .attr("class", (d) => d.step ? "step" : unsure(d) ? "unsure" : d.value > 0 ? "slower" : "faster");
    line.append("text").attr("x", (d) => x(Math.max(d.from, d.to)) + 5).attr("y", 16).attr("class", (d) => d.step ? "strong" : "")
      .text((d) => d.step ? `${d.to.toFixed(1)} ms` : `${d.value >= 0 ? "+" : ""}${d.value.toFixed(2)}`);
  }
  view.rebuild.push(build);
  build();
}
