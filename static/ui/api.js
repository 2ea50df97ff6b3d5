// The web service, as the README describes it under "Web service API".

import { allUsage, changes, decision, detail, diff, job, news, outcomeOf, profiles, row, shown,
  usage, users } from "./typed.js";

export class ApiError extends Error {
  constructor(status, { code = "failed", message = `the server answered with status ${status}`, hint = "" } = {}) {
    super(message);
    Object.assign(this, { status, code, hint });
  }
}

export const OFFLINE = "offline";
const path = (...parts) => "/api/" + parts.map(encodeURIComponent).join("/");

/** A path as no address or body changes it: JSON writes halves of characters with ASCII. */
const quoted = (file) => JSON.stringify(file);

/** Tells whether the server can be reached, by "change" events. */
export const link = Object.assign(new EventTarget(), { up: true });

function setLink(up) {
  if (link.up === up) return;
  link.up = up;
  link.dispatchEvent(new Event("change"));
}

function toLogin() {
  location.assign((location.pathname.startsWith("/preview") ? "/preview" : "") + "/auth/login" + location.hash);
  return new Promise(() => {}); // the page goes
}

async function answer(response) {
  if (response.status === 401) return toLogin();
  if (response.ok) return response.json();
  const data = await response.json().catch(() => ({}));
  throw new ApiError(response.status, data.error);
}

// A browser ends what is on its way when a network interface comes or goes, as with each container on its machine.
const TRIES = 3;

/** What tells the server that it is asked the same again. */
const newKey = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

/** Fetch, and note whether the server was there. Rejects with an ApiError whose code is OFFLINE when it was not. */
async function reach(address, options, tries = TRIES) {
  try {
    const response = await fetch(address, { ...options, redirect: "error", cache: "no-store" });
    setLink(true);
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (tries > 1) return reach(address, options, tries - 1);
    setLink(false);
    throw new ApiError(0, { code: OFFLINE, message: "the server does not answer", hint: "is it still running?" });
  }
}

async function call(method, address, body) {
  const options = { method, headers: method === "GET" ? {} : { "Idempotency-Key": newKey() } };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  return answer(await reach(address, options));
}

export const api = {
  news: async (after) => news(await call("GET", `${path("news")}?after=${after}`)),
  sessions: async (tail) =>
    (await call("GET", path("sessions") + (tail ? `?tail=${tail}` : ""))).map(row),
  create: (what) => call("POST", path("sessions"), what),
  session: async (name) => detail(await call("GET", path("sessions", name))),
  remove: (name, force = "") => call("DELETE", path("sessions", name) + force),
  users: async (name) => users(await call("GET", path("sessions", name, "users"))).users,
  act: (name, action, data) => call("POST", path("sessions", name, action), data),
  settings: (name) => call("GET", path("sessions", name, "settings")),
  saveSettings: (name, changes) => call("PUT", path("sessions", name, "settings"), changes),
  usage: async (name) => usage(await call("GET", path("sessions", name, "usage"))),
  allUsage: async () => allUsage(await call("GET", path("usage"))),
  network: (name) => call("GET", path("sessions", name, "network")),
  changeNetwork: (name, rules) => call("POST", path("sessions", name, "network"), rules),
  decisionsAddress: (name) => path("sessions", name, "network", "events"),
  decision: (data) => decision(JSON.parse(data)),
  command: async (name, command) =>
    job(await call("POST", path("sessions", name, "command"), { command })),
  prompt: async (name, prompt) =>
    job(await call("POST", path("sessions", name, "prompt"), { prompt })),
  jobs: async (name, limit = 50) =>
    (await call("GET", path("sessions", name, "jobs") + `?limit=${limit}`)).map(job),
  cancel: (name, id) => call("DELETE", path("sessions", name, "jobs", id)),
  profiles: async () => profiles(await call("GET", path("profiles"))),
  directories: async (begun) => {
    const query = new URLSearchParams({ path: begun });
    return (await call("GET", `${path("directories")}?${query}`)).directories;
  },
  terminals: (name) => call("GET", path("sessions", name, "terminals")),
  closeTerminal: (name, id) => call("DELETE", path("sessions", name, "terminals", id)),
  changes: async (name) => changes(await call("GET", `${path("sessions", name, "changes")}?again=1`)),
  diff: async (name, turn, file) => {
    const query = new URLSearchParams({ turn, patch: 1, ...(file !== undefined && { path: quoted(file) }) });
    return diff(await call("GET", `${path("sessions", name, "changes", "diff")}?${query}`));
  },
  change: async (name, verb, { paths, ...what }) => outcomeOf(await call("POST",
    path("sessions", name, "changes", verb), paths ? { ...what, paths: paths.map(quoted) } : what)),
  logout: () => call("POST", "/auth/logout"),
  outputAddress: (name, id) => path("sessions", name, "jobs", id, "output"),
};

