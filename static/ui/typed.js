// The door for what a container has a hand in: an agent's events, sessions, jobs, decisions. What
// passes has the types that are written down for it, whatever was sent. A strict type throws at a
// value that does not fit, and the whole that it was part of is then shown as it came. A lenient
// type makes the value fit, so that one odd field hides nothing else.

const DEEPEST = 64;

class Unfit extends TypeError {}

/** Give up on a value where `fits` is false. */
export function check(fits, what = "this field") {
  if (!fits) throw new Unfit(`${what} has another type than expected`);
}

// --- Strict types ---

export function text(value, key) {
  check(typeof value === "string", key);
  return value;
}

/** A number that can be counted with: no infinity, nothing that has lost its unit. */
export function number(value, key) {
  check(typeof value === "number" && Math.abs(value) <= Number.MAX_SAFE_INTEGER, key);
  return value;
}

export function flag(value, key) {
  check(typeof value === "boolean", key);
  return value;
}

/** Any value of JSON that is not nested so deeply that it could not be written out again. */
export function any(value, key) {
  const look = (inner, depth) => {
    check(depth < DEEPEST, key);
    if (inner === null || typeof inner !== "object") return;
    for (const child of Object.values(inner)) look(child, depth + 1);
  };
  look(value, 0);
  return value;
}

export const list = (type) => (value, key) => {
  check(Array.isArray(value), key);
  return value.map((item) => type(item, key));
};

const isRecord = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** An object with these fields and no other; those that are missing or null are left out. */
export const record = (fields) => (value, key) => {
  check(isRecord(value), key);
  return Object.fromEntries(Object.entries(fields).filter(([name]) => value[name] != null)
    .map(([name, type]) => [name, type(value[name], name)]));
};

// --- Lenient types ---

/** Text of any value; halves of characters, which no address can hold, are replaced. */
export function shown(value) {
  if (typeof value === "string") return value.toWellFormed?.() ?? value;
  try {
    return JSON.stringify(any(value));
  } catch {
    return "(nested too deeply to be shown)";
  }
}

/** Text with halves of characters kept: they stand for the bytes of a path that are no UTF-8. */
const exact = (value) => (typeof value === "string" ? value : shown(value));

const amount = (value) => {
  try {
    return number(value);
  } catch {
    return undefined;
  }
};
const whether = (value) => value === true;
const when = (value) => amount(value) ?? shown(value);
const each = (type) => (value) => (Array.isArray(value) ? value : [value]).map(type);
const texts = each(shown);

/** An object of lenient fields; anything else becomes the text of one of them. */
const fitted = (fields, one) => {
  const type = record(fields);
  return (value) => type(isRecord(value) ? value : { [one]: shown(value) });
};

/** The values of an object as rows, each with its name; nothing else has any. */
const entries = (fields, name) => {
  const type = record(fields);
  return (value) => Object.entries(isRecord(value) ? value : {})
    .map(([key, one]) => ({ [name]: shown(key), ...type(isRecord(one) ? one : {}) }));
};

/** Rows of which each has a name, whatever was sent. */
const rows = (fields, name) => each((value) => ({ [name]: "", ...fitted(fields, name)(value) }));
const jobChanges = fitted({ turn: shown, files: amount, added: amount, deleted: amount,
  risky: amount }, "turn");
export const job = fitted({ id: shown, session: shown, kind: shown, state: shown, exit: amount,
  command: shown, prompt: shown, agent: shown, started: when, ended: when, size: amount,
  error: shown, tail: shown, changes: jobChanges }, "error");
const rules = fitted({ allow: texts, deny: texts }, "allow");
const session = { name: shown, state: shown, agent: shown, directory: shown };
export const row = fitted({ ...session, workspace: shown, network: shown, keys: shown,
  agentMode: whether, jobs: amount,
  autostarts: amount, terminals: amount, last: job }, "name");
export const detail = fitted({ ...session, profile: shown, workdir: shown, runtime: shown,
  workspace: shown, keys: shown,
  agentPromptCommand: shown, ports: texts,
  network: (value) => (isRecord(value) ? rules(value) : shown(value)) }, "name");
const event = fitted({ session: shown, what: shown, text: shown, turn: shown }, "text");
export const news = ({ number: last, news }) => ({ number: amount(last) ?? 0, news: each(event)(news) });
export const users = fitted({ users: texts }, "users");
const profile = fitted({ name: shown, agent: shown, directory: shown, error: shown }, "name");
const agent = fitted({ name: shown, title: shown, events: shown }, "name");
export const profiles = fitted({ profiles: each(profile), agentDetails: each(agent),
  directory: shown }, "directory");
const DECISION = fitted({ host: shown, port: amount, verdict: shown, rule: shown, reason: shown,
  time: shown, first: shown, count: amount, kind: shown, address: shown }, "host");
export const decision = (value) => ({ host: "", time: "", ...DECISION(value) });
const models = entries({ requests: amount, input: amount, output: amount, cached: amount,
  written: amount, written_long: amount, usd: amount }, "model");
const budget = fitted({ usd: amount, tokens: amount, minutes: amount, per: shown }, "per");
const used = { error: shown, budget, left: budget, days: entries({ models }, "day"),
  unpriced: texts };
export const usage = fitted({ ...used, prices: shown, broker: shown, hiddenKeys: texts }, "error");
export const allUsage = fitted({ sessions: rows({ name: shown, ...used }, "name"),
  prices: shown }, "prices");
const turns = rows({ id: shown, kind: shown, when: shown, what: shown, command: shown, after: shown,
  files: amount, added: amount, deleted: amount, risky: amount,
  beside: texts, state: shown, turns: texts, paths: each(exact) }, "id");
export const changes = fitted({ turns, read: shown }, "read");
const files = rows({ path: exact, status: shown, oldMode: shown, newMode: shown, size: amount,
  binary: whether, added: amount, deleted: amount, risk: texts, kept: (value) => value === true,
  seen: shown, why: shown, files: amount, patch: exact, truncated: whether }, "path");
export const diff = fitted({ files, more: amount }, "from");
const reasons = rows({ path: exact, status: shown, why: shown, risk: texts }, "path");
export const outcomeOf = fitted({ turns: texts, changed: reasons, left: reasons,
  commits: fitted({ branch: shown, count: amount, problem: shown }, "problem") }, "problem");
