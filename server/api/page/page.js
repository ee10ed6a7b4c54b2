// The status page: asks the server once a second, and draws what it answers.

import { ask, forgetKey, hasKey, Refused, setKey } from "./api.js";
import { drawDevices } from "./devices.js";
import { byId, keep, make, setAttribute, setText } from "./dom.js";
import { drawEvents } from "./events.js";
import { listen, load, repartition, unload, updateForms } from "./forms.js";
import { drawModels } from "./models.js";
import { drawTenants } from "./tenants.js";

const PERIOD = 1000;
const OPEN_SHARES = 8;

let timer = 0;
let answeredAt = 0;

/** Ask now, and then once a second. While the page is hidden it asks nothing. */
async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  const began = performance.now();
  try {
    draw(await ask("/admin/status"));
    answeredAt = performance.now();
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    if (error.status === 401) return lock(error.message);
    showProblem(error);
  }
  timer = setTimeout(poll, Math.max(0, PERIOD - (performance.now() - began)));
}

function draw(status) {
  byId("locked").hidden = true;
  byId("status").hidden = false;
  byId("forget").hidden = !hasKey();
  byId("status").classList.remove("stale");
  setText(byId("version"), status.version);
  const pilot = status.autopilot;
  const paused = pilot.paused_for_seconds > 0 && pilot.mode !== "off" ? `, paused for ${Math.ceil(pilot.paused_for_seconds)} s` : "";
  const chips = [
    { text: status.ready ? "ready" : `${status.state}, not ready${status.progress ? `: ${status.progress}` : ""}`, kind: status.ready ? "good" : "bad" },
    { text: `autopilot ${pilot.mode}${paused}`, kind: "" },
  ];
  if (status.ready && status.state !== "serving") chips.push({ text: status.state, kind: "warn" });
  const unserved = status.tenants.filter((each) => !each.ready).map((each) => each.name);
  if (unserved.length) chips.push({ text: `served no model: ${unserved.join(", ")}`, kind: "bad" });
  if (status.moving) chips.push({ text: "shares are moving", kind: "warn" });
  drawChips(chips);
  drawDevices(status, repartition);
  drawTenants(status);
  drawModels(status, load, unload);
  drawEvents(status);
  updateForms(status);
  openShares(status);
}

function drawChips(chips) {
  keep(byId("chips"), chips, (each) => each.text, () => make("span"), (chip, each) => {
    setText(chip, each.text);
    setAttribute(chip, "class", `chip ${each.kind}`);
  });
}

/** On the first answer: show the form of shares, unless there are many tenants. */
function openShares(status) {
  if (answeredAt || status.tenants.length > OPEN_SHARES) return;
  for (const details of document.querySelectorAll(".device > details")) details.open = true;
}

/** The server does not answer as it should: keep what was shown, and say how old it is. */
function showProblem(error) {
  const old = answeredAt ? `; what is shown is ${Math.round((performance.now() - answeredAt) / 1000)} s old` : "";
  byId("status").classList.add("stale");
  drawChips([{ text: `${error.message}${old}`, kind: "bad" }]);
}

/** Only administrators may see more: say why, and ask for the key where there is one. */
function lock(reason) {
  byId("status").hidden = true;
  byId("locked").hidden = false;
  byId("forget").hidden = true;
  drawChips([]);
  const noKey = reason.startsWith("without server.admin_key_sha256");
  setText(byId("refusal"), `The server answers: ${reason}.`);
  setText(byId("wrong"), hasKey() && !noKey ? "That is not the admin key." : "");
  byId("key-form").hidden = noKey;
  forgetKey();
  byId("key").select();
}

function listenForKey() {
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    setText(byId("wrong"), "");
    setKey(byId("key").value, byId("remember").checked);
    poll();
  });
  byId("forget").addEventListener("click", () => {
    forgetKey();
    location.reload();
  });
}

document.addEventListener("visibilitychange", poll);
listenForKey();
listen();
poll();
