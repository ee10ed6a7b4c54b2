// Forms and buttons that change the server, and what they answered.

import { ask } from "./api.js";
import { byId, keep, make, setOptions, setText } from "./dom.js";
import { count } from "./format.js";

const SHOWN = 8000;
let hiding = 0;

/** Say in the one place for it what came of something; errors stay until the next. */
export function say(text, failed = false) {
  const result = byId("result");
  clearTimeout(hiding);
  const close = make("button", { type: "button", class: "quiet", text: "Close", onclick: () => result.replaceChildren() });
  result.replaceChildren(make("p", { text }), close);
  result.classList.toggle("bad", failed);
  if (!failed) hiding = setTimeout(() => result.replaceChildren(), SHOWN);
}

/** Make a change, and say what came of it, which may be a function of the answer; whether it was made. */
async function change(path, method, body, doing, done) {
  say(doing);
  try {
    const answer = await ask(path, method, body);
    say(typeof done === "function" ? done(answer) : done);
  } catch (error) {
    say(error.message, true);
    return false;
  }
  return true;
}

export function repartition(counts, noun) {
  const text = Object.entries(counts).map(([name, number]) => `${name} ${count(number, noun)}`).join(", ");
  return change("/admin/partitions", "PUT", counts, `Giving ${text} …`, `Given: ${text}.`);
}

function modelPath(tenant, model, what) {
  return `/admin/tenants/${encodeURIComponent(tenant)}/models/${encodeURIComponent(model)}/${what}`;
}

export function load(tenant, model) {
  return change(modelPath(tenant, model, "load"), "POST", undefined, `Loading ${model} for ${tenant} …`, `${model} of ${tenant} is loaded.`);
}

export async function unload(tenant, model) {
  if (!(await confirmed(`Unload ${model} of ${tenant}? Its requests are answered 503 from then on.`, "Unload"))) return;
  await change(modelPath(tenant, model, "unload"), "POST", undefined, `Unloading ${model} of ${tenant} …`, `${model} of ${tenant} is unloaded.`);
}

/** Ask whether to do something; `word` is on the button that does it. */
function confirmed(question, word) {
  const dialog = byId("confirm");
  setText(byId("confirm-text"), question);
  setText(byId("confirm-yes"), word);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Listen to the forms that are there from the beginning. */
export function listen() {
  byId("confirm-yes").addEventListener("click", () => byId("confirm").close("yes"));
  byId("confirm-no").addEventListener("click", () => byId("confirm").close(""));
  onSubmit("load-form", () => load(byId("load-tenant").value, byId("load-model").value.trim()));
  byId("mode").addEventListener("change", () => (byId("mode").dataset.edited = "yes"));
  onSubmit("autopilot-form", async () => {
    const mode = byId("mode").value;
    if (await change("/admin/autopilot", "PUT", { mode }, "Switching …", `The autopilot is ${mode}.`)) delete byId("mode").dataset.edited;
  });
  onSubmit("transfer-form", () => {
    const tenant = byId("transfer-tenant").value;
    const body = { device: byId("transfer-device").value };
    if (byId("transfer-count").value) body.granules = Number(byId("transfer-count").value);
    const path = `/admin/tenants/${encodeURIComponent(tenant)}/device`;
    return change(path, "PUT", body, `Moving ${tenant} …`, `${tenant} is on device ${body.device}.`);
  });
  onSubmit("reload-form", () => change("/admin/reload", "POST", undefined, "Reading the configuration …", ({ changed }) => {
    const keys = changed.map((each) => each.key).join(", ");
    return keys ? `The configuration was read; changed: ${keys}.` : "The configuration was read; nothing has changed.";
  }));
  onSubmit("drain-form", async () => {
    if (!(await confirmed("Drain the server? It refuses new requests from then on, for good.", "Drain"))) return;
    await change("/admin/drain", "POST", undefined, "Draining …", "The server drains.");
  });
}

function onSubmit(id, action) {
  byId(id).addEventListener("submit", (event) => {
    event.preventDefault();
    action();
  });
}

/** Offer what there is now; what was chosen stays. */
export function updateForms(status) {
  const tenants = status.tenants.map((each) => each.name);
  const models = [...new Set(status.models.map((each) => each.name))];
  setOptions(byId("load-tenant"), tenants);
  setOptions(byId("transfer-tenant"), tenants);
  setOptions(byId("transfer-device"), status.devices.map((each) => each.name));
  keep(byId("known"), models, (name) => name, (name) => make("option", { value: name }), () => {});
  keep(byId("notes"), status.autopilot.notes, (note) => note, (note) => make("li", { text: note }), () => {});
  if (!byId("mode").dataset.edited) byId("mode").value = status.autopilot.mode;
  byId("transfer-form").hidden = status.devices.length < 2;
}
