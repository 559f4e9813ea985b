// What the pictures of one comparison share: the chosen strategies, the moment, the zoom, and the data.
"use strict";
const KINDS = {
  unshard_issue: (u, b) => `starts to unshard ${u} (${bytes(b)})`,
  unshard_wait: (u) => `waits until ${u} is unsharded: exposed`,
  forward: (u) => `computes the forward of ${u}, with its own sequences`,
  backward: (u) => `computes the gradients of ${u}, from its own sequences`,
  reshard: (u) => `reshards ${u}: the other ranks' shards go, its own stays`,
  reduce_issue: (u, b) => `starts to reduce the gradients of ${u} (${bytes(b)})`,
  reduce_wait: (u) => `waits for the reduced gradients of ${u}: exposed`,
  optimizer_step: (u) => `updates its part of ${u}`,
};
const COMPUTE = ["forward", "backward", "optimizer_step", "unshard_wait", "reduce_wait"];
const reducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function bytes(n) {
  const units = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]];
  for (const [size, name] of units) if (n >= size) return `${+(n / size).toPrecision(3)} ${name}`;
  return `${n} B`;
}
const ms = (ns) => `${(ns / 1e6).toFixed(ns < 1e7 ? 2 : 1)} ms`;

// The innermost event at each time: a unit's span without those that lie in it.
function flatten(events) {
  const pieces = [];
  const open = [];
  let at = 0;
  const emit = (until) => {
    if (open.length && until > at) pieces.push({event: open[open.length - 1], start: at, end: until});
    at = Math.max(at, until);
  };
  const spans = events.filter((e) => COMPUTE.includes(e.kind)).sort((a, b) => a.start - b.start || b.end - a.end);
  const close = (until) => {
    while (open.length && open[open.length - 1].end <= until) {
      emit(open[open.length - 1].end);
      open.pop();
    }
  };
  for (const e of spans) {
    close(e.start);
    emit(e.start);
    at = e.start;
    open.push(e);
  }
  close(Infinity);
  return pieces;
}

// Where times of transfers are known: in the queue for a link, then on it.
function carried(transfers, issue) {
  return transfers.filter((t) => t.event.kind === issue).flatMap((t) => [
    ...(t.begun > t.called ? [{event: t.event, transfer: t, queued: true, start: t.called, end: t.begun}] : []),
    {event: t.event, transfer: t, start: t.begun, end: t.done}]);
}

// From a call to the end of the wait for it, which is all that a measured run knows.
function flights(events, issue, wait, end) {
  const found = [];
  events.forEach((e) => {
    if (e.kind !== issue) return;
    const done = events.find((w) => w.kind === wait && w.unit === e.unit && w.start >= e.end);
    const use = done || events.find((w) => w.unit === e.unit && w.start >= e.end && w.kind !== issue);
    found.push({event: e, start: e.start, end: done ? done.end : use ? use.start : end});
  });
  return found;
}

function readRun(run) {
  const t = run.timeline;
  const ranks = t.ranks.map((r) => {
    const events = r.events.map(([kind, unit, start, length, b], id) =>
      ({id, kind: t.event_kinds[kind], unit: t.units[unit], start, end: start + length, bytes: b, rank: r.rank}));
    const end = Math.max(t.length_ns, ...events.map((e) => e.end));
    const transfers = (r.transfers || []).map(([operation, axis, sent, called, begun, done, event]) =>
      ({operation, axis, sent, called, begun, done, event: events[event]}));
    const flying = (issue, wait) => t.simulated ? carried(transfers, issue) : flights(events, issue, wait, end);
    return {rank: r.rank, events, memory: r.memory, compute: flatten(events),
            gathers: flying("unshard_issue", "unshard_wait"), reductions: flying("reduce_issue", "reduce_wait")};
  });
  const end = Math.max(t.length_ns, ...ranks.flatMap((r) => r.events.map((e) => e.end)));
  const moments = [...new Set([0, ...ranks.flatMap((r) => r.events.flatMap((e) => [e.start, e.end])), end])].sort((a, b) => a - b);
  return {...run, world: Math.max(run.world || 0, ranks.length), ranks, end, length: t.length_ns, moments, kinds: t.memory_kinds};
}

