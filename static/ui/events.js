// The agents' JSON event streams, read into blocks that mean something.
//
// A block is { kind, … } and may change until the turn is over:
//   text      { text }                                what the agent says, Markdown
//   thinking  { text }
//   tool      { id, name, title, input, output, status }   status: "running", "ok", "failed"
//   note      { text, tone }                          tone: "info" or "bad"
//   raw       { text, stream }                        what nobody here knows, as it came
//   summary   { cost, tokens: { in, out, cached }, milliseconds, turns, failed }
// An event is told by its shape, and the agent that was started is only tried first: a template may
// run any agent, or something else. An event passes through its reader's type before anything of it
// is shown; one that does not fit becomes a raw block.

import { any, check, flag, list, number, record, text } from "./typed.js";

const RAW_CHARS = 400_000; // of a block; the server keeps all
const LINE_CHARS = 4_000_000; // of an event; what is longer is none
const TITLE_CHARS = 500;

const isText = (value) => typeof value === "string";

const pretty = (value) => (isText(value) ? value : JSON.stringify(value, null, 2));

/** Text out of a tool's result: a string, a list of parts, or any other value. */
function resultText(content) {
  if (content == null) return "";
  if (!Array.isArray(content)) return pretty(content);
  return content.map((part) => (isText(part?.text) ? part.text
    : isText(part?.type) ? `[${part.type}]` : pretty(part))).join("\n");
}

/** What an error says: a string, an object with a message somewhere, or any other value. */
const errorText = (error) => [error?.data?.message, error?.message, error?.name].find(isText)
  ?? pretty(error);

/** One line that says what a tool call is about. */
export function toolTitle(input) {
  if (input == null) return "";
  const main = isText(input) ? input
    : ["command", "cmd", "file_path", "filePath", "path", "absolute_path", "pattern", "query",
      "url", "prompt", "description", "subject"].map((key) => input[key])
      .find((value) => value != null && value !== "") ?? input;
  const words = Array.isArray(main) && main.every(isText);
  const line = words ? main.join(" ") : isText(main) ? main : JSON.stringify(main);
  return line === "{}" ? "" : line.slice(0, TITLE_CHARS);
}

export class AgentStream {
  /**
   * `changed(block, isNew)` is called for every block that is new or has changed; `name` is of the
   * reader that is asked first.
   */
  constructor(changed, fromTheMiddle = false, name = "") {
    this.changed = changed;
    this.readers = [...Object.values(READERS), ANY_READER];
    if (Object.hasOwn(READERS, name)) this.readers.unshift(READERS[name]);
    this.skip = fromTheMiddle; // up to the end of the line

    this.rest = { stdout: "", stderr: "" };
    this.tools = new Map();
    this.parts = new Map(); // blocks that are still being written, by an id of the stream's
    this.open = null; // the text block that deltas go to
    this.writing = new Map(); // the message and block that deltas go to, by the sub-agent writing
    this.tokens = { in: 0, out: 0, cached: 0 };
    this.cost = null;
    this.spoke = false;
    this.known = false; // whether an event of an agent was seen
    this.summary = null;
  }

  /** Take a piece of a job's output. */
  feed(stream, text) {
    if (this.skip) {
      const end = text.indexOf("\n");
      if (end < 0) return;
      text = text.slice(end + 1);
      this.skip = false;
    }
    const lines = (this.rest[stream] + text).split("\n");
    this.rest[stream] = lines.pop();
    for (const line of lines) this.line(line, stream);
    if (this.rest[stream].length <= LINE_CHARS) return;
    this.raw(this.rest[stream], stream);
    this.rest[stream] = "";
  }

  /** The job is over. */
  end() {
    for (const [stream, rest] of Object.entries(this.rest)) if (rest) this.line(rest, stream);
    this.rest = { stdout: "", stderr: "" };
    this.open = null;
    for (const tool of this.tools.values()) {
      if (tool.status === "running") this.change(tool, { status: "failed", output: tool.output || "(no result came)" });
    }
    if (!this.summary && (this.tokens.in || this.tokens.out || this.cost != null)) this.summarize({});
  }

  line(line, stream) {
    const event = stream === "stdout" ? parsed(line) : null;
    const reader = isText(event?.type) && this.readers.find(({ fits }) => fits(event));
    if (reader) {
      this.known = true;
      try {
        if (reader.read(this, reader.type(event)) !== false) return;
      } catch { /* an event of a known name in an unknown shape: shown as it came */ }
    }
    this.raw(line, stream);
  }

