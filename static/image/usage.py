"""What agents use, for broker.py: found in requests and answers as they stream by, and kept by day.

/var/lib/sandbox-net/counts.json (or SANDBOX_COUNTS) has {"days": {day: {"seconds": in which a model
worked, "models": {model: [requests, input, output, read from a cache, written to it, written for
long, dollars or null]}}}}.
"""

import json
import os
import re
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

COUNTS = os.environ.get("SANDBOX_COUNTS", "/var/lib/sandbox-net/counts.json")
MODELS, COUNT_LIMIT, USAGE_BYTES = 32, 10**9, 4096
MODEL_BYTES = 64 * 1024  # of an answer, in which it names its model

USAGE = re.compile(rb'"usage(?:Metadata)?"\s*:\s*(?=\{)')
MODEL = re.compile(rb'"model(?:Version)?"\s*:\s*"([!#-[\]-~]{1,100})"')
MARK = re.compile(rb'"role"\s*:\s*"(\w+)"|"type"\s*:\s*"(?:tool_result|\w+_call_output)"|'
                  rb'"(functionResponse|systemInstruction)"\s*:|"(tools)"\s*:\s*\[\s*\{|'
                  rb'"type"\s*:\s*"(json_schema)"')
# behind a model's name: a snapshot or a preview of it costs the same
DATED = re.compile(r"[-@](?:latest|preview|exp|\d{6}|\d{4}-\d\d-\d\d).*")
# of a usage's fields, those that mean the same
INPUT = ("input_tokens", "prompt_tokens", "promptTokenCount")
OUTPUT = ("output_tokens", "completion_tokens", "candidatesTokenCount")
READ = ("cache_read_input_tokens", "cached_tokens", "cachedContentTokenCount")
WRITTEN = ("cache_creation_input_tokens", "cache_write_tokens")
WRITTEN_LONG = ("ephemeral_1h_input_tokens",)


class Marks:
    """Whether a request's last message is the person's, as it streams by.

    A quotation mark in a JSON string is escaped, so that no text in it can look like a mark.
    Requests without tools, or for an answer of a certain form, are an agent's own: a title, a
    summary.
    """

    def __init__(self) -> None:
        self.tail, self.said, self.sum = b"", "", 0
        self.tools = self.form = False
        self.system = False  # a system instruction behind the messages, which has a role too

    def see(self, data: bytes) -> None:
        self.sum = zlib.crc32(data, self.sum)
        data, end = self.tail + data, 0
        for match in MARK.finditer(data):
            role, field, tools, form = match.groups()
            end = match.end()
            if tools:
                self.tools = True
            elif form:
                self.form = True
            elif self.system or field == b"systemInstruction":
                self.system = bool(self.said)
            elif role == b"user":  # one vendor's role stands behind what it is about
                self.said = "other" if self.said == "response" else "user"
            elif role not in (b"system", b"developer"):
                self.said = "response" if field else "other"
        self.tail = data[max(end, len(data) - 64):]

    @property
    def begins_turn(self) -> bool:
        return self.tools and not self.form and self.said == "user"


class Meter:
    """The model and the use that an answer names, as it streams by.

    The counts of a stream only grow, so that the largest of each is the last.
    """

    def __init__(self) -> None:
        self.tail, self.model, self.size = b"", "", 0
        self.fields: dict[str, int] = {}

    def see(self, data: bytes) -> None:
        self.size += len(data)
        data = self.tail + data
        if not self.model and self.size < MODEL_BYTES and (match := MODEL.search(data)):
            self.model = match[1].decode()
        at = max(len(data) - 120, 0)
        for match in USAGE.finditer(data) if b'"usage' in data else ():
            text = data[match.end():match.end() + USAGE_BYTES].decode("utf-8", "replace")
            try:
                self.add(json.JSONDecoder().raw_decode(text)[0])
            except (ValueError, RecursionError):
                if len(text) < USAGE_BYTES:  # its end is yet to come
                    at = min(at, match.start())
        self.tail = data[at:]

    def add(self, usage: Mapping[str, Any]) -> None:
        for name, value in usage.items():
            if isinstance(value, dict):
                self.add(value)
            elif type(value) is int and 0 <= value < COUNT_LIMIT:
                self.fields[name] = max(value, self.fields.get(name, 0))

    def counts(self) -> list[int]:
        """Input, output, read from a cache, written to it, and written for long."""
        def first(names: Sequence[str]) -> int:
            return next((self.fields[name] for name in names if name in self.fields), 0)

        read, long = first(READ), first(WRITTEN_LONG)
        written = max(first(WRITTEN) - long, 0)
        into = first(INPUT) + self.fields.get("toolUsePromptTokenCount", 0)
        if READ[0] not in self.fields:  # only Anthropic counts these apart
            into = max(into - read - written, 0)
        return [into, first(OUTPUT) + self.fields.get("thoughtsTokenCount", 0), read, written, long]


