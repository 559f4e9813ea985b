// The map: ranks x units, which shards a rank holds at a moment; and the slider that moves the moment through the step.
"use strict";
function parametersAt(events, unit, at) {
  let state = "none", issued = 0;
  for (const e of events) {
    if (e.start > at) break;
    if (e.unit !== unit) continue;
    if (e.kind === "unshard_issue") [state, issued] = ["coming", e.end];
    else if (e.kind === "reshard") state = "none";
    else if (state === "coming" && (e.kind === "forward" || e.kind === "backward" || (e.kind === "unshard_wait" && e.start >= issued && e.end <= at)))
      state = "here";
  }
  return state;
}

function gradientsAt(events, unit, at) {
  let state = "none";
  for (const e of events) {
    if (e.start > at) break;
    if (e.unit !== unit) continue;
    if (e.kind === "backward") state = "local";
    else if (e.kind === "reduce_issue") state = "way";
    else if (e.kind === "reduce_wait" && e.end <= at) state = "reduced";
    else if (e.kind === "optimizer_step") state = "reduced";
  }
  return state;
}

const TEXTS = {own: "own shard", here: "unsharded", coming: "on its way", none: "not here",
               local: "gradients of its own data", way: "gradients on their way", reduced: "mean of all ranks' gradients"};

// What the ranks do at a moment, in words.
function sentenceOf(run, at) {
  if (run.story) {
    const told = run.story.sentences.filter(([begin]) => begin <= at);
    const now = told.filter(([begin]) => begin === told[told.length - 1][0]).map(([, text]) => text);
    return `${run.name} at ${ms(at)}, ${run.story.teller}: ${now.join("; ") || "the step begins"}.`;
  }
  const words = new Map();
  for (const rank of run.ranks) {
    const marks = rank.events.filter((e) => e.start === at && (e.end === e.start || !COMPUTE.includes(e.kind)));
    const piece = rank.compute.find((p) => p.start <= at && at < p.end);
    const all = [...marks, ...(piece ? [piece.event] : [])].map((e) => KINDS[e.kind](e.unit, e.bytes));
    const text = all.length ? all.join(" and ") : at >= run.end ? "is at the end of the step" : "prepares, or waits for the loss";
    if (!words.has(text)) words.set(text, []);
    words.get(text).push(rank.rank);
  }
  const who = (ranks) => ranks.length === run.ranks.length && ranks.length > 1 ? "every rank"
    : ranks.length > 1 ? "each of ranks " + ranks.join(", ") : `rank ${ranks[0]}`;
  return `${run.name} at ${ms(at)}: ` + [...words].map(([text, ranks]) => `${who(ranks)} ${text}`).join("; ") + ".";
}

