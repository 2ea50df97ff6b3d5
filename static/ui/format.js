// How times, sizes and states read.

/** The words for a key, or the key itself: it may be the name of anything. */
export const named = (words, key) => (Object.hasOwn(words, key) ? words[key] : key);

export function duration(milliseconds) {
  const seconds = milliseconds / 1000;
  if (!(seconds >= 0)) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(iso) {
  const seconds = (Date.now() - Date.parse(iso)) / 1000;
  if (Number.isNaN(seconds)) return "at an unknown time";
  if (seconds < 45) return "just now";
  if (seconds < 5400) return `${Math.max(1, Math.round(seconds / 60))} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}

export function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  const unit = bytes < 1e6 ? "kB" : bytes < 1e9 ? "MB" : "GB";
  return `${(bytes / { kB: 1e3, MB: 1e6, GB: 1e9 }[unit]).toFixed(1)} ${unit}`;
}

export const grouped = (number) => number.toLocaleString("en", { maximumFractionDigits: 1 });

export const dollars = (usd) => `$${usd > 0 && usd < 0.01 ? usd.toFixed(5) : usd.toFixed(2)}`;

export const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;

/** A job's state as { text, tone }; tone is a class: run, good, bad or off. */
export function outcome(job) {
  if (job.state === "running") return { text: "running", tone: "run" };
  if (job.state === "cancelled") return { text: "cancelled", tone: "off" };
  if (job.state === "lost") return { text: "lost", tone: "bad" };
  if (job.exit === 0) return { text: job.kind === "prompt" ? "done" : "exit 0", tone: "good" };
  return { text: job.exit == null ? "failed" : `exit ${job.exit}`, tone: "bad" };
}

export function lasted(job) {
  const end = job.ended ? instant(job.ended) : Date.now();
  return duration(end - instant(job.started));
}

/** Times come as ISO text; some as seconds. */
export const instant = (when) => (typeof when === "number" ? when * 1000 : Date.parse(when));

/** Whether a session has a command for AGENT mode. */
export const canBePrompted = (session) => (session.agentPromptCommand ?? "").includes("{prompt}");

/** What ends with a container, as a sentence more; "" for nothing. */
export const inUse = (users) =>
  users.length ? ` It is in use, and this ends: ${users.slice(0, 3).join("; ")}${users.length > 3 ? " …" : ""}` : "";

/** The last folder of a path, for where there is little room. */
export const tailOf = (path) => path.replace(/\/+$/, "").split("/").pop() || path;

/** What a job's turn has changed, in words; "" where that is not known or nothing. */
export const changesText = ({ files, added, deleted, risky } = {}) => !files ? ""
  : [`${count(files, "file")} +${added ?? 0} −${deleted ?? 0}`, risky && count(risky, "warning")]
    .filter(Boolean).join(", ");

/** What models have used together; usd is undefined where none has a price, and the least it was
 * where one of them is `unpriced`. A budget is for tokens but those from a cache. */
export function sumOf(models) {
  const priced = models.filter(({ usd }) => usd !== undefined);
  const add = (list, value) => list.reduce((sum, model) => sum + Math.max(value(model), 0), 0);
  const counted = ({ input = 0, output = 0, written = 0, written_long = 0 }) =>
    input + output + written + written_long;
  return { tokens: add(models, counted), cached: add(models, ({ cached = 0 }) => cached),
    usd: priced.length ? add(priced, ({ usd }) => usd) : undefined,
    unpriced: priced.length < models.length };
}

/** What was used in words: of models without a price tokens only. */
export function usageText({ days = [] }) {
  const { tokens, usd, unpriced } = sumOf(days.flatMap(({ models = [] }) => models));
  const price = usd === undefined ? "" : ` · ${unpriced ? "at least " : ""}${dollars(usd)}`;
  return `${grouped(tokens)} tokens${price}`;
}

/** Where the changes of a session are shown, those of a turn open. */
export const changesAddress = (name, turn = "") =>
  `/#/s/${encodeURIComponent(name)}/changes${turn && `/${encodeURIComponent(turn)}`}`;

/** How many jobs of a session are work: its autostart script may stay for as long as it runs. */
export const working = (row) => (row.jobs ?? 0) - (row.autostarts ?? 0);
