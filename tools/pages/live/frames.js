// The map on paper: six moments of the step instead of the slider.
"use strict";
function framesOf(run) {
  const {events} = run.ranks[0], first = (kind) => events.find((e) => e.kind === kind);
  const middle = (kind) => {
    const all = run.ranks[0].compute.filter((p) => p.event.kind === kind), blocks = all.filter((p) => p.event.unit !== run.units[0].name);
    const spans = blocks.length ? blocks : all;  // the root computes between its units too
    return spans.length ? (spans[spans.length >> 1].start + spans[spans.length >> 1].end) / 2 : null;
  };
  const frames = [["Begin", 0], ["First all-gather", first("unshard_issue") && first("unshard_issue").start], ["In forward", middle("forward")],
                  ["In backward", middle("backward")], ["First reduction", first("reduce_issue") && first("reduce_issue").start], ["End", run.end]];
  return frames.filter(([, at]) => at !== null && at !== undefined);
}
function drawFrames(view, root) {
  const area = d3.select(root).append("div").attr("class", "frames");
  addEventListener("beforeprint", () => {
    for (const [name, at] of framesOf(view.main)) {
      const frame = area.append("div").attr("class", "frame");
      frame.append("p").append("strong").text(name);
      mapPicture(frame.node(), view.main, 480).show(at);
      frame.append("p").text(sentenceOf(view.main, at));
    }
  });
  addEventListener("afterprint", () => area.selectAll("*").remove());
}
