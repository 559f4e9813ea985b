// Timelines: what each rank computes and what is in flight meanwhile, of one or two strategies on one clock.
"use strict";
function drawTimeline(view, root) {
  const controls = d3.select(root).append("div").attr("class", "controls");
  const slot = d3.select(root).append("div").attr("class", "slot").node();
  const detail = d3.select(root).append("p").attr("class", "sentence").attr("role", "status");
  const note = d3.select(root).append("p").attr("class", "soft note");
  const hint = "Drag to pan; Ctrl and the wheel, a pinch, or the wheel after a click zoom. Keys: + and -, arrows, 0 for all, N and P from mark to mark.";
  detail.text(hint).classed("hint", true);
  button(controls.node(), "+", "Zoom in", () => zoomBy(1 / 1.5));
  button(controls.node(), "−", "Zoom out", () => zoomBy(1.5));
  button(controls.node(), "←", "Earlier", () => pan(-0.25));
  button(controls.node(), "→", "Later", () => pan(0.25));
  button(controls.node(), "All", "Show the whole step", () => view.set({zoom: [0, 1]}));
  button(controls.node(), "Save for Perfetto", "Save the step of the last chosen strategy as a trace, which ui.perfetto.dev opens", () => saveTrace(view.main));
  let svg, x, marks, labels, axis, cursor, left, width, at = -1, syncing = false, behavior;

  function clamp(a, b) {
    const w = Math.min(1, Math.max(0.0005, b - a));
    const from = Math.min(Math.max(0, a), 1 - w);
    return [from, from + w];
  }
  function zoomBy(factor) {
    const [a, b] = view.zoom, middle = (a + b) / 2, half = (b - a) / 2 * factor;
    view.set({zoom: clamp(middle - half, middle + half)});
  }
  function pan(part) {
    const [a, b] = view.zoom, d = (b - a) * part;
    view.set({zoom: clamp(a + d, b + d)});
  }
  // On phones one rank, of many ranks the slowest, the middle one and the fastest: by the end of their last event.
  function ranksOf(run) {
    if (width < 480) return run.ranks.slice(0, 1);
    if (run.ranks.length <= 8) return run.ranks;
    const order = [...run.ranks].sort((a, b) => d3.max(a.events, (e) => e.end) - d3.max(b.events, (e) => e.end));
    return [order[order.length - 1], order[order.length >> 1], order[0]];
  }
  function describe(m) {
    const e = m.event, what = KINDS[e.kind](e.unit, e.bytes);
    const t = m.transfer;
    if (t) return `${m.run.name}, rank ${e.rank}: ${t.operation} of ${e.unit}; called at ${ms(t.called)}, on the link from ${ms(t.begun)} to ` +
      `${ms(t.done)} (${ms(t.done - t.begun)}); ${d3.format(",")(t.sent)} bytes sent, axis ${t.axis}`;
    const time = m.row === "compute" || m.end === m.start ? `${ms(m.start)} to ${ms(m.end)} (${ms(m.end - m.start)})`
      : `called at ${ms(m.start)}, compute had it at ${ms(m.end)} (${ms(m.end - m.start)})`;
    return `${m.run.name}, rank ${e.rank} ${what}; ${time}` + (e.bytes ? `; ${d3.format(",")(e.bytes)} bytes` : "");
  }
  function build() {
    slot.textContent = "";
    width = widthOf(slot);
    left = width < 480 ? 64 : 128;
    const all = [], heads = [];
    const ranks = ranksOf(view.main).length, of = view.main.world;
    note.text(ranks === of ? "" : view.main.ranks.length < of ? `Of ${of} equal ranks the first ${ranks} ${ranks > 1 ? "are" : "is"} shown.` : ranks === 1 ? `Of ${of} ranks the first is shown.` : `Of ${of} ranks the slowest, the middle one and the fastest are shown.`);
    let y = 8;
    for (const run of view.shown) {
      heads.push({text: run.name, y: y + 10, strong: true}, {text: `step ${ms(run.length)}`, y: y + 24});
      y += width < 480 ? 32 : 0;
      for (const rank of ranksOf(run)) {
        const exposed = d3.sum(rank.events.filter((e) => e.kind.endsWith("_wait")), (e) => e.end - e.start);
        heads.push({text: `rank ${rank.rank}`, y: y + 22, x: left - 4, end: true});
        const add = (row, list, dy, height) => list.forEach((p) => all.push({run, row, ...p, y: y + dy + (p.queued ? height : 0), height: p.queued ? 3 : height}));
        add("compute", rank.compute, 12, 14);
        add("gather", rank.gathers, 28, 8);
        add("reduce", rank.reductions, 39, 8);
        add("reshard", rank.events.filter((e) => e.kind === "reshard").map((e) => ({event: e, start: e.start, end: e.end})), 28, 8);
        if (width >= 480) heads.push({text: `exposed ${ms(exposed)}`, y: y + 36, x: left - 4, end: true, small: true});
        y += 54;
      }
      y += 14;
    }
    const height = y + 24;
    svg = picture(slot, "timeline", `Timelines of ${view.shown.map((r) => r.name).join(" and ")}; the table below has the sums`, width, height)
      .attr("tabindex", 0).attr("role", "group");
    const clip = `clip${pictures}`;
    svg.select("defs").append("clipPath").attr("id", clip).append("rect").attr("x", left).attr("width", width - left - 8).attr("height", height);
    svg.append("g").selectAll("text").data(heads).enter().append("text").attr("x", (d) => d.x || 0).attr("y", (d) => d.y)
      .attr("text-anchor", (d) => d.end ? "end" : "start").attr("class", (d) => d.strong ? "strong" : "soft").text((d) => d.text);
    axis = svg.append("g").attr("class", "axis").attr("transform", `translate(0,${height - 22})`);
    const body = svg.append("g").attr("clip-path", `url(#${clip})`);
    marks = body.append("g").selectAll("rect").data(all).enter().append("rect").attr("y", (d) => d.y).attr("height", (d) => d.height)
      .attr("class", (d) => `mark ${d.row} ${d.event.kind}${d.queued ? " queued" : ""}`).attr("data-event", (d) => `${d.run.name}|${d.event.rank}|${d.event.id}`)
      .style("fill", (d) => d.queued ? svg.hatch(d.row === "gather" ? "coming" : "way") : d.event.kind.endsWith("_wait") ? svg.hatch("wait") : null);
    marks.on("mouseenter click", (d) => detail.text(describe(d)).classed("hint", false));
    labels = body.append("g").attr("class", "names").selectAll("text").data(all.filter((d) => d.row !== "reshard" && !d.queued)).enter().append("text")
      .attr("y", (d) => d.event.kind.endsWith("_wait") ? d.y - 2 : d.y + d.height - (d.height > 10 ? 3 : 1)).attr("text-anchor", "middle")
      .attr("class", (d) => d.event.kind.endsWith("_wait") ? "waiting" : "on").style("font-size", (d) => d.height > 10 ? "10px" : "8px")
      .text((d) => d.event.kind.endsWith("_wait") ? ((d.end - d.start) / 1e6).toFixed(2) : d.event.unit);
    cursor = body.append("line").attr("class", "cursor").attr("y1", 0).attr("y2", height - 22);
    behavior = d3.zoom().scaleExtent([1, 2000]).extent([[left, 0], [width - 26, height]]).translateExtent([[left, 0], [width - 26, height]])
      .filter(() => d3.event.type !== "wheel" || d3.event.ctrlKey || document.activeElement === svg.node())
      .on("zoom", () => {
        if (syncing) return;
        const t = d3.event.transform, full = d3.scaleLinear().domain([0, 1]).range([left, width - 26]);
        view.set({zoom: clamp(...t.rescaleX(full).domain())});
      });
    svg.call(behavior).on("keydown", key);
    paint();
  }
  function key() {
    const k = d3.event.key.toLowerCase();
    const actions = {"+": () => zoomBy(1 / 1.5), "=": () => zoomBy(1 / 1.5), "-": () => zoomBy(1.5), "0": () => view.set({zoom: [0, 1]}),
                     arrowleft: () => pan(-0.25), arrowright: () => pan(0.25), n: () => step(1), p: () => step(-1)};
    if (!actions[k]) return;
    actions[k]();
    d3.event.preventDefault();
  }
  function step(by) {
    const all = marks.data();
    at = Math.min(all.length - 1, Math.max(0, at + by));
    marks.classed("chosen", (d, i) => i === at);
    detail.text(describe(all[at])).classed("hint", false);
  }
  function paint() {
    const longest = view.longest;
    x = d3.scaleLinear().domain(view.zoom.map((z) => z * longest)).range([left, width - 26]);
    marks.attr("x", (d) => x(d.start)).attr("width", (d) => Math.max(d.row === "reshard" ? 1.5 : 0.3, x(d.end) - x(d.start)));
    labels.attr("x", (d) => (Math.max(left, x(d.start)) + Math.min(width - 26, x(d.end))) / 2)
      .style("display", function(d) {
        const room = Math.min(width - 26, x(d.end)) - Math.max(left, x(d.start));
        return room > this.textContent.length * 6.2 + 2 ? null : "none";
      });
    axis.call(d3.axisBottom(x).ticks(Math.min(8, width / 100)).tickFormat((v) => `${+(v / 1e6).toPrecision(5)} ms`));
    cursor.attr("x1", x(view.moment)).attr("x2", x(view.moment));
    const k = 1 / (view.zoom[1] - view.zoom[0]), span = width - 26 - left;
    syncing = true;
    svg.call(behavior.transform, d3.zoomIdentity.translate(left * (1 - k) - view.zoom[0] * span * k, 0).scale(k));
    syncing = false;
  }
  view.onChange((what) => {
    if (what.includes("chosen")) build();
    else if (what.includes("zoom")) paint();
    else cursor.attr("x1", x(view.moment)).attr("x2", x(view.moment));
  });
  view.rebuild.push(build);
  build();
}
