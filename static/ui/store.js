// The list of sessions, polled while somebody looks, and told by "change" events; the agents, once.

import { api } from "./api.js";

const PERIOD = 2000;
const USAGE_PERIOD = 10_000;

export const store = Object.assign(new EventTarget(), {
  sessions: null, // null until the first answer
  error: null,
  agents: new Map(), // what the server says of each, by its name
  usage: new Map(), // what sessions with hidden keys have used, by their names
  find: (name) => store.sessions?.find((session) => session.name === name),
});

export const agentName = (name) => store.agents.get(name)?.title ?? name;

/** What a session can be created from; the agents are kept. */
export async function profiles() {
  const data = await api.profiles();
  store.agents = new Map(data.agentDetails.map((agent) => [agent.name, agent]));
  return data;
}

let knowing;

/** Resolves when the agents are known, or cannot be had now. */
export const agentsKnown = () => (knowing ??= profiles().catch(() => (knowing = undefined)));

let timer;
let asked;
let tail = 0;

/** Ask now; concurrent calls share one request. */
export function refresh() {
  clearTimeout(timer);
  asked ??= load().finally(() => {
    asked = undefined;
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(refresh, PERIOD);
  });
  return asked;
}

async function load() {
  try {
    [store.sessions] = await Promise.all([api.sessions(tail), agentsKnown()]);
    store.error = null;
    loadUsage();
  } catch (error) {
    store.error = error;
  }
  store.dispatchEvent(new Event("change"));
}

let usageAsked = -Infinity;

/** Ask now and then for what was used, where that is counted; the list does not wait for it. */
async function loadUsage() {
  const counted = store.sessions.some(({ keys }) => keys === "hidden");
  if (!counted || performance.now() - usageAsked < USAGE_PERIOD) return;
  usageAsked = performance.now();
  try {
    const { sessions = [] } = await api.allUsage();
    store.usage = new Map(sessions.map((entry) => [entry.name, entry]));
    store.dispatchEvent(new Event("change"));
  } catch {
    // The page of what was used says why; elsewhere it is not there yet.
  }
}

/** Begin to poll, with so many bytes of each last job's output. */
export function startPolling(tailBytes = 0) {
  tail = tailBytes;
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  return refresh();
}
