// What if: each strategy's schedule, replayed over other links, on other ranks and with other batches.
"use strict";
// Times in nanoseconds. A rank has a port inside its host and one to other hosts; the bytes of operations pass a port one
// after the other, in the order of their calls, and the latency of an operation follows its bytes. A step begins while
// all-gathers of the one before are in flight.
function replay(schedule, setting, most) {
  const part = most > 1 ? (setting.sequences - 1) / (most - 1) : 0, grown = ([few, many]) => few + (many - few) * part;
  const ports = [setting.intra, setting.hosts > 1 ? setting.link : setting.intra], loads = schedule.loads[setting.hosts];
  const free = [0, 0], done = [];
  let now = 0, exposed = 0, begin = 0;
  for (const [i, action] of schedule.actions.entries()) {
    if (i === schedule.first) [begin, exposed] = [now, 0];
    const index = action >> 2, what = action & 3;
    if (what === 0) {
      now += grown(schedule.works[index]);
    } else if (what === 1) {
      let end = now, latency = 0;
      ports.forEach((port, i) => {
        const bytes = loads[index][i], messages = loads[index][i + 2];
        if (bytes > 0) end = Math.max(end, free[i] = Math.max(now, free[i]) + bytes / port.bytes_per_second * 1e9);
        latency += messages * port.latency_us * 1e3;
      });
      done.push(end + latency);
    } else {
      const end = Math.max(now, done[index]);
      if (what === 2) exposed += end - now;
      now = end;
    }
  }
  return {step: now - begin, exposed: exposed + grown(schedule.work_in_waits), memory: Math.round(Math.max(...schedule.memory.map(grown)))};
}

// Of one run in a setting; null if it can't run in it.
function whatIf(data, name, setting) {
  const run = data.runs.find((r) => r.name === name);
  const links = setting.hosts > 1 ? setting : {...setting, intra: setting.link};
  const schedule = run.schedules.find((s) => s.ranks === setting.ranks && s.loads[setting.hosts]);
  if (!schedule) return null;
  const result = replay(schedule, links, data.most_sequences);
  const tokens = setting.sequences * data.microbatches * setting.ranks * data.seq_len;
  return {name, ...result, tokens: result.step > 0 ? tokens / result.step * 1e9 : 0};
}

// From how many tokens of a rank on the all-gather of a unit hides behind the forward of another one.
function hidingTokens(data, {link, intra, ranks, hosts}) {
  const here = ranks / hosts, far = (ranks - here) / ranks / link.bytes_per_second;
  const near = (here - 1) / ranks / (hosts > 1 ? intra : link).bytes_per_second;
  return data.parameter_bytes / 2 * data.flops * Math.max(near, far);
}

const rateWords = (r) => {
  const [size, name] = [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]].find(([least]) => r >= least) || [1, "B/s"];
  return `${+(r / size).toPrecision(12)} ${name}`;
};
const latencyWords = (us) => us >= 1000 ? `${us / 1000}ms` : `${us}us`;
const linkWords = (link) => `${latencyWords(link.latency_us)},${rateWords(link.bytes_per_second)}`.replace(/ /g, "");
const shellWord = (word) => /^[\w\-+=:,./@%]+$/.test(word) ? word : `'${word.replace(/'/g, "'\\''")}'`;
function planCommand(data, setting) {
  if (!data.command.length) return "";
  const names = [...new Set(data.runs.filter((r) => whatIf(data, r.name, setting)).map((r) => r.strategy))];
  const words = ["tessera", "plan", ...data.command, "--strategies", names.join(","), "--machine", data.machine, "--link", linkWords(setting.link),
                 ...(setting.hosts > 1 ? ["--hosts", setting.hosts, "--link-intra", linkWords(setting.intra)] : []),
                 "--ranks", setting.ranks, "--global-batch", setting.sequences * data.microbatches * setting.ranks];
  return words.map((word) => shellWord(String(word))).join(" ");
}

