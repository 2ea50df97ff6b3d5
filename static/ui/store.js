// The list of sessions, polled while somebody looks, and told by "change" events.

import { api } from "./api.js";

const PERIOD = 2000;

export const store = Object.assign(new EventTarget(), {
  sessions: null, // null until the first answer
  error: null,
  find: (name) => store.sessions?.find((session) => session.name === name),
});

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
    store.sessions = await api.sessions(tail);
    store.error = null;
  } catch (error) {
    store.error = error;
  }
  store.dispatchEvent(new Event("change"));
}

/** Begin to poll, with so many bytes of each last job's output. */
export function startPolling(tailBytes = 0) {
  tail = tailBytes;
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  return refresh();
}
