// One picture alone: large, for a lecture (#present=map), or as a part of another page (#embed=timeline).
"use strict";
const MODES = ["present", "embed"];
const stage = {places: [], mode: null, at: 0, scale: 1};

// A picture's heading, itself and what follows up to the next heading; of the section the choice of strategies.
function partsOf(place) {
  let heading = place;
  while (heading.tagName !== "H2" && heading.previousElementSibling) heading = heading.previousElementSibling;
  const parts = [heading, ...place.parentElement.querySelectorAll(":scope > .chips")];
  for (let next = heading.nextElementSibling; next && next.tagName !== "H2"; next = next.nextElementSibling) parts.push(next);
  return parts;
}

// The places that hold a picture, named by it: map, timeline, .. and where a page has several of one, map-2.
function findPlaces() {
  const count = {};
  for (const place of document.querySelectorAll("[data-picture]:not([data-picture='chips'])")) {
    if (!place.querySelector("svg, .bar")) continue;
    const picture = place.dataset.picture;
    count[picture] = (count[picture] || 0) + 1;
    stage.places.push({name: picture + (count[picture] > 1 ? `-${count[picture]}` : ""), place});
  }
}

function setStage(mode, at) {
  document.querySelectorAll(".on-stage").forEach((part) => part.classList.remove("on-stage"));
  Object.assign(stage, {mode, at});
  MODES.forEach((m) => document.body.classList.toggle(`stage-${m}`, m === mode));
  document.body.classList.toggle("staged", mode !== null);
  stage.scale = mode === "present" ? Math.max(1, Math.min(innerWidth / 950, innerHeight / 560)) : 1;
  document.body.style.setProperty("--stage", stage.scale);
  if (mode) partsOf(stage.places[at].place).forEach((part) => part.classList.add("on-stage"));
  const parts = new URLSearchParams(location.hash.slice(1));
  MODES.forEach((m) => m === mode ? parts.set(m, stage.places[at].name) : parts.delete(m));
  history.replaceState(null, "", "#" + parts);
}

function readStage() {
  const given = new URLSearchParams(location.hash.slice(1));
  const mode = MODES.find((m) => given.has(m)), at = stage.places.findIndex((p) => p.name === given.get(mode));
  if (at >= 0) setStage(mode, at);
  else if (stage.mode) setStage(null, 0);
}

// `redraw` draws every picture again, for its new width. Presenters send Page Up and Page Down, too.
function startStage(redraw) {
  findPlaces();
  const go = (mode, at) => {
    if (at < 0 || at >= stage.places.length) return;
    setStage(mode, at);
    redraw();
  };
  stage.places.forEach(({place}, at) => {
    const heading = partsOf(place)[0];
    if (!heading.querySelector("button")) button(heading, "Present", `Present: ${heading.textContent}`, () => go("present", at));
  });
  d3.select("body").append("p").attr("class", "stage-keys soft").text("Left and right: events of the step. Up and down: pictures. Space: play. Escape: the whole page.");
  const event = (by) => {
    const {view} = stage.places[stage.at].place.closest("section");
    if (view && view.runs.length) view.jump(by);
  };
  const keys = {ArrowUp: () => go("present", stage.at - 1), PageUp: () => go("present", stage.at - 1), ArrowDown: () => go("present", stage.at + 1),
                PageDown: () => go("present", stage.at + 1), ArrowLeft: () => event(-1), ArrowRight: () => event(1), Escape: () => (setStage(null, 0), redraw()),
                " ": () => stage.places[stage.at].place.querySelector("button.play")?.click()};
  addEventListener("keydown", (e) => {
    const own = e.target.closest("button, summary, .timeline, .sliders") && !e.key.startsWith("Page") && e.key !== "Escape";
    if (stage.mode !== "present" || own || !keys[e.key]) return;
    keys[e.key]();
    e.preventDefault();
    e.stopPropagation();
  }, true);
  addEventListener("hashchange", () => (readStage(), redraw()));
  readStage();
  if (stage.mode) redraw();
}
