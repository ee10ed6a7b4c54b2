// A card for each tenant: its latency, rate and queue now, the p99 of the last minute, and the isolation meter.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { LENT_NOW, colorOf } from "./devices.js";
import { bytes, digits, milliseconds, percent, rate } from "./format.js";

const KEPT = 60;
const NUMBERS = ["p99", "p50", "Requests/s", "Busy", "Waiting", "In flight", "Refused/s", "Limited/s", "Memory"];
const LEAST_RATIO = 0.5;
const MOST_RATIO = 4;
const SLOWER = 1.1;
const SVG = "http://www.w3.org/2000/svg";

const histories = new Map();

/** Draw all tenants. */
export function drawTenants(status) {
  const names = new Set(status.tenants.map((tenant) => tenant.name));
  for (const name of histories.keys()) if (!names.has(name)) histories.delete(name);
  keep(byId("tenants"), status.tenants, (tenant) => tenant.name, createCard, (card, tenant) => updateCard(card, tenant, status));
}

function createCard() {
  const card = make("article", { class: "card tenant" });
  const numbers = make("dl", { class: "numbers" });
  for (const name of NUMBERS) {
    numbers.append(make("div", {}, make("dt", { text: name }), make("dd", { "data-number": name, text: "–" })));
  }
  const line = document.createElementNS(SVG, "svg");
  for (const [name, value] of Object.entries({ viewBox: "0 0 60 24", preserveAspectRatio: "none", "aria-hidden": "true" })) {
    line.setAttribute(name, value);
  }
  line.classList.add("sparkline");
  for (const kind of ["quiet", "area", "p99"]) {
    const path = document.createElementNS(SVG, "path");
    path.classList.add(kind);
    line.append(path);
  }
  const range = { "aria-valuemin": "0", "aria-valuemax": String(MOST_RATIO) };
  const meter = make("div", { class: "meter", role: "meter", "aria-label": "Isolation", ...range }, make("span", { class: "mark" }));
  const isolation = make("div", { class: "isolation" }, make("p", { class: "verdict" }, make("b", { text: "Isolation" }), " ",
    make("span", { class: "ratio" })), meter, make("p", { class: "why muted" }));
  card.append(make("h3", {}, make("span", { class: "tag" }), " ", make("span", { class: "state" })), numbers, line,
    make("p", { class: "scale muted" }), isolation);
  return card;
}

function updateCard(card, tenant, status) {
  const tag = card.querySelector(".tag");
  setText(tag, tenant.name);
  setAttribute(tag, "class", `tag ${colorOf(status, tenant.name)}`);
  const silent = tenant.age_seconds > 0;
  const state = card.querySelector(".state");
  setText(state, silent ? `does not answer for ${Math.round(tenant.age_seconds)} s` : lending(tenant, status));
  setAttribute(state, "class", `state chip ${silent ? "bad" : tenant.lends === false ? "warn" : ""}`);
  state.hidden = !state.textContent;
  updateNumbers(card, tenant);
  drawHistory(card, tenant);
  updateMeter(card, tenant.isolation);
}

/** Whether it lends, and whether it may borrow. */
function lending(tenant, status) {
  const lends = tenant.lends === null ? [] : [tenant.lends ? "lends" : "lends nothing now"];
  const borrows = status.devices.flatMap((device) => device.wide.filter((wide) => wide.tenant === tenant.name));
  const uses = status.devices.some((device) =>
    device.shares.some((share) => share.tenant === tenant.name && share.borrowed > LENT_NOW));
  return [...lends, ...(borrows.length ? [uses ? "borrows" : "may borrow"] : [])].join(", ");
}

