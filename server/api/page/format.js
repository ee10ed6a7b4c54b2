// Numbers and times as people read them.

const NONE = "–";

/** Three digits, or two decimals: 0.12, 1.23, 12.3, 123, 1234. */
export function digits(value) {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size < 0.005) return "0";
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

/** Milliseconds in the unit that suits them. */
export function milliseconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return `${Math.round(1000 * value)} µs`;
  return value < 1000 ? `${digits(value)} ms` : `${digits(value / 1000)} s`;
}

/** A rate: whole from 100 on. */
export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 100 ? String(Math.round(value)) : value >= 10 ? value.toFixed(1) : value > 0 ? value.toFixed(2) : "0";
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${Math.round(100 * value)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  for (; value >= 1024 && index < units.length - 1; index++) value /= 1024;
  return `${index ? digits(value) : value} ${units[index]}`;
}

/** Bytes a second as data sheets count them, in thousands: `3.35 TB/s`. */
export function perSecond(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  let index = 0;
  for (; value >= 1000 && index < units.length - 1; index++) value /= 1000;
  return `${index ? digits(value) : Math.round(value)} ${units[index]}`;
}

/** How long ago: `now`, `12 s ago`, `3 min ago`. */
export function ago(seconds) {
  if (seconds < 2) return "just now";
  if (seconds < 120) return `${Math.round(seconds)} s ago`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

/** A number and its noun: `1 core`, `4 cores`. */
export function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

/** Indices as ranges: `0–3, 6`. */
export function ranges(indices) {
  const sorted = [...indices].sort((a, b) => a - b);
  const found = [];
  for (const each of sorted) {
    const last = found.at(-1);
    if (last && last[1] === each - 1) last[1] = each;
    else found.push([each, each]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ") || "none";
}
