// Each device: its granules in the colors of their tenants, what is lent of them, and the form to share them otherwise.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { bytes, count, digits, percent, perSecond, ranges } from "./format.js";

const COLORS = 8;
const PATHS = { memory: "memory moves", pcie_in: "PCIe in", pcie_out: "PCIe out" };
/** Units of a device from which what is lent is shown as used. */
export const LENT_NOW = 0.01;

/** The class of a tenant's color, by its place in the configuration. */
export function colorOf(status, tenant) {
  const index = status.tenants.findIndex((each) => each.name === tenant);
  return index < 0 ? "" : `color-${index % COLORS}`;
}

/** What its shares are counted in: units where each granule is one, as the cores of a CPU. */
export function nounOf(device) {
  return device.granules.every((size) => size === 1) ? device.unit : "granule";
}

/** Draw all devices. `repartition(counts)` is called with what the form says. */
export function drawDevices(status, repartition) {
  const create = (device) => createDevice(device, repartition);
  keep(byId("devices"), status.devices, (device) => device.name, create, (card, device) => updateDevice(card, device, status));
}

function createDevice(device, repartition) {
  const card = make("article", { class: "card device" });
  const form = make("form", { class: "shares" });
  const sum = make("output", { class: "sum" });
  const apply = make("button", { text: "Give these shares" });
  const undo = make("button", { type: "button", class: "quiet", text: "Undo", hidden: "" });
  form.append(make("div", { class: "rows" }), make("p", { class: "buttons" }, sum, undo, apply));
  form.addEventListener("input", (event) => {
    form.dataset.edited = "yes";
    const row = event.target.closest(".row");
    for (const input of row.querySelectorAll("input")) if (input !== event.target) input.value = event.target.value;
    judge(form);
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (apply.getAttribute("aria-disabled") === "true") return;
    if (await repartition(changes(form), form.dataset.noun)) delete form.dataset.edited;
  });
  undo.addEventListener("click", () => {
    delete form.dataset.edited;
    for (const row of form.querySelectorAll(".row")) writeRow(row, Number(row.dataset.has));
    judge(form);
    form.querySelector("input").focus();
  });
  const title = make("h3", {}, make("span", { class: "name" }), " ", make("span", { class: "state chip" }));
  const details = make("details", {}, make("summary", { text: "Change shares" }), form);
  card.append(title, make("p", { class: "about muted" }), make("p", { class: "health" }), make("div", { class: "granules", role: "img" }));
  card.append(make("ul", { class: "legend" }), make("ul", { class: "notes muted" }), details);
  return card;
}

function updateDevice(card, device, status) {
  setText(card.querySelector(".name"), `Device ${device.name}`);
  const state = card.querySelector(".state");
  setText(state, device.state);
  setAttribute(state, "class", `state chip ${device.state === "serving" ? "good" : "warn"}`);
  setText(card.querySelector(".about"), device.description);
  setText(card.querySelector(".health"), healthText(device.health));
  card.querySelector(".health").classList.toggle("bad", device.health.lost || Object.keys(device.health.errors).length > 0);
  const owners = ownersOf(device);
  const drawn = card.querySelector(".granules");
  setAttribute(drawn, "aria-label", summary(device));
  const granules = device.granules.map((size, index) => ({ index, size, ...owners.get(index) }));
  keep(drawn, granules, (each) => String(each.index), () => make("span"), (cell, each) => drawGranule(cell, each, device, status));
  const create = () => make("li", {}, make("span", { class: "swatch" }), make("span", { class: "text" }));
  keep(card.querySelector(".legend"), legend(device), (each) => each.key, create, (item, each) => {
    setAttribute(item.querySelector(".swatch"), "class", `swatch ${each.tenant ? colorOf(status, each.tenant) : "free"}`);
    setText(item.querySelector(".text"), each.text);
  });
  keep(card.querySelector(".notes"), notes(device), (each) => each, () => make("li"), setText);
  updateForm(card.querySelector("form"), device, status);
}

