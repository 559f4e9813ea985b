// Bars and lines, whose data stand in their place on the page.
"use strict";
// Numbers that enclose the values: round ones, about four steps apart; of values too close for these, or too far apart,
// the lowest and the highest. The difference of two finite numbers may be infinite.
function scaleOf(values) {
  let [low, high] = d3.extent(values);
  if (low === high) {
    const around = Math.max(1e-6, Math.abs(low) * 1e-3);
    if (isFinite(low + around)) high += around;
    else low -= around;
  }
  const step = d3.tickIncrement(low, high, 4), far = Math.max(Math.abs(low), Math.abs(high)), raw = (high - low) / 4;
  let ticks = [low, high];
  if (isFinite(raw) && raw >= 1e-300 && raw >= 1e-9 * far) {
    const size = step < 0 ? 1 / -step : step;
    ticks = d3.range(Math.floor(low / size), Math.ceil(high / size) + 1).map((i) => step < 0 ? i / -step : i * step);
    [low, high] = d3.extent(ticks);
  }
  const depth = (v) => isFinite(high - low) ? (high - v) / (high - low) : (high / 2 - v / 2) / (high / 2 - low / 2);
  return {ticks, depth};
}

// Lines over a horizontal axis whose marks are 0, 1, 2 ..; null leaves a gap. `marks`: text by index of a mark.
const MOST_POINTS = 1000;
function plotLines(slot, {lines, label, kind, height, words, marks}) {
  const values = [].concat(...lines.map((l) => l.values)).filter((v) => v !== null && isFinite(v));
  if (!values.length) return;
  const width = widthOf(slot), left = 62, last = d3.max(lines, (l) => l.values.length) - 1, stride = Math.ceil((last + 1) / MOST_POINTS);
  const {ticks, depth} = scaleOf(values);
  const y = d3.scaleLinear().domain([1, 0]).range([height - 24, 8]), x = d3.scaleLinear().domain([0, Math.max(1, last)]).range([left, width - 34]);
  const svg = picture(slot, kind, label, width, height);
  svg.append("g").attr("class", "axis grid").attr("transform", `translate(${left},0)`)
    .call(d3.axisLeft(y).tickValues(ticks.map(depth)).tickFormat((d, i) => words(ticks[i])).tickSize(-(width - left - 34)).tickPadding(10));
  const inner = d3.ticks(0, last, Math.min(last, 8, width / 90)).filter((i) => Number.isInteger(i) && i > last / 10 && i < last * 0.9);
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - 24})`)
    .call(d3.axisBottom(x).tickValues([...new Set([0, ...inner, last])]).tickFormat(marks));
  const round = (v) => Math.round(v * 100) / 100;
  const path = d3.line().defined((d) => d[1] !== null && isFinite(d[1])).x((d) => round(x(d[0]))).y((d) => round(y(depth(d[1]))));
  svg.append("g").selectAll("path").data(lines).enter().append("path").attr(`data-${kind}`, (d) => d.name)
    .attr("d", (d) => path(d.values.map((v, i) => [i, v]).filter((v, i) => i % stride === 0 || i + 1 === d.values.length)))
    .style("stroke", (d) => `var(--c${d.color})`).style("stroke-width", (d) => d.width).append("title").text((d) => d.name);
}
// Each line is inside the one before, so that equal ones can be told apart.
const nested = (lines) => lines.map(({name, values}, i) => ({name, values, color: i % 8, width: 2 + 4 * (lines.length - 1 - i)}));
function legendOf(slot, keys) {
  const key = d3.select(slot).append("ul").attr("class", "legend").attr("aria-hidden", true).selectAll("li").data(keys).enter().append("li");
  key.append((d) => document.createElement(d.mark ? "b" : "i")).filter((d) => !d.mark).style("background", (d) => `var(--c${d.color})`);
  key.append("span").text((d) => d.name);
}

function drawLines({label, marks, lines}, slot) {
  slot.textContent = "";
  const all = nested(lines);
  plotLines(slot, {lines: all, label, kind: "line", height: 240, words: (v) => `${v}`, marks: (i) => marks[i]});
  legendOf(slot, all);
}

// Horizontal bars with one scale. A row: [name, values that are drawn end to end, place of its mark, number at its end].
const UNITS = {bytes, ms: (v) => `${+v.toPrecision(4)} ms`, "GB/s": (v) => `${+v.toPrecision(4)} GB/s`};
function drawBars({label, unit, keys, mark, rows}, slot) {
  const words = UNITS[unit], longest = d3.max(rows, ([, values, at]) => Math.max(d3.sum(values), at || 0)) || 1;
  const part = (value) => `${+(100 * value / longest).toPrecision(6)}%`;
  const figure = d3.select(slot).append("figure").attr("class", "bars").attr("role", "img").attr("aria-label", label);
  const bar = figure.selectAll("div").data(rows).enter().append("div").attr("class", "bar");
  bar.append("span").attr("class", "name").text((d) => d[0]);
  const track = bar.append("span").attr("class", "track");
  track.selectAll("i").data((d) => d[1].map((value, i) => ({value, i})).filter((p) => p.value > 0)).enter().append("i")
    .style("width", (p) => part(p.value)).style("background", (p) => `var(--c${p.i})`).attr("title", (p) => `${keys[p.i]}: ${words(p.value)}`);
  if (mark) track.append("b").style("left", (d) => part(d[2]));
  bar.append("span").attr("class", "text").text((d) => typeof d[3] === "string" ? d[3] : words(d[3]));
  legendOf(slot, [...keys.map((name, color) => ({name, color})), ...(mark ? [{name: mark, mark: true}] : [])]);
}