  // --- Blocks ---

  add(block) {
    this.open = null;
    this.changed(block, true);
    return block;
  }

  change(block, what) {
    Object.assign(block, what);
    this.changed(block, false);
  }

  raw(text, stream) {
    if (this.open?.kind === "raw" && this.open.stream === stream) {
      const all = `${this.open.text}\n${text}`;
      const cut = all.length > RAW_CHARS;
      this.change(this.open, cut ? { text: all.slice(-RAW_CHARS / 2), cut } : { text: all });
    } else if (text) {
      this.open = this.add({ kind: "raw", text, stream });
    }
  }

  note(text, tone = "info") {
    check(isText(text) && text.trim());
    this.add({ kind: "note", text, tone });
  }

  say(text, kind = "text") {
    check(isText(text));
    if (!text) return null;
    this.spoke ||= kind === "text";
    return this.add({ kind, text });
  }

  /** Add to the text that is being written, or begin it. */
  delta(text) {
    check(isText(text));
    if (this.open?.kind === "text") this.change(this.open, { text: this.open.text + text });
    else this.open = this.say(text);
  }

  /** Add or change a block of which each event carries all so far. */
  whole({ id, text }, kind, done) {
    check(isText(text));
    const block = this.parts.get(id);
    const made = block ? this.change(block, { text }) : this.say(text, kind);
    if (made) this.parts.set(id, made);
    if (done) this.parts.delete(id);
    return true;
  }

  toolStarts(id, name, input) {
    check(isText(id) && isText(name));
    if (this.tools.has(id)) return this.change(this.tools.get(id), { name, input, title: toolTitle(input) });
    const block = { kind: "tool", id, name, input, title: toolTitle(input), output: "", status: "running" };
    this.tools.set(id, block);
    return this.add(block);
  }

  toolEnds(id, output, failed) {
    check(isText(output));
    const block = this.tools.get(id) ?? this.toolStarts(id, "tool", null) ?? this.tools.get(id);
    this.change(block, { output, status: failed ? "failed" : "ok" });
    this.tools.delete(id); // an agent may use an id again
  }

  summarize(more) {
    if (this.summary) return this.change(this.summary, more);
    this.summary = this.add({ kind: "summary", cost: this.cost, tokens: { ...this.tokens }, ...more });
    return this.summary;
  }
}

function parsed(line) {
  if (!line.startsWith("{")) return null;
  try {
    return JSON.parse(line);
  } catch {
    return null;
  }
}

// --- Readers ---
// One for each agent's events; READERS at the end has them by name.

// --- Claude Code: stream-json, with or without partial messages ---

const PART = record({ type: text, id: text, name: text, text, thinking: text, input: any,
  tool_use_id: text, content: any, is_error: flag });
const parts = (value, key) => (isText(value)
  ? [{ type: "text", text: value }] : list(PART)(value, key));
const CLAUDE = record({ type: text, subtype: text, model: text, error: any, result: text,
  is_error: flag, isReplay: flag, total_cost_usd: number, duration_ms: number, num_turns: number,
  parent_tool_use_id: text,
  message: record({ id: text, content: parts }),
  event: record({ type: text, message: record({ id: text }), content_block: PART, delta: PART }),
  usage: record({ input_tokens: number, output_tokens: number, cache_creation_input_tokens: number,
    cache_read_input_tokens: number }) });

function claude(stream, event) {
  const { type, message } = event;
  if (type === "system") return claudeSystem(stream, event);
  if (type === "stream_event") return claudePartial(stream, event);
  if (type === "result") return claudeResult(stream, event);
  if (type === "assistant") {
    if (event.error) stream.note(errorText(event.error), "bad");
    for (const part of message.content) claudePart(stream, part, message.id);
    return true;
  }
  const results = message.content.filter((part) => part.type === "tool_result");
  for (const { tool_use_id: id, content, is_error: failed } of results)
    stream.toolEnds(id, resultText(content), failed);
  return results.length > 0 || event.isReplay === true;
}

function claudeSystem(stream, event) {
  switch (event.subtype) {
    case "init":
      return void stream.note(event.model || "started");
    case "status":
    case "thinking_tokens":
      return true;
    case "compact_boundary":
      return void stream.note("the conversation was compacted");
    case "api_retry":
      return void stream.note("the model service failed; trying again", "bad");
  }
  return false;
}