/** What keeps tenants from granules that others lend, and what tenants are held to. */
function notes(device) {
  const lending = device.wide.flatMap((wide) => [...wide.too_long, ...wide.problems].map((text) => `${wide.tenant}: ${text}`));
  return [...lending, ...device.fences.flatMap((fence) => [...held(fence), ...fence.problems.map((text) => `${fence.tenant}: ${text}`)])];
}

/** A fence in words: the rates, how often it was felt, and what does not hold, or need not, and why. */
function held(fence) {
  const how = rates(fence);
  return [...(how ? [how] : []), ...fence.notes.map((note) => (how ? `${fence.tenant}: ${note}` : `${fence.tenant} is not held: ${note}`))];
}

/** What a fence holds, in words; empty if that is nothing. */
function rates(fence) {
  if (fence.cores) return `${fence.tenant} is held at any time: ${fence.cores}`;
  const parts = [];
  if (fence.memory_bandwidth) {
    const where = fence.granules.length ? `: ${count(fence.launches, "inference")} on ${ranges(fence.granules)} so far` : "";
    parts.push(`${perSecond(fence.memory_bandwidth)} of memory${where}`);
    for (const { model, slows } of fence.models.filter((each) => each.slows)) parts.push(`${model} there, as others take ${digits(slows)} times as long beside it`);
  }
  if (fence.pcie) parts.push(`${perSecond(fence.pcie)} of PCIe: ${count(fence.waits, "inference")} waited so far`);
  return parts.length ? `${fence.tenant} has, while others work, ${parts.join("; ")}` : "";
}

/** What the device says of itself, as far as it does. */
function healthText(health) {
  if (health.lost) return "It does not answer any more.";
  const parts = [];
  if (health.utilization !== null) parts.push(`${percent(health.utilization)} busy by all programs`);
  if (health.memory_used_bytes !== null) parts.push(`${bytes(health.memory_used_bytes)} of ${bytes(health.memory_total_bytes)} in use`);
  for (const [path, name] of Object.entries(PATHS)) {
    const most = path === "memory" && health.memory_bandwidth !== null ? ` of ${perSecond(health.memory_bandwidth)}` : "";
    if (path in health.bytes_per_second) parts.push(`${name} ${perSecond(health.bytes_per_second[path])}${most}`);
  }
  if (health.power_watts !== null) parts.push(`${Math.round(health.power_watts)} of ${digits(health.power_limit_watts)} W`);
  if (health.temperature_celsius !== null) parts.push(`${health.temperature_celsius} °C`);
  if (health.throttled.length) parts.push(`throttled: ${health.throttled.join(", ")}`);
  for (const [number, times] of Object.entries(health.errors)) parts.push(`XID ${number}: ${count(times, "error")}`);
  return parts.join(" · ");
}

/** By granule: its owner, who may borrow it, and whether that one used its owner's granules in the last seconds. */
function ownersOf(device) {
  const owners = new Map();
  for (const share of device.shares) {
    for (const index of share.granules) owners.set(index, { owner: share.tenant, borrower: null, lent: false });
  }
  for (const wide of device.wide) {
    for (const { owner, granules } of wide.borrowed) {
      const share = device.shares.find((each) => each.tenant === owner);
      const borrower = device.shares.find((each) => each.tenant === wide.tenant);
      const lent = (share?.lent ?? 0) > LENT_NOW && (borrower?.borrowed ?? 0) > LENT_NOW;
      for (const index of granules) if (owners.has(index)) Object.assign(owners.get(index), { borrower: wide.tenant, lent });
    }
  }
  return owners;
}

function drawGranule(cell, { index, size, owner, borrower, lent }, device, status) {
  const own = owner ? colorOf(status, owner) : "free";
  const other = borrower ? `${lent ? "lent" : "lendable"} to-${colorOf(status, borrower)}` : "";
  setAttribute(cell, "class", `granule ${own} ${other}`.trim());
  setText(cell, String(index));
  const whose = owner ? `${owner}’s` : "free";
  const lending = borrower ? `; ${lent ? `lent to ${borrower} now` : `${borrower} may use it while ${owner} rests`}` : "";
  const noun = nounOf(device);
  const what = noun === "granule" ? `Granule ${index}, ${count(size, device.unit)}` : `${noun[0].toUpperCase()}${noun.slice(1)} ${index}`;
  setAttribute(cell, "title", `${what}: ${whose}${lending}`);
}