// The picture of a run, with a function that shows a moment.
function mapPicture(slot, run, width) {
  const pieces = run.pieces[0];
  const left = 56, right = width > 560 ? 120 : 0, gap = 10, row = 44;
  const ranks = run.ranks.slice(0, 8);
  const units = run.units.slice(0, 24);
  const total = units.reduce((s, u) => s + u.elements, 0);
  const room = width - left - right - gap * units.length, least = Math.min(48, room / units.length * 0.6);
  const spare = room - least * units.length;
  let at = left;
  const places = units.map((u) => {
    const place = {unit: u, x: at, width: least + spare * u.elements / total};
    at += place.width + gap;
    return place;
  });
  const height = 34 + ranks.length * row + 56;
  const svg = picture(slot, "map", `Who holds what: ${run.name}, ${run.world} ranks, ${run.units.length} units; a sentence below says it`, width, height);
  for (const p of places) {
    svg.append("text").attr("x", p.x + p.width / 2).attr("y", 12).attr("text-anchor", "middle").attr("class", "strong")
      .text(p.unit.name.length * 7 < p.width + gap ? p.unit.name : p.unit.name.slice(0, Math.max(1, Math.floor(p.width / 8))) + "…");
    if (p.width > 76) svg.append("text").attr("x", p.x + p.width / 2).attr("y", 26).attr("text-anchor", "middle").attr("class", "soft")
      .text(d3.format(",")(p.unit.elements));
  }
  const data = ranks.flatMap((r, i) => places.flatMap((p) => d3.range(pieces).map((k) =>
    ({rank: r, unit: p.unit.name, k, own: pieces === 1 || k === r.rank % pieces, x: p.x + p.width * k / pieces, width: p.width / pieces, y: 34 + i * row}))));
  const shards = svg.append("g").selectAll("rect").data(data).enter().append("rect").attr("x", (d) => d.x).attr("y", (d) => d.y)
    .attr("width", (d) => Math.max(1, d.width - 1)).attr("height", 24);
  shards.append("title");
  const digits = data.filter((d) => pieces > 1 && d.width > 12);
  svg.append("g").selectAll("text").data(digits).enter().append("text").attr("x", (d) => d.x + d.width / 2)
    .attr("y", (d) => d.y + 16).attr("text-anchor", "middle").attr("class", (d) => d.own ? "on" : "soft").text((d) => d.k);
  const strips = ranks.flatMap((r, i) => places.map((p) => ({rank: r, unit: p.unit.name, place: p, y: 34 + i * row + 26})));
  const grads = svg.append("g").selectAll("rect").data(strips).enter().append("rect").attr("height", 7).attr("y", (d) => d.y);
  grads.append("title");
  svg.append("g").selectAll("text").data(ranks).enter().append("text").attr("x", 0).attr("y", (d, i) => 50 + i * row)
    .attr("class", "strong").text((d) => `rank ${d.rank}`);
  const held = right ? svg.append("g").selectAll("text").data(ranks).enter().append("text").attr("class", "soft")
    .attr("x", width - right + 4).attr("y", (d, i) => 50 + i * row) : null;
  const top = 34 + ranks.length * row + 4;
  const x = d3.scaleLinear().domain([0, run.end]).range([left, width - 22]);
  svg.append("text").attr("x", 0).attr("y", top + 14).text("step");
  svg.append("g").selectAll("rect").data(run.ranks[0].compute).enter().append("rect").attr("y", top).attr("height", 18)
    .attr("x", (d) => x(d.start)).attr("width", (d) => Math.max(0.3, x(d.end) - x(d.start)))
    .attr("class", (d) => d.event.kind).style("fill", (d) => d.event.kind.endsWith("wait") ? svg.hatch("wait") : null);
  svg.append("g").attr("transform", `translate(0,${top + 18})`).attr("class", "axis")
    .call(d3.axisBottom(x).ticks(Math.min(8, width / 90)).tickFormat((v) => `${v / 1e6} ms`));
  const cursor = svg.append("line").attr("class", "cursor").attr("y1", top - 4).attr("y2", top + 24);
  return {ranks, units, show: (at) => {
    const state = new Map();
    const of = (rank, unit, f, name) => {
      const key = `${name}|${rank.rank}|${unit}`;
      if (!state.has(key)) state.set(key, f(rank.events, unit, at));
      return state.get(key);
    };
    const shard = (d) => d.own ? "own" : of(d.rank, d.unit, parametersAt, "p");
    shards.attr("class", (d) => "shard " + shard(d)).style("fill", (d) => shard(d) === "coming" ? svg.hatch("coming") : null);
    shards.select("title").text((d) => `rank ${d.rank.rank}, ${d.unit}, shard ${d.k}: ${TEXTS[shard(d)]}`);
    const grad = (d) => of(d.rank, d.unit, gradientsAt, "g");
    const share = (d) => grad(d) === "reduced" && run.pieces[1] > 1 ? run.pieces[1] : 1;
    grads.attr("class", (d) => "grad " + grad(d)).style("fill", (d) => grad(d) === "way" ? svg.hatch("way") : null)
      .attr("x", (d) => d.place.x + (share(d) > 1 ? d.place.width / share(d) * (d.rank.rank % share(d)) : 0))
      .attr("width", (d) => d.place.width / share(d) - 1);
    grads.select("title").text((d) => `rank ${d.rank.rank}, ${d.unit}: ${TEXTS[grad(d)]}`);
    if (held) held.text((d) => {
      const sample = [...d.memory].reverse().find((m) => m[0] <= at);
      return sample ? `holds ${bytes(d3.sum(sample.slice(1, 9)))}` : "";
    });
    cursor.attr("x1", x(at)).attr("x2", x(at));
  }};
}

function drawMap(view, root) {
  const slot = d3.select(root).append("div").attr("class", "slot").node();
  const controls = d3.select(root).append("div").attr("class", "controls");
  const play = button(controls.node(), "Play", "Play the step at a hundredth of its speed", toggle).attr("class", "play");
  button(controls.node(), "◀", "Previous event", () => view.jump(-1));
  button(controls.node(), "▶", "Next event", () => view.jump(1));
  const range = controls.append("input").attr("type", "range").attr("min", 0).attr("step", "any")
    .attr("aria-label", "Moment of the step");
  const sentence = d3.select(root).append("p").attr("class", "sentence").attr("role", "status");
  const note = d3.select(root).append("p").attr("class", "soft note");
  let playing = null;

  function stop() {
    cancelAnimationFrame(playing);
    clearInterval(playing);
    playing = null;
    play.text("Play").attr("aria-pressed", "false");
  }
  function toggle() {
    if (playing !== null) return stop();
    if (view.moment >= view.main.end) view.set({moment: 0});
    play.text("Pause").attr("aria-pressed", "true");
    if (reducedMotion()) {
      playing = setInterval(() => view.moment < view.main.end ? view.jump(1) : stop(), 1000);
      return;
    }
    const began = performance.now(), from = view.moment;
    const frame = (now) => {
      view.set({moment: from + (now - began) * 1e4});
      if (view.moment >= view.main.end) stop();
      else playing = requestAnimationFrame(frame);
    };
    playing = requestAnimationFrame(frame);
  }
  range.on("input", () => view.set({moment: +range.property("value")}));
  range.on("keydown", () => {
    const moves = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1};
    if (moves[d3.event.key]) view.jump(moves[d3.event.key]);
    else if (d3.event.key === " ") toggle();
    else return;
    d3.event.preventDefault();
  });

  let shown;
  function build() {
    slot.textContent = "";
    const run = view.main;
    shown = mapPicture(slot, run, widthOf(slot));
    range.attr("max", run.end);
    const left_out = [[run.world, shown.ranks.length, "ranks"], [run.units.length, shown.units.length, "units"]].filter(([all, some]) => all > some);
    note.text(left_out.map(([all, some, what]) => `The map shows the first ${some} of ${all} ${what}.`).join(" "));
    move();
  }
  function move() {
    shown.show(view.moment);
    const text = sentenceOf(view.main, view.moment);
    sentence.text(text);
    range.property("value", view.moment).attr("aria-valuetext", text);
  }
  view.onChange((what) => what.includes("chosen") ? (stop(), build()) : what.includes("moment") && move());
  view.rebuild.push(build);
  build();
}
