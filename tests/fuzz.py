"""Streams of the four agents as a hostile container prints them; the same seed makes the same."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

# What the agents printed for "run: echo hi; ls /etc | head -3"
STREAMS = Path(__file__).parent / "streams"
AGENTS = ("claude", "gemini", "codex", "opencode")
LEVELS = 20_000
WRITTEN = {  # what json.dumps cannot write
    '"@arrays@"': "[" * LEVELS + "]" * LEVELS, '"@huge@"': "1e999", '"@digits@"': "9" * 400,
    '"@objects@"': '{"a":' * LEVELS + "1" + "}" * LEVELS}
NASTY: list[Any] = [
    5, -1, 0, 1e308, -1e308, 0.1, True, False, None, "", " ", "\n", "NaN", "Infinity", "-0",
    "0.00005", [], {}, [None], [[]], [5], "@arrays@", "@objects@", "@huge@", "@digits@",
    "x" * 100_000,
    {"toLocaleString": 1}, {"toString": 1, "valueOf": 1}, {"toJSON": {}}, {"constructor": None},
    {"length": -1}, {"__proto__": {"text": "x"}}, "__proto__", "constructor", "toString", "\ud800",
    "a\udfff\ud800", "\0\x1b[31m\a\r\u202e", ">" * 20_000, "[" * 5000, "```\n" * 500, "[a]: b",
    "long " * 50_000, {"message": {"message": 5}}, [{"type": "text"}],
    [{"type": "text", "text": 5}], [{"text": None, "type": []}]]
SHOWN = {"text", "thinking", "content", "aggregated_output", "tool_name", "tool", "callID",
         "tool_id", "state"}
UNREAD = {"metadata", "tool_use_result", "usage", "modelUsage", "stats", "time"}

Place = tuple[Any, Any]  # a container and the key in it


def places(value: Any, unread: bool = False) -> Iterator[tuple[Place, bool]]:
    """All places in a value, and whether a page may leave them unread."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
        unread = unread or value.get("type") == "message_start"  # whose content comes in parts
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        yield (value, key), unread
        yield from places(inner, unread or key in UNREAD)


def written(event: Any) -> str:
    line = json.dumps(event)
    for stand_in, text in WRITTEN.items():
        line = line.replace(stand_in, text)
    return line


def mutated(lines: list[str], mark: str, chance: random.Random) -> str:
    """A stream with one to four things wrong; mostly with `mark` for something that pages show."""
    events = [json.loads(line) for line in lines]
    for _ in range(chance.randint(1, 4)):
        container, key = chance.choice(list(places(events)))[0]
        match chance.randrange(8):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                name = chance.choice(["__proto__", "constructor", "type", "text", "message"])
                container[name] = container.pop(key)
            case 2:
                container[key] = {"a": container[key]}
            case 3:
                events.insert(chance.randrange(len(events) + 1), deepcopy(chance.choice(events)))
            case _:
                container[key] = deepcopy(chance.choice(NASTY))
        events = events or [{}]
    marked = json.loads(chance.choice(lines))
    shown = [place for place, unread in places(marked) if not unread and place[1] in SHOWN]
    if shown and chance.random() < 0.7:
        container, key = chance.choice(shown)
        container[key] = chance.choice([
            {"odd": mark}, {"toLocaleString": mark}, [mark, [[mark]]], {"length": 1, "0": mark},
            {"__proto__": {"text": mark}}])
        events.insert(chance.randrange(len(events) + 1), marked)
    text = "\n".join(map(written, events)) + chance.choice(["", "\n"])
    if mark not in text and chance.random() < 0.5:  # cut off or with bytes gone wrong
        at = chance.randrange(len(text) or 1)
        wrong = chance.choice(["", "\n", "\0", '"', "}", "\x1b]0;", "\ufffd"])
        text = text[:at] + wrong + text[at + chance.randrange(9) :]
    return text


