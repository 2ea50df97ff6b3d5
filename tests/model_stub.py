"""Stand-in for the model services that the four agents talk to.

    python3 model_stub.py PORT

Speaks as much of Anthropic Messages, OpenAI Responses, OpenAI chat completions and Gemini
as the agents use, on 127.0.0.1. The answer shows that the prompt has made the round trip:

    <prompt>          -> pong <the first 40 characters of the prompt>
    … run: <command>  -> a call of the agent's shell tool, then: pong tool <its output>
    recall            -> pong <the first 40 characters of the prompt before this one>

GET /asked/<prompt> answers as soon as that has been the prompt of a request, after a
while with a 404.
Each request is one line on stderr.
"""

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = Any

PROMPT_CHARS = 40
ASKED_SECONDS = 90.0
OUTPUT_CHARS = 400

# Codex gives its own models one tool, which runs JavaScript that calls the others. What it starts
# is left to itself after ten seconds, unless one asks for more.
CODE = """\
// @exec: {"yield_time_ms": 120000}
let ran = await tools.exec_command({cmd: COMMAND}), output = ran.output;
while (ran.session_id) {
  ran = await tools.write_stdin({session_id: ran.session_id, chars: ""});
  output += ran.output;
}
text(output)
"""

# The shell tools of the agents, with the arguments they take.
SHELL_TOOLS: dict[str, Callable[[str], dict[str, Json]]] = {
    "Bash": lambda command: {"command": command, "description": "run it"},
    "run_shell_command": lambda command: {"command": command, "description": "run it"},
    "bash": lambda command: {"command": command, "description": "run it"},
    "exec_command": lambda command: {"cmd": command},
    "shell_command": lambda command: {"command": command},
    "exec": lambda command: {"input": CODE.replace("COMMAND", json.dumps(command))},
}


seen: set[str] = set()
seen_more = threading.Condition()
numbers = itertools.count(1)  # an agent takes two answers with one id for one


@dataclass
class Reply:
    """What the model says: a text, or a call of `tool`."""

    text: str = ""
    tool: str = ""
    arguments: dict[str, Json] | None = None


def reply(prompts: list[str], output: str | None, tools: list[str]) -> Reply:
    """Answer a conversation in which the person wrote `prompts`, and which may end with a tool's
    `output`."""
    if output is not None:
        return Reply(f"pong tool {output.strip()[-OUTPUT_CHARS:]}")
    *earlier, prompt = map(unquoted, ["", *filter(None, prompts)])
    with seen_more:
        seen.add(prompt)
        seen_more.notify_all()
    if prompt == "recall":
        prompt = earlier[-1]
    _, asked, command = prompt.partition("run: ")
    tool = next((name for name in tools if name in SHELL_TOOLS), "")
    if asked and tool:
        return Reply(tool=tool, arguments=SHELL_TOOLS[tool](command.strip()))
    return Reply(f"pong {prompt[:PROMPT_CHARS]}")


def unquoted(prompt: str) -> str:
    """The prompt as the person wrote it: OpenCode quotes what has a space in it."""
    prompt = prompt.strip()
    return prompt[1:-1].replace('\\"', '"') if prompt[:1] == prompt[-1:] == '"' else prompt


def text_of(content: Json) -> str:
    """The last text in a message's content that the person wrote, not the agent's harness."""
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in content or [] if part.get("text")]
    return next((text for text in reversed(texts) if not text.startswith("<")), "")


# --- Anthropic Messages ---


def messages_reply(request: Json) -> Reply:
    contents = [m["content"] for m in request["messages"] if m["role"] == "user"]
    parts = [] if isinstance(contents[-1], str) else contents[-1]
    results = [part for part in parts if part["type"] == "tool_result"]
    output = text_of(results[-1]["content"]) if results else None
    return reply(list(map(text_of, contents)), output,
                 [tool["name"] for tool in request.get("tools") or []])


def messages_body(request: Json) -> Json:
    answer = messages_reply(request)
    block = {"type": "text", "text": answer.text}
    if answer.tool:
        block = {"type": "tool_use", "id": f"toolu_{next(numbers)}", "name": answer.tool}
        block["input"] = answer.arguments or {}  # type: ignore[assignment]
    return {
        "id": f"msg_{next(numbers)}",
        "type": "message",
        "role": "assistant",
        "model": request["model"],
        "content": [block],
        "stop_reason": "tool_use" if answer.tool else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }


def messages_events(request: Json) -> Iterator[Json]:
    body = messages_body(request)
    block = body["content"][0]
    text = str(block.get("text"))
    start = {**block, "text": ""}
    deltas = [{"type": "text_delta", "text": part} for part in (text[:3], text[3:])]
    if block["type"] == "tool_use":
        start = {**block, "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    stop = {key: body[key] for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_start", "message": {**body, "content": [], "stop_reason": None}}
    yield {"type": "content_block_start", "index": 0, "content_block": start}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": stop, "usage": body["usage"]}
    yield {"type": "message_stop"}


# --- OpenAI Responses ---