const between = (all, own) => [...new Set([...all, own])].sort((a, b) => a - b);
function drawWhatIf(data, view, root) {
  const own = data.setting, setting = {...own}, area = d3.select(root);
  const ranks = between([].concat(...data.runs.map((r) => r.schedules.map((s) => s.ranks))), own.ranks);
  const hosts = (n) => between([].concat(...data.runs.map((r) => [].concat(...r.schedules.filter((s) => s.ranks === n)
    .map((s) => Object.keys(s.loads).map(Number))))), 1);
  const decades = (from, to) => [].concat(...d3.range(from, to).map((e) => [1, 2, 5].map((d) => d * 10 ** e)));
  const sequences = between([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64].filter((s) => s <= data.most_sequences), own.sequences);
  const tokens = (s) => s * data.seq_len;
  const sliders = [
    {name: "Rate of a link", values: () => between(decades(6, 11), own.link.bytes_per_second), words: rateWords,
     of: (s) => s.link.bytes_per_second, set: (v) => { setting.link = {...setting.link, bytes_per_second: v}; }},
    {name: "Latency", values: () => between([0, ...decades(0, 4)], own.link.latency_us), words: latencyWords,
     of: (s) => s.link.latency_us, set: (v) => { setting.link = {...setting.link, latency_us: v}; }},
    {name: "Ranks", values: () => ranks, words: (n) => `${n}`, of: (s) => s.ranks,
     set: (v) => { setting.ranks = v; setting.hosts = d3.max(hosts(v).filter((h) => h <= setting.hosts)); }},
    {name: "Hosts", values: () => hosts(setting.ranks), words: (n) => `${n}`, of: (s) => s.hosts, set: (v) => { setting.hosts = v; }},
    {name: "Tokens of a rank", values: () => sequences, words: (s) => `${d3.format(",")(tokens(s))} (${s} × ${data.seq_len})`,
     of: (s) => s.sequences, set: (v) => { setting.sequences = v; }},
  ];
  const rows = area.append("div").attr("class", "sliders").selectAll("label").data(sliders).enter().append("label");
  rows.append("span").text((d) => d.name);
  const track = rows.append("span").attr("class", "track-of");
  const inputs = track.append("input").attr("type", "range").attr("min", 0).attr("step", 1).attr("aria-label", (d) => d.name)
    .on("input", function(d) {
      d.set(d.values()[+this.value]);
      view.set({setting: {...setting}});
    });
  const mark = track.filter((d) => d.name.startsWith("Tokens")).append("i").attr("class", "hides");
  const shown = rows.append("output");
  const controls = area.append("div").attr("class", "controls");
  button(controls.node(), data.link_given ? "As it ran" : "As at first", "Set all sliders as in the runs", () => view.set({setting: {...own}}));
  const hides = area.append("p").attr("class", "soft"), slot = area.append("div").attr("class", "slot").node();
  const command = area.append("pre").attr("class", "scroll").attr("tabindex", 0);
  const runs = data.runs.filter((r) => !r.left_out);

  function showHiding() {
    const from = data.parameter_bytes ? hidingTokens(data, setting) : 0, [least, most] = [tokens(sequences[0]), tokens(sequences[sequences.length - 1])];
    mark.style("display", from >= least && from <= most ? null : "none");
    hides.text(!from ? "" : `An all-gather hides behind a forward from T = (b/2) c F/B = ${d3.format(",")(Math.ceil(from))} tokens of a rank on` +
      (from > most ? ", to the right of this slider." : from < least ? ", with any batch here." : ": the mark."));
    if (from < least || from > most) return;
    const place = d3.scaleLinear().domain(sequences.map(tokens)).range(d3.range(sequences.length))(from) / (sequences.length - 1);
    mark.style("left", `calc(8px + (100% - 16px) * ${place.toFixed(4)})`);
  }
  function show() {
    inputs.attr("max", (d) => d.values().length - 1).property("value", (d) => d.values().indexOf(d.of(setting)))
      .property("disabled", (d) => d.values().length < 2).attr("aria-valuetext", (d) => d.words(d.of(setting)));
    shown.text((d) => d.words(d.of(setting)));
    command.text(planCommand(data, setting)).style("display", data.command.length ? null : "none");
    showHiding();
    build();
  }
  function build() {
    slot.textContent = "";
    const width = widthOf(slot), narrow = width < 560, left = narrow ? 10 : 90, right = 24, row = narrow ? 58 : 44;
    const lines = runs.map((run) => ({run, at: whatIf(data, run.name, setting), before: whatIf(data, run.name, own)}));
    const x = d3.scaleLinear().domain([0, (d3.max(lines, (l) => Math.max(l.at ? l.at.step : 0, l.before ? l.before.step : 0)) || 1) / 1e6]).nice()
      .range([left, width - right]);
    const height = lines.length * row + 24;
    const svg = picture(slot, "what-if", "Simulated steps in the setting of the sliders; each line of text has its numbers", width, height);
    svg.append("g").attr("class", "axis grid").attr("transform", `translate(0,${height - 22})`)
      .call(d3.axisBottom(x).ticks(Math.min(8, width / 90)).tickSize(-(height - 22)).tickFormat((v) => `${v} ms`));
    const line = svg.append("g").selectAll("g").data(lines).enter().append("g").attr("transform", (d, i) => `translate(0,${i * row})`);
    const top = narrow ? 34 : 18;
    line.append("text").attr("x", narrow ? 0 : left - 8).attr("y", narrow ? 14 : 30).attr("text-anchor", narrow ? "start" : "end")
      .attr("class", (d) => view.shown.some((s) => s.name === d.run.name) ? "strong" : "").text((d) => d.run.name);
    const bars = line.filter((d) => d.at);
    const bar = (from, to, kind) => bars.append("rect").attr("y", top).attr("height", 16).attr("class", kind).attr("data-run", (d) => d.run.name)
      .attr("x", (d) => x(from(d) / 1e6)).attr("width", (d) => Math.max(0, x(to(d) / 1e6) - x(from(d) / 1e6)));
    bar(() => 0, (d) => d.at.step - d.at.exposed, "step forward");
    bar((d) => d.at.step - d.at.exposed, (d) => d.at.step, "exposed unshard_wait").style("fill", svg.hatch("wait"));
    line.filter((d) => d.before).append("line").attr("class", "before").attr("y1", top - 3).attr("y2", top + 19)
      .attr("x1", (d) => x(d.before.step / 1e6)).attr("x2", (d) => x(d.before.step / 1e6));
    const key = d3.select(slot).append("ul").attr("class", "legend").selectAll("li")
      .data([["forward", "computes"], ["wait", "exposed"], ["ran", data.link_given ? "the simulated step as it ran" : "the simulated step over the first link"]]).enter().append("li");
    key.append("span").attr("class", (d) => `key ${d[0]}`);
    key.append("span").text((d) => d[1]);
    line.append("text").attr("x", narrow ? 0 : left + 2).attr("y", narrow ? 29 : 13).attr("class", "soft figures").text((d) => !d.at ? "can't run in this setting"
      : `${ms(d.at.step)}, exposed ${ms(d.at.exposed)}, ${d3.format(",")(Math.round(d.at.tokens))} tokens/s` + (d.run.memory_known ? `, ${bytes(d.at.memory)}` : ""));
  }
  view.onChange((what) => what.includes("chosen") && build());
  // A setting of the address may have values that no slider has.
  function take() {
    const given = {...own, ...view.setting};
    Object.assign(setting, own);
    for (const slider of sliders) {
      const value = slider.of(given);
      if (slider.values().includes(value)) slider.set(value);
    }
    show();
  }
  view.onChange((what) => what.includes("setting") && take());
  view.rebuild.push(take);
  take();
}