function claudePart(stream, part, message) {
  if (part.type === "tool_use") return stream.toolStarts(part.id, part.name, part.input);
  const kind = part.type === "thinking" ? "thinking" : "text";
  const text = part.text ?? part.thinking;
  check(isText(text));
  // Written delta by delta already? The beginning of the message may not have been seen.
  const partial = stream.parts.get(`${message} ${kind}`)?.shift()
    ?? stream.parts.get(`undefined ${kind}`)?.shift();
  if (partial) return partial.text === text || stream.change(partial, { text });
  return stream.say(text, kind);
}

/** What is being written stays the same block until its next beginning. */
function claudePartial(stream, { event, parent_tool_use_id: parent }) {
  check(isText(event.type));
  const now = stream.writing.get(parent) ?? {};
  stream.writing.set(parent, now);
  if (event.type === "message_start") now.message = event.message.id;
  if (event.type === "content_block_start") {
    const block = event.content_block;
    if (block.type === "tool_use") stream.toolStarts(block.id, block.name, null);
    now.block = null;
  }
  if (event.type !== "content_block_delta") return true;
  const { delta } = event;
  const kind = delta.type === "thinking_delta" ? "thinking" : "text";
  const text = delta.text ?? delta.thinking;
  if (!text) return true;
  if (now.block?.kind === kind)
    return void stream.change(now.block, { text: now.block.text + text });
  now.block = stream.say(text, kind);
  const key = `${now.message} ${kind}`;
  stream.parts.set(key, [...(stream.parts.get(key) ?? []), now.block]);
  return true;
}

function claudeResult(stream, event) {
  if (event.result && event.is_error) stream.note(event.result, "bad");
  else if (event.result && !stream.spoke) stream.say(event.result);
  const usage = event.usage ?? {};
  stream.summarize({
    cost: event.total_cost_usd ?? null,
    tokens: {
      in: (usage.input_tokens ?? 0) + (usage.cache_creation_input_tokens ?? 0),
      out: usage.output_tokens ?? 0, cached: usage.cache_read_input_tokens ?? 0,
    },
    milliseconds: event.duration_ms, turns: event.num_turns, failed: event.is_error === true,
  });
  return true;
}

// --- Gemini CLI: stream-json ---

const GEMINI = record({ type: text, model: text, role: text, content: text, delta: flag,
  tool_id: text, tool_name: text, parameters: any, output: any, status: text, error: any,
  stats: record({ input_tokens: number, output_tokens: number, cached: number,
    duration_ms: number }) });

function gemini(stream, event) {
  switch (event.type) {
    case "init":
      return void stream.note(event.model || "started");
    case "message":
      if (event.role === "user") return true;
      return event.delta ? stream.delta(event.content) : void stream.say(event.content);
    case "tool_use":
      return void stream.toolStarts(event.tool_id, event.tool_name, event.parameters);
    case "tool_result":
      return void stream.toolEnds(event.tool_id,
        resultText(event.output) || (event.error ? errorText(event.error) : ""),
        event.status === "error");
    case "result": {
      const stats = event.stats ?? {};
      if (event.error) stream.note(errorText(event.error), "bad");
      return void stream.summarize({
        tokens: { in: stats.input_tokens ?? 0, out: stats.output_tokens ?? 0,
          cached: stats.cached ?? 0 },
        milliseconds: stats.duration_ms, failed: event.status === "error",
      });
    }
  }
  return false;
}

// --- Codex: exec --json ---

const CODEX = record({ type: text, error: any,
  usage: record({ input_tokens: number, cached_input_tokens: number, output_tokens: number }),
  item: record({ id: text, type: text, status: text, text, command: text, aggregated_output: text,
    exit_code: number, changes: list(record({ kind: text, path: text })), server: text, tool: text,
    arguments: any, error: any, result: record({ content: any }), query: text,
    items: list(record({ completed: flag, text })), message: text }) });

function codex(stream, event) {
  const { type, item, usage } = event;
  if (type === "thread.started" || type === "turn.started") return true;
  if (type === "turn.completed") {
    stream.tokens.in += (usage?.input_tokens ?? 0) - (usage?.cached_input_tokens ?? 0);
    stream.tokens.cached += usage?.cached_input_tokens ?? 0;
    stream.tokens.out += usage?.output_tokens ?? 0;
    stream.summarize({ tokens: { ...stream.tokens } });
    return true;
  }
  if (type === "turn.failed") {
    stream.note(event.error ? errorText(event.error) : "the turn failed", "bad");
    stream.summarize({ failed: true });
    return true;
  }
  return item ? codexItem(stream, item, type === "item.completed") : false;
}