export const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// A browser opens six connections to a server, for all of its tabs together: a tab follows few jobs at a time,
// and none while nobody looks at it.
const FOLLOWED = 2;
const HIDDEN_MILLISECONDS = 20_000;
let followed = 0;
const queue = [];

async function slot(signal) {
  while (followed >= FOLLOWED && !signal.aborted) {
    await new Promise((free) => {
      queue.push(free);
      signal.addEventListener("abort", free, { once: true });
    });
  }
  followed += 1;
}

function leaveSlot() {
  followed -= 1;
  queue.splice(0).forEach((free) => free());
}

/** Resolves when the page can be seen. */
const seen = () => new Promise((resolve) => {
  const look = () => {
    if (document.hidden) return;
    document.removeEventListener("visibilitychange", look);
    resolve();
  };
  document.addEventListener("visibilitychange", look);
  look();
});

/** A signal that aborts with another one, or when the page has been hidden for a while. */
function whileSeen(signal) {
  const controller = new AbortController();
  const abort = () => controller.abort();
  let timer;
  const look = () => {
    clearTimeout(timer);
    if (document.hidden) timer = setTimeout(abort, HIDDEN_MILLISECONDS);
  };
  document.addEventListener("visibilitychange", look);
  signal.addEventListener("abort", abort);
  const done = () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", look);
    signal.removeEventListener("abort", abort);
  };
  return [controller.signal, done];
}

/**
 * Follow a job from an offset on until it ends or `signal` aborts; a lost connection is taken up where it broke.
 * `on(event, data)` gets "job" and "end" with the job, "stdout" and "stderr" with text.
 */
export async function follow(name, id, { from = 0, signal, on }) {
  let offset = from;
  for (let wait = 250; !signal.aborted; wait = Math.min(wait * 2, 5000)) {
    await seen();
    await slot(signal);
    const [stop, done] = whileSeen(signal);
    try {
      const response = await reach(path("sessions", name, "jobs", id, "events") + `?from=${offset}`, { signal: stop });
      if (!response.ok) return void (await answer(response));
      for await (const event of serverSentEvents(response.body)) {
        if (signal.aborted) return;
        wait = 250;
        if (event.id) offset = Number(event.id);
        const data = JSON.parse(event.data);
        on(event.event, event.event.startsWith("std") ? shown(data) : job(data));
        if (event.event === "end") return;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.code !== OFFLINE) throw error;
      if (!(error instanceof ApiError || error instanceof TypeError || error.name === "AbortError")) throw error;
    } finally {
      done();
      leaveSlot();
    }
    if (!stop.aborted) await pause(wait);
  }
}

/** Parse a stream of server-sent events into { event, data, id }. */
async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const event = {};
        for (const line of block.split("\n")) {
          const colon = line.indexOf(": ");
          if (colon > 0) event[line.slice(0, colon)] = line.slice(colon + 2);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
