// The pictures of bench: times and rates over size, and the rates between the parts of a fabric.
"use strict";
function sizeText(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; size >= 1024 && unit < 4; ++unit) size /= 1024;
  return `${+size.toPrecision(4)} ${units[unit]}`;
}
const three = (v) => `${+v.toPrecision(3)}`;

// Both axes are logarithmic. Of a point `value` is drawn, from `low` to `high` as a band, and `bound` as a dashed line.
function plotCurves(slot, {lines, crossings, title, unit, measure}) {
  const shown = lines.map((line, i) => ({...line, color: i % 8, points: line.points.map((p) => ({...measure(p, line), point: p})).filter((p) => p.value > 0)}));
  const points = shown.flatMap((l) => l.points);
  if (!points.length) return;
  const width = widthOf(slot), height = 300, left = 62, right = 16;
  const around = ([low, high]) => low < high ? [low, high] : [low / 2, high * 2];
  const x = d3.scaleLog().base(2).domain(around(d3.extent(points, (p) => p.point.bytes))).range([left, width - right]);
  const values = points.flatMap((p) => [p.value, p.low, p.high, p.bound, p.fit]).filter((v) => v > 0 && isFinite(v));
  const y = d3.scaleLog().domain(around(d3.extent(values))).nice().range([height - 24, 26]);
  const svg = picture(slot, "curves", `${title} over size; the table below has the numbers`, width, height);
  svg.append("text").attr("class", "strong").attr("x", left).attr("y", 14).text(`${title} (${unit})`);
  const [first, last] = x.domain().map(Math.log2), stride = Math.ceil((last - first + 1) / (width / 75));
  const marks = d3.range(Math.ceil(first - 1e-9), last + 1e-9, stride).map((power) => 2 ** power);
  const tens = y.ticks().filter((v) => Number.isInteger(Math.round(Math.log10(v) * 1e6) / 1e6));
  svg.append("g").attr("class", "axis grid").attr("transform", `translate(${left},0)`)
    .call(d3.axisLeft(y).tickValues(tens.length > 2 ? tens : y.ticks(4)).tickFormat(three).tickSize(-(width - left - right)).tickPadding(8));
  svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - 24})`).call(d3.axisBottom(x).tickValues(marks).tickFormat(sizeText));
  for (const [before, after] of crossings) {
    const at = x(Math.sqrt(before * after));
    svg.append("line").attr("class", "crossing").attr("x1", at).attr("x2", at).attr("y1", 26).attr("y2", height - 24)
      .append("title").text(`between ${sizeText(before)} and ${sizeText(after)} another one becomes the fastest`);
  }
  const path = (key) => d3.line().defined((p) => p[key] > 0 && isFinite(p[key])).x((p) => x(p.point.bytes)).y((p) => y(p[key]));
  for (const line of shown) {
    const color = `var(--c${line.color})`, g = svg.append("g");
    const band = d3.area().defined((p) => p.low > 0 && p.high > 0).x((p) => x(p.point.bytes)).y0((p) => y(p.low)).y1((p) => y(p.high));
    g.append("path").attr("class", "band").attr("d", band(line.points)).style("fill", color);
    for (const key of ["bound", "fit", "value"])
      g.append("path").attr("class", `curve ${key}`).attr("data-curve", line.name).attr("d", path(key)(line.points)).style("stroke", color);
    const dot = g.selectAll("circle").data(line.points).enter().append("circle").attr("class", (p) => p.point.noisy ? "noisy" : null)
      .attr("cx", (p) => x(p.point.bytes)).attr("cy", (p) => y(p.value)).attr("r", 3).attr("data-bytes", (p) => p.point.bytes)
      .attr("data-value", (p) => p.value).style("fill", color).style("stroke", color);
    dot.append("title").text((p) => `${line.name}, ${sizeText(p.point.bytes)}: ${three(p.value)} ${unit}` +
      `${p.point.algorithm ? `, ${p.point.algorithm}` : ""}${p.point.noisy ? ", its rounds disagree" : ""}`);
  }
}

function drawCurves({lines, crossings}, slot) {
  slot.textContent = "";
  const time = (p, {fit}) => ({value: p.us, low: p.min, high: p.p99, bound: p.bound, fit: fit ? fit.alpha_us + fit.us_per_byte * p.bytes : 0});
  const rate = (p) => ({value: p.busbw, low: p.busbw * p.us / p.p99, high: p.min > 0 ? p.busbw * p.us / p.min : 0, bound: p.bound > 0 ? p.busbw * p.us / p.bound : 0});
  plotCurves(slot, {lines, crossings, title: "Time", unit: "us", measure: time});
  plotCurves(slot, {lines, crossings: [], title: "Bus bandwidth", unit: "GB/s", measure: rate});
  legendOf(slot, lines.map(({name}, i) => ({name, color: i % 8})));
  d3.select(slot).append("p").attr("class", "soft hint")
    .text("Dashed: the same loads and stores without waiting. Dotted: the fit. Upright: where another one becomes the fastest. Hollow: rounds that disagree.");
}

// A cell for each rate from row to column; slow links and the names of slow parts are framed.
function drawHeat({label, names, rows, slow}, slot) {
  slot.textContent = "";
  const n = names.length, titles = names.map((name, i) => `${i}: ${name}`), longest = d3.max(titles, (title) => title.length), left = Math.min(160, 10 + 7 * longest);
  const cell = Math.max(6, Math.min(54, (widthOf(slot) - left) / n)), size = cell * n;
  const values = rows.flat().filter((v) => v !== null), [low, high] = d3.extent(values);
  const share = (v) => high > low ? (v - low) / (high - low) : 1;
  const svg = picture(slot, "heat", label, left + size + 2, size + 24);
  const units = new Set(slow.filter((s) => s.units.length === 1).map((s) => s.units[0]));
  const isSlow = (i, j) => slow.some(({units: [a, b]}) => b !== undefined && ((a === i && b === j) || (a === j && b === i && rows[i][j] === rows[j][i])));
  const row = svg.selectAll("g.row").data(rows).enter().append("g").attr("class", "row").attr("transform", (d, i) => `translate(${left},${22 + i * cell})`);
  const one = row.selectAll("g").data((d, i) => d.map((v, j) => ({v, i, j}))).enter().append("g").attr("transform", (d) => `translate(${d.j * cell},0)`);
  one.append("rect").attr("width", cell - 1).attr("height", cell - 1).attr("class", (d) => d.v === null ? "none" : isSlow(d.i, d.j) ? "slow" : null)
    .attr("data-from", (d) => d.i).attr("data-to", (d) => d.j).attr("data-value", (d) => d.v).style("fill-opacity", (d) => d.v === null ? 0 : 0.12 + 0.88 * share(d.v))
    .append("title").text((d) => d.v === null ? "" : `${names[d.i]} to ${names[d.j]}: ${three(d.v)} GB/s`);
  if (cell > 34)
    one.filter((d) => d.v !== null).append("text").attr("class", (d) => share(d.v) > 0.5 ? "on" : null).attr("x", cell / 2).attr("y", cell / 2 + 4)
      .attr("text-anchor", "middle").text((d) => three(d.v));
  if (cell < 12) return;
  row.append("text").attr("class", (d, i) => units.has(i) ? "slow" : null).attr("x", -6).attr("y", cell / 2 + 4).attr("text-anchor", "end").text((d, i) => titles[i]);
  svg.selectAll("text.column").data(names).enter().append("text").attr("class", "column").attr("x", (d, i) => left + (i + 0.5) * cell).attr("y", 14)
    .attr("text-anchor", "middle").text((d, i) => i);
}