function codexItem(stream, item, done) {
  const failed = item.status === "failed" || item.status === "declined";
  const tool = (name, input, output) => {
    const before = stream.tools.get(item.id);
    if (!before) stream.toolStarts(item.id, name, input);
    if (done) stream.toolEnds(item.id, output, failed);
    else if (output && output !== before?.output)
      stream.change(stream.tools.get(item.id), { output });
    return true;
  };
  switch (item.type) {
    case "agent_message":
      return stream.whole(item, "text", done);
    case "reasoning":
      return stream.whole(item, "thinking", done);
    case "command_execution":
      return tool("shell", { command: unwrapped(item.command) },
        (item.aggregated_output ?? "")
          + (item.exit_code ? `\nexit status ${item.exit_code}` : ""));
    case "file_change":
      return tool("edit", {
        path: item.changes?.map((change) => `${change.kind} ${change.path}`).join(", ") }, "");
    case "mcp_tool_call":
      return tool(`${item.server}.${item.tool}`, item.arguments,
        item.error ? errorText(item.error) : resultText(item.result?.content));
    case "web_search":
      return tool("web search", { query: item.query }, "");
    case "todo_list": {
      const lines = item.items.map((todo) => `- ${todo.completed ? "☑" : "☐"} ${todo.text}`);
      const text = lines.join("\n");
      return stream.whole({ ...item, text }, "text", done);
    }
    case "error":
      return void stream.note(item.message, "bad");
  }
  return false;
}

/** The command in Codex's /bin/bash -lc '…'. */
function unwrapped(command) {
  const found = /^\S*\/(?:ba|z)?sh -l?c (['"])([\s\S]*)\1$/.exec(command ?? "");
  if (!found) return command;
  return found[1] === "'" ? found[2].replaceAll(`'\\''`, "'").replaceAll(`'"'"'`, "'") : found[2].replaceAll('\\"', '"');
}

// --- OpenCode: run --format json ---

const OPENCODE = record({ type: text,
  part: record({ id: text, text, callID: text, tool: text, cost: number,
    state: record({ status: text, input: any, output: text, error: any,
      metadata: record({ exit: number }) }),
    tokens: record({ input: number, output: number, cache: record({ read: number }) }) }) });

function opencode(stream, { type, part }) {
  switch (type) {
    case "step_start":
      return true;
    case "text":
      return stream.whole(part, "text", false);
    case "reasoning":
      return stream.whole(part, "thinking", false);
    case "tool_use": {
      const { state } = part;
      check(isText(state.status));
      stream.toolStarts(part.callID, part.tool, state.input);
      if (state.status === "completed") {
        const exit = state.metadata?.exit;
        const output = (state.output ?? "") + (exit ? `\nexit status ${exit}` : "");
        stream.toolEnds(part.callID, output, Boolean(exit));
      } else if (state.status === "error") {
        stream.toolEnds(part.callID, errorText(state.error ?? "it failed"), true);
      }
      return true;
    }
    case "step_finish": {
      const { input = 0, output = 0, cache = {} } = part.tokens ?? {};
      stream.tokens.in += input;
      stream.tokens.out += output;
      stream.tokens.cached += cache.read ?? 0;
      stream.cost = (stream.cost ?? 0) + (part.cost ?? 0);
      return true; // the summary comes when the job ends
    }
  }
  return false;
}

// --- Any agent ---

const ERROR = record({ type: text, message: any, error: any, severity: text });

function error(stream, event) {
  const error = event.message ?? event.error;
  if (error === undefined) return false;
  return void stream.note(errorText(error), event.severity === "warning" ? "info" : "bad");
}

// Each agent's reader, by the name that the server has for it: `fits` says whether an event is one
// of the agent's, `type` is what passes of it, `read` is false where nothing is known of it.
const READERS = {
  codex: { fits: ({ type }) => /^(thread|turn|item)\./.test(type), type: CODEX, read: codex },
  opencode: { fits: (event) => event.part && event.sessionID !== undefined,
    type: OPENCODE, read: opencode },
  claude: {
    fits: ({ type, stats, session_id: id }) => id !== undefined && (type === "result" ? !stats
      : ["system", "assistant", "user", "stream_event"].includes(type)),
    type: CLAUDE, read: claude,
  },
  gemini: {
    fits: ({ type, stats, timestamp }) => timestamp && (type === "result" ? stats
      : ["init", "message", "tool_use", "tool_result"].includes(type)),
    type: GEMINI, read: gemini,
  },
};
const ANY_READER = { fits: ({ type }) => type === "error", type: ERROR, read: error };
