// Requests to the server: all of them to the origin that this page came from.

const STORED = "greenlane admin key";
const TIMEOUT = 10_000;

let key = sessionStorage.getItem(STORED);

/** An answer other than a 2xx; `status` is 0 where there was none. */
export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** Whether there is a key to forget. */
export function hasKey() {
  return key !== null;
}

/** Send this key from now on; `remember` it in this tab. */
export function setKey(value, remember) {
  key = value;
  if (remember) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
}

export function forgetKey() {
  key = null;
  sessionStorage.removeItem(STORED);
}

/** The JSON of an answer. Throws Refused. Changes are waited for as long as they take: a model may have to be built. */
export async function ask(path, method = "GET", body = undefined) {
  const headers = {};
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const signal = method === "GET" ? AbortSignal.timeout(TIMEOUT) : undefined;
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
    });
  } catch (error) {
    throw new Refused(0, error instanceof TypeError ? "the server does not answer" : String(error.message ?? error));
  }
  const text = await answer.text();
  if (!answer.ok) throw new Refused(answer.status, errorIn(text) ?? `the server answered ${answer.status}`);
  return text ? JSON.parse(text) : {};
}

function errorIn(text) {
  try {
    return String(JSON.parse(text).error);
  } catch {
    return undefined;
  }
}