def streams(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """`count` mutated streams, each with the mark that must be seen or ''."""
    chance = random.Random(seed)
    seeds = [(STREAMS / f"{agent}.jsonl").read_text().splitlines() for agent in AGENTS]
    for index in range(count):
        mark = f"mark{index}mark"
        text = mutated(seeds[index % len(seeds)], mark, chance)
        yield text, mark if mark in text else ""


# --- In the page ---

# `streams` are the output of jobs, which the service need not have.
JOBS = """
    const base = document.querySelector("script[type=module]").src.replace(/main.js$/, "")
        .replace("/preview/", "/ui/");
    const jobs = streams.map(([text], index) => ({
        id: `j${index}`, session: "fuzz", kind: "prompt", prompt: `p${index}`, state: "ended",
        exit: 0, size: text.length, started: "2026-11-21T00:00:00Z",
        ended: "2026-11-21T00:00:01Z" }));
    const wrong = [];
    const real = window.fetch;
"""

# AGENT mode: ten turns at a time are fetched, read and drawn as ever.
TURNS = f"""async (streams) => {{
    {JOBS}
    const frame = () => new Promise(requestAnimationFrame);
    const until = async (done) => {{
        for (let frames = 0; !done() && frames < 600; frames++) await frame();
    }};
    const sse = (event, data) => `event: ${{event}}\\ndata: ${{JSON.stringify(data)}}\\n\\n`;
    window.fetch = async (url, options) => {{
        const [, , , name, , id] = String(url).split(/[/?]/);
        if (name !== "fuzz") return real(url, options);
        const job = jobs.find((job) => job.id === id);
        const begun = (job) => ({{ ...job, state: "running" }});
        if (!job) return Response.json(jobs.map(begun).reverse());
        const text = streams[jobs.indexOf(job)][0], half = text.length >> 1;
        return new Response(sse("job", begun(job)) + sse("stdout", text.slice(0, half))
            + sse("stdout", text.slice(half)) + sse("end", job));
    }};
    const {{ mount }} = await import(base + "agent.js");
    const root = document.body.appendChild(document.createElement("div"));
    const session = {{ name: "fuzz", state: "running", agentPromptCommand: "{{prompt}}" }};
    const screen = mount(root, {{ name: "fuzz", session, reload: async () => {{}} }});
    const turns = () => [...root.querySelectorAll(".turn")];
    const over = (turn) => turn.querySelector(".chip.good")
        && turn.querySelector(".working").hidden;
    await until(() => turns().length === streams.length && turns().every(over));
    await frame();
    await frame();
    await until(() => [...root.querySelectorAll(".md")].every((md) => md.childNodes.length));
    turns().forEach((turn, index) => {{
        const [text, mark] = streams[index];
        const blocks = turn.querySelector(".blocks");
        const seen = blocks.textContent
            + [...blocks.querySelectorAll("pre")].map((pre) => pre.whole ?? "").join("");
        const undrawn = turn.querySelector(".undrawn");
        if (!over(turn)) wrong.push(["frozen", text]);
        if (text.split("\\n").length > 2 && !seen.trim()) wrong.push(["blank", text]);
        if ([...blocks.querySelectorAll(".md, .raw pre, .note")].some((part) => !part.textContent))
            wrong.push(["blank block", text]);
        if (undrawn) wrong.push([undrawn.textContent, text]);
        if (!seen.includes(mark)) wrong.push(["unseen " + mark, text]);
    }});
    if (turns().length !== streams.length) wrong.push([`${{turns().length}} turns`, ""]);
    screen.unmount();
    root.remove();
    window.fetch = real;
    return wrong.map(([what, text]) => [what, text.slice(0, 20000)]);
}}"""

# Mission control: two tiles for each stream, one with the whole and one with its end only.
TILES = f"""async (streams) => {{
    {JOBS}
    const {{ refresh }} = await import(base + "store.js");
    const row = (name, index, tail, size) => ({{
        name: `${{name}}${{index}}`, state: "running", agent: "claude", directory: "/d",
        network: "open", agentMode: true, jobs: 0, terminals: 0,
        last: {{ ...jobs[index], id: String(performance.now()), tail, size }} }});
    const rows = streams.flatMap(([text], index) => [
        row("whole", index, text, 1000), row("end", index, text.slice(-300), 20000)]);
    window.fetch = async () => Response.json(rows);
    await refresh(); // the one that was under way
    await refresh();
    for (const tile of document.querySelectorAll(".tile")) {{
        const name = tile.querySelector("h2").textContent;
        const [, part, index] = /^(whole|end)(\\d+)$/.exec(name) ?? [];
        if (!part) continue;
        const [text, mark] = streams[index];
        const tail = tile.querySelector(".tail");
        if (!tail.textContent.trim()) wrong.push([`blank ${{part}}`, text]);
        if (tail.querySelector(".undrawn")) wrong.push([tail.textContent, text]);
        if (tile.dataset.state !== "waiting") wrong.push(["state", text]);
        // A tile has room for the beginnings of the last lines, and for no tool's result.
        const line = text.split("\\n").find((line) => line.includes(mark));
        const room = line.indexOf(mark) < 300 && !line.includes("tool_result")
            && tail.children.length < 40 && part === "whole";
        if (room && !tail.textContent.includes(mark)) wrong.push(["unseen " + mark, text]);
    }}
    const tiles = document.querySelectorAll(".tile").length;
    if (tiles < rows.length) wrong.push([`${{tiles}} tiles`, ""]);
    window.fetch = real;
    return wrong.map(([what, text]) => [what, text.slice(0, 20000)]);
}}"""