def responses_reply(request: Json) -> Reply:
    items = request["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    last = items[-1]
    output = None
    if last.get("type", "").endswith("_call_output"):
        output = last["output"] if isinstance(last["output"], str) else text_of(last["output"])
    prompts = [text_of(item["content"]) for item in items if item.get("role") == "user"]
    tools = [tool.get("name", "") for tool in request.get("tools") or []]
    tools += ["exec" for item in items if item.get("type") == "additional_tools"]
    return reply(prompts, output, tools)


def responses_body(request: Json) -> Json:
    answer = responses_reply(request)
    item: Json = {
        "type": "message",
        "id": f"msg_{next(numbers)}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": answer.text, "annotations": []}],
    }
    if answer.tool:
        item = {"type": "function_call", "id": f"fc_{next(numbers)}", "name": answer.tool}
        item["call_id"] = f"call_{next(numbers)}"
        item |= {"arguments": json.dumps(answer.arguments), "status": "completed"}
    if answer.tool == "exec":
        item |= {"type": "custom_tool_call", **(answer.arguments or {})}
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "model": request["model"],
        "output": [item],
        "usage": {
            "input_tokens": 1,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 2,
        },
    }


def responses_events(request: Json) -> Iterator[Json]:
    body = responses_body(request)
    item = body["output"][0]
    started = {**body, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": started}
    yield {"type": "response.output_item.added", "output_index": 0, "item": item}
    if item["type"] == "message":
        yield {
            "type": "response.output_text.delta",
            "item_id": item["id"],
            "output_index": 0,
            "content_index": 0,
            "delta": item["content"][0]["text"],
        }
    yield {"type": "response.output_item.done", "output_index": 0, "item": item}
    yield {"type": "response.completed", "response": body}


# --- OpenAI chat completions ---


def chat_body(request: Json) -> Json:
    last = request["messages"][-1]
    output = text_of(last["content"]) if last["role"] == "tool" else None
    prompts = [text_of(m["content"]) for m in request["messages"] if m["role"] == "user"]
    tools = [tool["function"]["name"] for tool in request.get("tools") or []]
    answer = reply(prompts, output, tools)
    message: Json = {"role": "assistant", "content": answer.text}
    if answer.tool:
        function = {"name": answer.tool, "arguments": json.dumps(answer.arguments)}
        call = {"index": 0, "id": f"call_{next(numbers)}", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    finish = "tool_calls" if answer.tool else "stop"
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def chat_events(request: Json) -> Iterator[Json]:
    body = chat_body(request)
    choice, usage = body["choices"][0], body.pop("usage")
    body["object"] = "chat.completion.chunk"
    start = {"index": 0, "delta": choice["message"], "finish_reason": None}
    stop = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield {**body, "choices": [start]}
    yield {**body, "choices": [stop], "usage": usage}


# --- Gemini ---


def gemini_body(request: Json) -> Json:
    contents = [c["parts"] for c in request["contents"] if c.get("role", "user") == "user"]
    results = [part["functionResponse"] for part in contents[-1] if "functionResponse" in part]
    output = json.dumps(results[-1]["response"]) if results else None
    tools = [f["name"] for t in request.get("tools") or [] for f in t["functionDeclarations"]]
    answer = reply(list(map(text_of, contents)), output, tools)
    part: Json = {"text": answer.text}
    if answer.tool:
        part = {"functionCall": {"name": answer.tool, "args": answer.arguments}}
    content = {"role": "model", "parts": [part]}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    return {
        "candidates": [{"index": 0, "content": content, "finishReason": "STOP"}],
        "usageMetadata": usage,
        "modelVersion": "stub",
    }


def gemini_events(request: Json) -> Iterator[Json]:
    yield gemini_body(request)


# --- HTTP ---

# End of the path -> body, events or None.
Body = Callable[[Json], Json]
Events = Callable[[Json], Iterator[Json]]
ROUTES: dict[str, tuple[Body, Events | None]] = {
    "/messages/count_tokens": (lambda request: {"input_tokens": 1}, None),
    "/messages": (messages_body, messages_events),
    "/responses": (responses_body, responses_events),
    "/chat/completions": (chat_body, chat_events),
    ":countTokens": (lambda request: {"totalTokens": 1}, None),
    ":generateContent": (gemini_body, None),
    ":streamGenerateContent": (gemini_body, gemini_events),
}


def sse(events: Iterator[Json]) -> bytes:
    """Server-sent events; those with a type carry it as the event's name, too."""
    lines = []
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        lines.append(f"{name}data: {json.dumps(event)}\n\n")
    return "".join(lines).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        path = self.path.partition("?")[0]
        route = next((name for name in ROUTES if path.endswith(name)), "")
        body, events = ROUTES.get(route, (lambda request: {}, None))
        if events and (request.get("stream") or route == ":streamGenerateContent"):
            done = b"data: [DONE]\n\n" if route == "/chat/completions" else b""
            self.answer(sse(events(request)) + done, "text/event-stream")
        else:
            self.answer(json.dumps(body(request)).encode(), "application/json")

    def do_GET(self) -> None:
        if "Upgrade" in self.headers:  # Codex tries a WebSocket first
            return self.send_error(426)
        _, found, prompt = self.path.partition("/asked/")
        if found:
            with seen_more:
                if not seen_more.wait_for(lambda: prompt in seen, ASKED_SECONDS):
                    return self.send_error(404)
        self.answer(b'{"object": "list", "data": [], "models": []}', "application/json")

    do_HEAD = do_GET

    def answer(self, body: bytes, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main()
