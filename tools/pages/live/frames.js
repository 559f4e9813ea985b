// The map on paper: moments of the step instead of the slider.
"use strict";
function framesOf(run) {
  const {events} = run.ranks[0], first = (kind, after = 0) => events.find((e) => e.kind === kind && e.start >= after);
  const backward = first("backward"), begin = (e) => e && e.start, again = backward && first("unshard_issue", backward.start), done = first("reduce_wait");
  const middle = (kind) => {
    const all = run.ranks[0].compute.filter((p) => p.event.kind === kind), blocks = all.filter((p) => p.event.unit !== run.units[0].name);
    const spans = blocks.length ? blocks : all;  // the root computes between its units too
    return spans.length ? (spans[spans.length >> 1].start + spans[spans.length >> 1].end) / 2 : null;
  };
  const frames = [["Begin", 0], ["First all-gather", begin(first("unshard_issue"))], ["In forward", middle("forward")],
                  ["All-gather for backward", begin(again)], ["In backward", middle("backward")], ["First reduction", begin(first("reduce_issue"))],
                  ["First mean gradients", done && done.end], ["End", run.end]];
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