function updateNumbers(card, tenant) {
  const measured = tenant.measured ?? {};
  const limit = tenant.device_bytes_limit === null ? "" : ` of ${bytes(tenant.device_bytes_limit)}`;
  const numbers = {
    p99: milliseconds(measured.p99_ms),
    p50: milliseconds(measured.p50_ms),
    "Requests/s": rate(measured.requests_per_second),
    Busy: percent(measured.busy),
    Waiting: `${tenant.waiting} of ${tenant.queue}`,
    "In flight": String(tenant.in_flight),
    "Refused/s": rate(measured.turned_away_per_second),
    "Limited/s": rate(measured.limited_per_second),
    Memory: `${bytes(tenant.device_bytes)}${limit}`,
  };
  for (const cell of card.querySelectorAll("dd")) {
    const name = cell.dataset.number;
    setText(cell, numbers[name]);
    const late = name === "p99" && tenant.target_ms !== null && measured.p99_ms > tenant.target_ms;
    cell.classList.toggle("bad", late || (name === "Refused/s" && measured.turned_away_per_second > 0));
  }
}

/** The p99 of the last minute as a line, from 0 to the highest of it; and the quiet one, dashed. */
function drawHistory(card, tenant) {
  const kept = histories.get(tenant.name) ?? [];
  histories.set(tenant.name, kept);
  kept.push(tenant.measured?.p99_ms ?? null);
  if (kept.length > KEPT) kept.shift();
  const quiet = tenant.isolation.quiet_p99_ms;
  const highest = Math.max(...kept.map((each) => each ?? 0), quiet ?? 0, 0.001);
  const at = (value) => (23 - (21 * value) / highest).toFixed(2);
  const runs = runsOf(kept.map((value, index) => [index + KEPT - kept.length, value]));
  const drawn = runs.map((run) => run.map(([x, value], index) => `${index ? "L" : "M"}${x} ${at(value)}`).join(""));
  const areas = runs.map((run, index) => `${drawn[index]}L${run.at(-1)[0]} 24L${run[0][0]} 24Z`);
  card.querySelector(".p99").setAttribute("d", drawn.join(""));
  card.querySelector(".area").setAttribute("d", areas.join(""));
  card.querySelector(".quiet").setAttribute("d", quiet === null ? "" : `M0 ${at(quiet)}H60`);
  const target = tenant.target_ms === null ? "" : `, target ${tenant.target_ms} ms`;
  const known = kept.some((each) => each !== null);
  setText(card.querySelector(".scale"), known ? `p99 of the last minute, up to ${milliseconds(highest)}${target}` : `no requests since this page was opened${target}`);
}

/** The parts of a line between gaps. */
function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (point[1] === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  return runs.filter((run) => run.length > 0);
}

/** The scale is logarithmic, from half to four times. */
function updateMeter(card, isolation) {
  const { ratio, slower, why } = isolation;
  const meter = card.querySelector(".meter");
  const known = ratio !== null;
  const text = known ? `${digits(ratio)}×` : "not known yet";
  const [kind, verdict] = !known ? ["muted", ""] : slower ? ["bad", ": slower"] : ratio > SLOWER ? ["warn", ": may be chance"] : ["good", ""];
  setText(card.querySelector(".ratio"), known ? `${text} its quiet p99${verdict}` : text);
  setAttribute(card.querySelector(".ratio"), "class", `ratio ${kind}`);
  setAttribute(meter, "aria-valuenow", known ? Math.min(ratio, MOST_RATIO) : 0);
  setAttribute(meter, "aria-valuetext", known ? `${digits(ratio)} times its quiet p99` : text);
  setAttribute(meter, "class", `meter ${kind}`);
  const place = known ? Math.log(Math.min(Math.max(ratio, LEAST_RATIO), MOST_RATIO) / LEAST_RATIO) / Math.log(MOST_RATIO / LEAST_RATIO) : 0;
  meter.style.setProperty("--at", place.toFixed(3));
  const quiet = `quiet p99 ${milliseconds(isolation.quiet_p99_ms)}, of ${isolation.quiet_requests} requests`;
  setText(card.querySelector(".why"), known ? quiet : why.replace(/^not known yet: /, ""));
}
