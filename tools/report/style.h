// The style of pages and pictures.
#pragma once

namespace tessera::tools::report {

/// Colors of the light and dark schemes: --c0 to --c7 distinguish items.
inline constexpr const char* kPalette = R"css(
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --soft: #5c6670; --line: #d8dde2; --panel: #f4f6f8;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9; --c6: #7a5195; --c7: #8a9199; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181b; --ink: #e6e9ec; --soft: #9aa5b0; --line: #333a41;
  --panel: #1e2327; --c0: #3d9bd8; --c1: #ee7733; --c2: #2fbf93; --c6: #a983c4; } }
)css";

inline constexpr const char* kStyle = R"css(
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 54rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 1.5rem 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.verdict { border-left: .3rem solid var(--c2); background: var(--panel); padding: .5rem .8rem; overflow-wrap: anywhere; }
.verdict.differs { border-color: var(--c1); }
figure { margin: .8rem 0; }
.curves { display: grid; grid-template-columns: 3.4rem 1fr; column-gap: .5rem; }
.curves svg { width: 100%; height: 17rem; overflow: visible; }
.curves path { fill: none; stroke-linecap: round; stroke-linejoin: round; vector-effect: non-scaling-stroke; }
.curves line { stroke: var(--line); vector-effect: non-scaling-stroke; }
.y { position: relative; font-size: .8rem; color: var(--soft); }
.y span { position: absolute; right: 0; transform: translateY(-50%); }
.x { grid-column: 2; display: flex; justify-content: space-between; font-size: .8rem; color: var(--soft); margin-top: .4rem; }
.bar { display: grid; grid-template-columns: 7rem 1fr 6.5rem; gap: .6rem; align-items: center; margin: .3rem 0; font-size: .9rem; }
.name { text-align: right; overflow-wrap: anywhere; line-height: 1.15; }
.track { position: relative; display: flex; height: 1.3rem; background: var(--panel); }
.track i { display: block; height: 100%; }
.track b { position: absolute; top: -.15rem; bottom: -.15rem; width: 2px; margin-left: -1px; background: var(--ink); }
.text { font-variant-numeric: tabular-nums; white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: .4rem 0; list-style: none; font-size: .85rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
.legend b { display: inline-block; width: 2px; height: 1em; margin: 0 .6em -.15em .2em; background: var(--ink); }
summary { cursor: pointer; color: var(--soft); font-size: .85rem; margin: .5rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding: .3rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; } thead th { color: var(--soft); font-weight: 600; }
@media (max-width: 34rem) {
  .bar { grid-template-columns: 1fr auto; gap: 0 .6rem; } .name { text-align: left; } .track { grid-row: 2; grid-column: 1 / 3; }
  .text { grid-row: 1; grid-column: 2; } .curves svg { height: 13rem; }
}
)css";

}  // namespace tessera::tools::report
