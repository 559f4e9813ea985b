// Bytes that a rank sends in a step, by collective; ticks show what the formula says for each.
"use strict";
const COLLECTIVES = [["all_gather", "along the shards"], ["reduce_scatter", "along the shards"], ["all_reduce", "along the replicas"], ["control", ""], ["send", "to one rank"]];
// With several hosts also by link: as the schedule of the last rank says, in the setting of the runs.
function bytesOf(data) {
  const what = data.what_if;
  return data.totals.map((run) => {
    const known = what && what.setting.hosts > 1 && what.runs.find((r) => r.name === run.name && !r.left_out);
    const schedule = known && known.schedules.find((s) => s.ranks === what.setting.ranks && s.loads[what.setting.hosts]);
    if (!schedule) return run;
    const calls = schedule.actions.slice(schedule.first).filter((a) => (a & 3) === 1).map((a) => schedule.loads[what.setting.hosts][a >> 2]);
    return {...run, links: [d3.sum(calls, (load) => load[0]), d3.sum(calls, (load) => load[1])]};
  });
}
function drawBytes(runs, view, root) {
  const slot = d3.select(root).append("div").attr("class", "slot").node();
  function build() {
    slot.textContent = "";
    const width = widthOf(slot), narrow = width < 560, left = narrow ? 8 : 96, right = 84, row = narrow ? 44 : 30, split = runs.some((r) => r.links) ? 12 : 0;
    const height = runs.length * (row + split) + 24, sums = (list) => d3.sum(list);
    const x = d3.scaleLinear().domain([0, d3.max(runs, (r) => Math.max(sums(r.sent), sums(r.formula))) || 1]).range([left, width - right]);
    const svg = picture(slot, "bytes", "Bytes that a rank sends in a step; the table below has the numbers", width, height);
    svg.append("g").attr("class", "axis grid").attr("transform", `translate(0,${height - 22})`)
      .call(d3.axisBottom(x).ticks(narrow ? 3 : 5).tickFormat(bytes).tickSize(-(height - 22)));
    const line = svg.append("g").selectAll("g").data(runs).enter().append("g").attr("transform", (d, i) => `translate(0,${i * (row + split)})`);
    const top = narrow ? 20 : 6, upTo = (list, i) => sums(list.slice(0, i));
    line.append("text").attr("x", narrow ? 0 : left - 8).attr("y", narrow ? 14 : 20).attr("text-anchor", narrow ? "start" : "end").attr("class", "strong").text((d) => d.name);
    line.append("text").attr("x", (d) => x(sums(d.sent)) + 6).attr("y", top + 14).text((d) => bytes(sums(d.sent)));
    const pieces = (d) => COLLECTIVES.map(([name], i) => ({run: d.name, name, i, from: upTo(d.sent, i), to: upTo(d.sent, i + 1)})).filter((p) => p.to > p.from);
    line.selectAll(".sent").data(pieces).enter().append("rect").attr("class", (d) => `sent k${d.i}`).attr("data-sent", (d) => `${d.run}|${d.name}`)
      .attr("x", (d) => x(d.from)).attr("y", top).attr("width", (d) => x(d.to) - x(d.from)).attr("height", 18)
      .append("title").text((d) => `${d.name}: ${d3.format(",")(d.to - d.from)} bytes`);
    const ticks = (d) => COLLECTIVES.map(([name], i) => ({run: d.name, name, value: d.formula[i], at: upTo(d.formula, i + 1)})).filter((t) => t.value > 0);
    line.selectAll(".tick-of").data(ticks).enter().append("line").attr("class", "before tick-of").attr("data-formula", (d) => `${d.run}|${d.name}`)
      .attr("x1", (d) => x(d.at)).attr("x2", (d) => x(d.at)).attr("y1", top - 3).attr("y2", top + 21);
    const links = (d) => d.links ? [{run: d.name, name: "inside hosts", from: 0, to: d.links[0]}, {run: d.name, name: "between hosts", from: d.links[0], to: d.links[0] + d.links[1]}] : [];
    line.selectAll(".link-of").data(links).enter().append("rect").attr("class", (d, i) => `link-of ${i ? "far" : "near"}`).attr("data-link", (d) => `${d.run}|${d.name}`)
      .attr("x", (d) => x(d.from)).attr("y", top + 22).attr("width", (d) => x(d.to) - x(d.from)).attr("height", 7)
      .append("title").text((d) => `${d.name}: ${d3.format(",")(d.to - d.from)} bytes`);
    const key = d3.select(slot).append("ul").attr("class", "legend");
    COLLECTIVES.forEach(([name, axis], i) => {
      if (!runs.some((r) => r.sent[i] > 0)) return;
      const item = key.append("li");
      item.append("i").attr("class", `k${i}`).style("background", `var(--c${i})`);
      item.append("span").text(axis ? `${name}, ${axis}` : `${name}, too few to be seen`);
    });
    const formula = key.append("li");
    formula.append("b");
    formula.append("span").text("formula");
    if (split) for (const [name, kind] of [["inside hosts", "near"], ["between hosts", "far"]]) {
      const item = key.append("li");
      item.append("span").attr("class", `key ${kind}`);
      item.append("span").text(name);
    }
  }
  view.rebuild.push(build);
  build();
}
