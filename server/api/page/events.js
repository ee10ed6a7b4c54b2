// What went wrong lately, and the last moves of granules with their reasons.

import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { ago, milliseconds } from "./format.js";

const OUTCOMES = { moved: "good", refused: "bad", proposed: "" };

export function drawEvents(status) {
  const create = () => make("li", {}, make("span", { class: "when muted" }), make("span", { class: "chip" }), make("span", { class: "text" }),
    make("span", { class: "more muted" }));
  const key = (each) => JSON.stringify([each.tenant, each.text, each.first]);
  keep(byId("problems"), status.problems, key, create, (item, each) => {
    const repeated = each.count > 1 ? `${each.count} times, first ${ago(status.at - each.first)}` : "";
    write(item, ago(status.at - each.last), each.tenant || "server", "", each.text, repeated);
  }, "None.");
  keep(byId("moves"), status.moves, (each) => String(each.number), create, (item, each) => {
    write(item, ago(status.at - each.at), each.outcome, OUTCOMES[each.outcome] ?? "", moveText(each), moveDetails(each));
  }, "None.");
}

function write(item, when, chip, kind, text, more) {
  setText(item.querySelector(".when"), when);
  setText(item.querySelector(".chip"), chip);
  setAttribute(item.querySelector(".chip"), "class", `chip ${kind}`);
  setText(item.querySelector(".text"), text);
  setText(item.querySelector(".more"), more);
}

function moveText(move) {
  const names = Object.keys(move.after);
  const shares = names.map((name) => `${name} ${move.before[name] ?? 0} → ${move.after[name]}`).join(", ");
  return [`${move.by}: ${shares || "no change"}`, move.reason, move.error].filter(Boolean).join("; ");
}

function moveDetails(move) {
  if (move.outcome !== "moved") return "";
  const pauses = Object.entries(move.paused).map(([name, pause]) => `${name} paused for ${milliseconds(pause.ms)}`);
  return [`prepared in ${milliseconds(move.prepared_ms)}`, ...pauses].join(", ");
}
