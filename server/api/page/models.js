// The models of all tenants: whether they are ready, how they run, and buttons to load them again and to unload them.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { colorOf } from "./devices.js";
import { bytes, milliseconds, perSecond, rate } from "./format.js";

const GRAPHS = { captured: "captured graph", native: "native graph", none: "no graph" };
const COLUMNS = ["Model", "Tenant", "State", "Runs by", "Requests/s", "p50", "p99", "Memory", "Moves"];

/** Draw all models. `load(tenant, model)` and `unload(tenant, model)` are called by the buttons. */
export function drawModels(status, load, unload) {
  byId("models").classList.toggle("unmoved", status.models.every((model) => model.bytes_per_second === null));
  const key = (model) => JSON.stringify([model.tenant, model.name, model.version]);
  keep(byId("models").tBodies[0], status.models, key, (model) => createRow(model, load, unload),
    (row, model) => updateRow(row, model, status));
}

function createRow(model, load, unload) {
  const row = make("tr");
  for (const name of COLUMNS) {
    const isNumber = COLUMNS.indexOf(name) > 3;
    row.append(make(name === "Model" ? "th" : "td", { "data-column": name, ...(isNumber ? { class: "number" } : { scope: "row" }) }));
  }
  for (const cell of row.querySelectorAll("td[scope]")) cell.removeAttribute("scope");
  row.cells[1].append(make("span", { class: "tag" }));
  row.cells[2].append(make("span", { class: "chip" }), make("span", { class: "reason" }));
  row.cells[3].append(make("details", {}, make("summary"), make("dl")));
  const button = (what, onclick) => make("button", { type: "button", class: `quiet ${what}`, onclick });
  row.append(make("td", { class: "buttons" }, button("load", () => load(model.tenant, model.name)),
    button("unload", () => unload(model.tenant, model.name))));
  return row;
}

function updateRow(row, model, status) {
  setText(row.cells[0], model.version ? `${model.name} ${model.version}` : model.name);
  const tag = row.querySelector(".tag");
  setText(tag, model.tenant);
  setAttribute(tag, "class", `tag ${colorOf(status, model.tenant)}`);
  const chip = row.querySelector(".chip");
  setText(chip, model.state.toLowerCase());
  setAttribute(chip, "class", `chip ${{ READY: "good", LOADING: "warn" }[model.state] ?? "bad"}`);
  setText(row.querySelector(".reason"), model.reason);
  drawExecution(row.querySelector("details"), model.execution);
  setText(row.cells[4], rate(model.requests_per_second));
  setText(row.cells[5], milliseconds(model.p50_ms));
  setText(row.cells[6], milliseconds(model.p99_ms));
  setText(row.cells[7], bytes(model.device_bytes));
  drawMoved(row.cells[8], model.bytes_per_second);
  const isReady = model.state === "READY";
  writeButton(row.querySelector(".load"), isReady ? "Reload" : "Load", model);
  writeButton(row.querySelector(".unload"), "Unload", model);
  row.querySelector(".unload").hidden = !isReady;
}

/** The bytes of the device's memory that it moves; with a ~ where that is estimated. */
function drawMoved(cell, moved) {
  const about = moved?.by === "estimated" ? "~" : "";
  setText(cell, moved ? about + perSecond(moved.memory) : "–");
  const pcie = moved ? `PCIe in ${about}${perSecond(moved.pcie_in)}, out ${about}${perSecond(moved.pcie_out)}; ${moved.by}` : null;
  setAttribute(cell, "title", pcie);
}

/** The button says what it does, and to screen readers also with which model. */
function writeButton(button, word, model) {
  setText(button, word);
  setAttribute(button, "aria-label", `${word} ${model.name} of ${model.tenant}`);
}

/** How it runs in a few words, and when opened all that its executor says. */
function drawExecution(details, execution) {
  details.hidden = !execution;
  if (!execution) return;
  const { graphs, threads, steps, why, notes } = execution;
  const graphless = graphs === "none" && (threads !== undefined || steps !== undefined);  // On a CPU, and of several steps.
  const words = graphless ? [] : [GRAPHS[graphs] ?? String(graphs)];
  if (threads !== undefined) words.push(`${threads} thread${threads === 1 ? "" : "s"}`);
  if (steps !== undefined) words.push(`${steps.length} steps`);
  if (why || notes?.length) words.push("see why");
  setText(details.querySelector("summary"), words.join(", "));
  const entries = Object.entries(execution).filter(([name, value]) =>
    value !== "" && JSON.stringify(value) !== "[]" && (name !== "graphs" || !graphless));
  const create = () => make("div", {}, make("dt"), make("dd"));
  keep(details.querySelector("dl"), entries, ([name]) => name, create, (pair, [name, value]) => {
    setText(pair.firstElementChild, name === "shapes" ? "warmed for" : name);
    setText(pair.lastElementChild, name === "shapes" ? shapesText(value) : typeof value === "string" ? value : JSON.stringify(value));
  });
}

/** The shapes of the inputs of each request that was tried: `1x3, 4 and 8x3, 4`. */
function shapesText(requests) {
  return requests.map((shapes) => shapes.map((shape) => shape.join("x") || "a scalar").join(", ")).join(" and ");
}