function legend(device) {
  const entries = device.shares.map((share) => ({ key: `t${share.tenant}`, tenant: share.tenant, text: describe(share, device) }));
  if (device.free) entries.push({ key: "free", text: `free: ${count(device.free, nounOf(device))}` });
  return entries;
}

function describe(share, device) {
  const parts = [`${share.tenant}: ${count(share.size, device.unit)}`];
  if (share.used !== null) parts.push(`${digits(share.used)} in use`);
  if (share.lent > LENT_NOW) parts.push(`${digits(share.lent)} lent`);
  if (share.borrowed > LENT_NOW) parts.push(`${digits(share.borrowed)} borrowed`);
  return parts.join(", ");
}

/** The drawing in words. */
function summary(device) {
  const shares = device.shares.map((share) => `${share.tenant} has ${ranges(share.granules)}`);
  const lent = device.wide.flatMap((wide) =>
    wide.borrowed.map(({ owner, granules }) => `${wide.tenant} may borrow ${ranges(granules)} of ${owner}`));
  const noun = nounOf(device);
  return [`${noun[0].toUpperCase()}${noun.slice(1)}s of device ${device.name}`, ...shares, `${device.free} free`, ...lent].join("; ");
}

function updateForm(form, device, status) {
  form.dataset.total = device.granules.length;
  form.dataset.noun = nounOf(device);
  const create = (share) => {
    const id = `share-${device.name}-${share.tenant}`;
    const most = { min: "1", max: String(device.granules.length), step: "1" };
    const number = make("input", { type: "number", id, required: "", ...most });
    const slider = make("input", { type: "range", tabindex: "-1", "aria-hidden": "true", ...most });
    return make("p", { class: "row" }, make("label", { for: id }), slider, number, make("span", { class: "had muted" }));
  };
  keep(form.querySelector(".rows"), device.shares, (share) => share.tenant, create, (row, share) => {
    const label = row.querySelector("label");
    setText(label, share.tenant);
    setAttribute(label, "class", `tag ${colorOf(status, share.tenant)}`);
    row.dataset.has = share.granules.length;
    row.dataset.tenant = share.tenant;
    setText(row.querySelector(".had"), `has ${share.granules.length}`);
    if (!form.dataset.edited) writeRow(row, share.granules.length);
  });
  judge(form);
}

function writeRow(row, value) {
  for (const input of row.querySelectorAll("input")) if (input.value !== String(value)) input.value = value;
}

function changes(form) {
  const rows = [...form.querySelectorAll(".row")];
  const wanted = rows.map((row) => [row.dataset.tenant, Number(row.querySelector("[type=number]").value), Number(row.dataset.has)]);
  return Object.fromEntries(wanted.filter(([, now, had]) => now !== had).map(([tenant, now]) => [tenant, now]));
}

/** Say what the shares add up to, and whether they can be given. */
function judge(form) {
  const total = Number(form.dataset.total);
  const numbers = [...form.querySelectorAll("[type=number]")];
  const sum = numbers.reduce((all, each) => all + Number(each.value), 0);
  const changed = Object.keys(changes(form)).length > 0;
  const left = total - sum;
  const rest = left < 0 ? `${-left} too many` : `${left} free`;
  setText(form.querySelector(".sum"), `${sum} of ${count(total, form.dataset.noun)}, ${rest}`);
  const possible = left >= 0 && changed && numbers.every((each) => each.validity.valid);
  form.querySelector(".sum").classList.toggle("bad", left < 0);
  setAttribute(form.querySelector("button:not([type])"), "aria-disabled", possible ? null : "true");
  form.querySelector("[type=button]").hidden = !changed;
}