def dollars(prices: Mapping[str, Sequence[float]], model: str,
            counts: Sequence[int]) -> float | None:
    """What it has cost, or None where the model has no price.

    A row is dollars for a million: input, output, read from a cache, written to it, written for
    long, and where long prompts cost more: from how many tokens on, and the factors of what goes in
    and of what comes out.
    """
    row = prices.get(DATED.sub("", model))
    if not row:
        return None
    into, out, read, written, long = counts
    many = len(row) > 5 and into + read + written + long > row[5]
    inward = into * row[0] + read * row[2] + written * row[3] + long * row[4]
    return (inward * (row[6] if many else 1) + out * row[1] * (row[7] if many else 1)) / 1e6


class Ledger:
    """What was used on each day. Who calls has the lock, but for write(), which takes its time."""

    def __init__(self) -> None:
        self.lock, self.writing = threading.RLock(), threading.Lock()
        self.problem, self.active, self.since = "", 0, 0.0
        self.days: dict[str, Any] = {}

    def open(self) -> None:
        try:
            with open(COUNTS, "rb") as file:
                self.begin(json.load(file)["days"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.problem = f"{COUNTS} cannot be read ({error})"

    def begin(self, days: dict[str, Any]) -> None:
        """Go on from what was counted. Raises ValueError and the like, and changes nothing then."""
        before, self.days = self.days, days
        try:
            self.spent("session")
        except BaseException:
            self.days = before
            raise

    def today(self) -> Any:
        """Of a clock that has gone back the last day, so that it gives no budget anew."""
        day = max([time.strftime("%Y-%m-%d", time.gmtime()), *self.days])
        return self.days.setdefault(day, {"seconds": 0.0, "models": {}})

    def work(self, more: int) -> None:
        """Count the time so far; `more` requests are under way from now on."""
        now = time.monotonic()
        if self.active:
            self.today()["seconds"] += now - self.since
        self.active, self.since = self.active + more, now

    def add(self, model: str, counts: Sequence[int], usd: float | None) -> None:
        models = self.today()["models"]
        row = models.setdefault(model if model in models or len(models) < MODELS else "*",
                                [0, 0, 0, 0, 0, 0, None])
        row[:6] = [old + new for old, new in zip(row[:6], [1, *counts], strict=True)]
        if usd is not None:
            row[6] = (row[6] or 0.0) + usd

    def write(self) -> None:
        try:
            with self.writing, open(f"{COUNTS}.new", "w") as file:
                with self.lock:
                    text = json.dumps({"days": self.days})
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.replace(f"{COUNTS}.new", COUNTS)
            self.problem = ""
        except OSError as error:
            self.problem = f"{COUNTS} cannot be written ({error.strerror})"

    def spent(self, per: str) -> dict[str, float]:
        days = [self.today()] if per == "day" else [*self.days.values()]
        rows = [row for day in days for row in day["models"].values()]
        running = time.monotonic() - self.since if self.active else 0.0
        return {"usd": sum(row[6] or 0.0 for row in rows),
                "tokens": sum(row[1] + row[2] + row[4] + row[5] for row in rows),
                "minutes": (sum(day["seconds"] for day in days) + running) / 60}