class View {
  constructor(root, data, usesFragment) {
    Object.assign(this, {root, data, usesFragment, listeners: []});
    this.runs = data.runs.filter((r) => r.timeline).map(readRun);
    const fsdp = this.runs.findIndex((r) => r.strategy === "fsdp");
    this.chosen = fsdp > 0 ? [0, fsdp] : this.runs.length > 1 ? [0, 1] : [0];
    this.moment = this.telling(this.main || {});
    this.zoom = [0, 1];
    if (usesFragment) this.read();
  }
  // While the second unit computes: something is held, something is in flight, something is not here.
  telling(run) {
    if (!run.ranks) return 0;
    const units = new Set();
    for (const e of run.ranks[0].events) {
      if (e.kind === "forward" && units.add(e.unit).size > 1) return (e.start + e.end) / 2;
    }
    return 0;
  }
  get main() { return this.runs[this.chosen[this.chosen.length - 1]]; }
  get shown() { return this.chosen.map((i) => this.runs[i]); }
  get longest() { return Math.max(...this.shown.map((r) => r.end)); }
  jump(direction) {
    const next = direction > 0 ? this.main.moments.find((m) => m > this.moment + 0.5)
      : [...this.main.moments].reverse().find((m) => m < this.moment - 0.5);
    if (next !== undefined) this.set({moment: next});
  }
  onChange(f) { this.listeners.push(f); }
  set(what) {
    Object.assign(this, what);
    this.moment = Math.min(Math.max(0, this.moment), this.main.end);
    const only = Object.keys(what);
    this.listeners.forEach((f) => f(only));
    if (this.usesFragment) this.write();
  }
  read() {
    const given = new URLSearchParams(location.hash.slice(1));
    const names = (given.get("show") || "").split(",").map((n) => this.runs.findIndex((r) => r.name === n)).filter((i) => i >= 0);
    if (names.length) this.chosen = [...new Set(names)].slice(0, 2);
    const at = parseFloat(given.get("at"));
    if (at >= 0) this.moment = Math.min(at * 1e6, this.main.end);
    const zoom = (given.get("zoom") || "").split(",").map(Number);
    const [rate, latency, ranks, hosts, sequences] = (given.get("if") || "").split(",").map(Number);
    if (sequences > 0) this.setting = {link: {bytes_per_second: rate, latency_us: latency}, ranks, hosts, sequences};
    if (zoom.length === 2 && zoom[0] >= 0 && zoom[1] <= 1 && zoom[0] < zoom[1]) this.zoom = zoom;
  }
  write() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const parts = new URLSearchParams(location.hash.slice(1));
      parts.set("show", this.shown.map((r) => r.name).join(","));
      parts.set("at", (this.moment / 1e6).toFixed(3));
      parts.set("zoom", this.zoom.map((z) => z.toFixed(4)).join(","));
      const s = this.setting;
      if (s) parts.set("if", [s.link.bytes_per_second, s.link.latency_us, s.ranks, s.hosts, s.sequences].join(","));
      history.replaceState(null, "", "#" + parts);
    }, 100);
  }
}

const DEFINITIONS = ["wait", "coming", "way"];
let pictures = 0;
// An SVG with its hatches. Names keep the hatches of several pictures apart.
function picture(root, kind, label, width, height) {
  const id = `p${++pictures}`;
  const svg = d3.select(root).append("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("width", width).attr("height", height)
    .attr("role", "img").attr("aria-label", label).attr("class", kind);
  const defs = svg.append("defs");
  for (const name of DEFINITIONS) {
    const pattern = defs.append("pattern").attr("id", id + name).attr("width", 6).attr("height", 6)
      .attr("patternUnits", "userSpaceOnUse").attr("patternTransform", "rotate(45)");
    pattern.append("rect").attr("width", 6).attr("height", 6).attr("class", "ground");
    pattern.append("rect").attr("width", 3).attr("height", 6).attr("class", name);
  }
  svg.hatch = (name) => `url(#${id}${name})`;
  return svg;
}
const widthOf = (node) => Math.max(280, Math.floor(node.getBoundingClientRect().width / stage.scale));
function button(root, text, label, action) {
  const b = d3.select(root).append("button").attr("type", "button").attr("aria-label", label).text(text);
  b.on("click", action);
  return b;
}
