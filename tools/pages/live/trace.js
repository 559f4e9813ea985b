// The step of a run as a Chrome trace, in the form of --trace, which Perfetto opens.
"use strict";
const TRACKS = {unshard_issue: [2, "gather"], reshard: [2, "gather"], reduce_issue: [3, "reduce"], unshard_wait: [1, "waiting"], reduce_wait: [1, "waiting"]};
function traceOf(run) {
  const entries = [], named = new Set();
  const name = (rank, track, what, text) => {
    if (named.has(`${rank} ${track}`)) return;
    named.add(`${rank} ${track}`);
    entries.push({ph: "M", name: what, pid: rank, ...(what === "thread_name" ? {tid: track} : {}), args: {name: text}});
  };
  for (const rank of run.ranks) for (const e of rank.events) {
    const [track, text] = TRACKS[e.kind] || [0, "compute"];
    name(e.rank, -1, "process_name", `rank ${e.rank}`);
    name(e.rank, track, "thread_name", text);
    entries.push({name: `${e.kind} ${e.unit}`, cat: e.kind, pid: e.rank, tid: track, ts: e.start / 1000, args: {unit: e.unit, bytes: e.bytes},
                  ...(e.end > e.start ? {ph: "X", dur: (e.end - e.start) / 1000} : {ph: "i", s: "t"})});
  }
  return {traceEvents: entries, displayTimeUnit: "ms"};
}
function saveTrace(run) {
  const address = URL.createObjectURL(new Blob([JSON.stringify(traceOf(run))], {type: "application/json"}));
  const link = d3.select("body").append("a").attr("href", address).attr("download", `${run.name.replace(/[^\w.+-]+/g, "_")}.trace.json`);
  link.node().click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
