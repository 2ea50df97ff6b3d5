"""What the web service costs, against the ceilings that the project has set itself.

    .venv/bin/python tests/bench/bench_web.py [PART …]

Needs root, docker, and the image that tests/prepare makes; the parts `page` and `diff` need
chromium, and `diff` the image localhost/sandbox:1.0-common. It
starts a server of its own from a zipapp made for the running interpreter, and sessions, and removes
them all. With ttyd on PATH the parts of terminals compare with that, too. Where something is
compared, both sides are measured in turn in one run; a row is a median
with what it was made of and, in brackets, quartiles.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from harness import (
    Bare,
    Client,
    Server,
    Table,
    Ttyd,
    WebSocket,
    build_zipapp,
    median,
    p99,
    quartiles,
    ready,
    until,
)

ROUNDS, KEYS = 7, 200
FLOOD = b"yes 0123456789abcdef0123456789abcdef0123456789abcdef | head -c 50000000; echo do''ne\n"
STALLED_SECONDS = 60
TERMINALS, TIMES = 100, 10
FLOODS, PROMPTS = 10, 15
SESSIONS, POLLERS, POLL_SECONDS = 50, 20, 2  # as often as a page asks, see static/ui/store.js
EVENTS, EVENT_SECONDS, EVENT_BYTES = 600, 0.015, 300
HELD = 500
JOBS = 30
LINES, PATCHES = 5000, 11


Pairs = list[tuple[list[float], list[float]]]


def joined(pairs: Pairs) -> tuple[list[float], list[float]]:
    return [ms for ours, _ in pairs for ms in ours], [ms for _, theirs in pairs for ms in theirs]


def echo_ms(client: Client) -> list[float]:
    times = []
    for _ in range(KEYS):
        began = time.perf_counter()
        client.write(b"x")
        until(client, b"x")
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.002)
    return times


@contextmanager
def raw_pair(server: Server, session: str) -> Iterator[tuple[WebSocket, Bare]]:
    """A terminal of the server's and a bare one, both of which echo what is typed."""
    web, bare = WebSocket(server, session), Bare(session)
    try:
        yield ready(web, b"stty raw -echo"), ready(bare, b"stty raw -echo")
    finally:
        web.close()
        bare.close()


# --- One terminal ---


def echo(server: Server, table: Table) -> None:
    """A keystroke and its echo, beside a bare PTY on the same `docker exec -it`."""
    with raw_pair(server, server.session()) as (web, bare):
        echo_ms(web), echo_ms(bare)
        rounds = [(echo_ms(web), echo_ms(bare)) for _ in range(ROUNDS)]
    ours, theirs = joined(rounds)
    added = [median(a) - median(b) for a, b in rounds]
    table.row("echo, added at the median", median(ours) - median(theirs), "ms",
              f"{median(ours):.2f} over {median(theirs):.2f} {quartiles(added)}", most=0.4)
    table.row("echo, p99 over that of the bare PTY", p99(ours) / p99(theirs), "x",
              f"{p99(ours):.2f} over {p99(theirs):.2f} ms "
              f"{quartiles([p99(a) / p99(b) for a, b in rounds])}", most=1.3)


def ttyd(server: Server, table: Table) -> None:
    """Echo and first prompt beside ttyd, which has no holder; nothing where it is not on PATH."""
    if not shutil.which("ttyd"):
        return
    session = server.session()
    web, other = WebSocket(server, session), Ttyd(session)
    for client in (web, other):
        echo_ms(ready(client, b"stty raw -echo"))
    pairs = [(echo_ms(web), echo_ms(other)) for _ in range(ROUNDS)]
    web.close()
    other.close()
    ours, theirs = joined(pairs)
    for title, of, most in (("p50", median, 1.3), ("p99", p99, 1.25)):
        ratios = [of(a) / of(b) for a, b in pairs]
        table.row(f"echo, {title} over ttyd's", median(ratios), "x",
                  f"{of(ours):.2f} over {of(theirs):.2f} ms {quartiles(ratios)}", most=most)
    prompts = [(prompt_ms(lambda: WebSocket(server, session)), prompt_ms(lambda: Ttyd(session)))
               for _ in range(PROMPTS)]
    ratios = [a / b for a, b in prompts]
    table.row("first prompt, over ttyd's", median(ratios), "x",
              f"{median([a for a, _ in prompts]):.0f} over {median([b for _, b in prompts]):.0f} "
              f"ms {quartiles(ratios)}", most=1.2)


def prompt_ms(opened: Callable[[], WebSocket | Ttyd]) -> float:
    """How long a terminal takes from its connection to the shell's prompt."""
    client = opened()
    until(client, b"# ")
    took = (time.perf_counter() - client.began) * 1000
    client.close()
    return took


def floods(server: Server, table: Table) -> None:
    """Echo in a terminal beside ten floods whose readers take all."""
    session = server.session()
    web = ready(WebSocket(server, session), b"stty raw -echo")
    echo_ms(web)
    readers = [multiprocessing.Process(target=drain, args=(server, session), daemon=True)
               for _ in range(FLOODS)]
    for reader in readers:
        reader.start()
    time.sleep(2)
    times = [ms for _ in range(ROUNDS) for ms in echo_ms(web)]
    for reader in readers:
        reader.terminate()
        reader.join()
    table.row(f"echo p99 beside {FLOODS} floods", p99(times), "ms", f"p50 {median(times):.2f}",
              most=10)


def drain(server: Server, session: str) -> None:
    web = WebSocket(server, session)
    web.write(b"yes 0123456789abcdef0123456789abcdef\n")
    while True:
        web.read()


def flood_mb_per_second(client: Client) -> float:
    began = time.perf_counter()
    client.write(FLOOD)
    return until(client, b"done") / (time.perf_counter() - began) / 1e6


def interrupt_ms(web: WebSocket) -> float:
    """How long after Ctrl-C in a flood the shell answers."""
    web.write(b"yes 0123456789abcdef\n")
    for _ in range(200):
        web.read()
    began = time.perf_counter()
    web.write(b"\x03")
    web.write(b"echo stop''ped\n")
    until(web, b"stopped")
    return (time.perf_counter() - began) * 1000


def flood(server: Server, table: Table) -> None:
    """50 MB of text, beside a bare PTY, and Ctrl-C in an endless flood."""
    session = server.session()
    web = ready(WebSocket(server, session), b"stty -echo")
    bare = ready(Bare(session), b"stty -echo")
    flood_mb_per_second(web), flood_mb_per_second(bare)
    speeds = [(flood_mb_per_second(web), flood_mb_per_second(bare)) for _ in range(ROUNDS)]
    ratios = [ours / theirs for ours, theirs in speeds]
    fast, reference = (median(column) for column in zip(*speeds, strict=True))
    table.row("50 MB of text, speed over that of the bare PTY", median(ratios), "x",
              f"{fast:.1f} over {reference:.1f} MB/s {quartiles(ratios)}", least=0.9)
    stops = [interrupt_ms(web) for _ in range(ROUNDS)]
    table.row("Ctrl-C in a flood, until the shell answers", median(stops), "ms", quartiles(stops),
              most=50)
    web.close()
    bare.close()


def stalled(server: Server, table: Table) -> None:
    """A reader that takes nothing for a minute of a flood: its cost, and whether others notice."""
    session = server.session()
    slow = ready(WebSocket(server, session))
    with raw_pair(server, session) as (web, bare):
        before = [(echo_ms(web), echo_ms(bare)) for _ in range(ROUNDS)]
        start = server.resident_mb()
        slow.write(b"yes 0123456789abcdef\n")
        until(slow, b"0123456789abcdef\r\n0123456789abcdef")
        during, most, deadline = [], 0.0, time.monotonic() + STALLED_SECONDS
        while time.monotonic() < deadline:
            during.append((echo_ms(web), echo_ms(bare)))
            most = max(most, server.resident_mb())
        table.row("reader that stalls for a minute, memory", most - start, "MB", most=4)
        echo_beside(table, "another terminal's echo meanwhile", before, during)
    slow.sock.close()


def echo_beside(table: Table, title: str, before: Pairs, during: Pairs) -> None:
    """How much longer the echo takes while something goes on, beside a bare PTY's echo."""
    added = [[median(a) - median(b) for a, b in pairs] for pairs in (before, during)]
    quiet, busy = joined(before), joined(during)
    table.row(f"{title}, added", median(added[1]) - median(added[0]), "ms",
              f"{median(quiet[0]):.2f} then {median(busy[0]):.2f}; "
              f"bare {median(quiet[1]):.2f} then "
              f"{median(busy[1]):.2f} {quartiles(added[1])}", most=0.1)
    table.row(f"{title}, p99 over bare", p99(busy[0]) / p99(busy[1]), "x",
              f"{p99(quiet[0]):.2f} then {p99(busy[0]):.2f}; "
              f"bare {p99(quiet[1]):.2f} then {p99(busy[1]):.2f} ms",
              most=1.3)


# --- Many terminals ---


def processes_inside(session: str) -> int:
    listing = subprocess.run(["docker", "top", session], capture_output=True, text=True, check=True)
    return len(listing.stdout.splitlines()) - 1


def shells(server: Server, session: str, count: int) -> list[WebSocket]:
    opened = [WebSocket(server, session) for _ in range(count)]
    for web in opened:
        web.write(b"echo rea''dy\n")
        until(web, b"ready")
    return opened


def close_all(opened: list[WebSocket]) -> None:
    """A few at a time: each takes an engine call."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(WebSocket.close, opened))


def memory(server: Server, table: Table) -> None:
    """Resident memory when idle, for each terminal, and what is left after many have come and gone.

    It should be back at the start, and is not quite: glibc keeps 13 kB of each thread's stack for
    the next one, Python the pages of its own heap. The limits here say that this is little and does
    not grow.
    """
    time.sleep(2)
    table.row("resident after the start", server.resident_mb(), "MB", most=32)
    session = server.session()
    for path in ("/", "/preview", "/api/sessions", f"/api/sessions/{session}"):
        server.request("GET", path)
    close_all(shells(server, session, 1))
    start, inside = settled(server), processes_inside(session)
    before = (server.threads(), server.descriptors())
    left = []
    for turn in range(TIMES):
        opened = shells(server, session, TERMINALS)
        if turn == 0:
            each = (server.resident_mb() - start) / TERMINALS
            table.row(f"each of {TERMINALS} open terminals", each, "MB", most=0.1)
            clients = median([share_mb(pid) for pid in server.children()])
            table.row("the engine's client of each, its share", clients, "MB")
        if turn == 1:
            for web in opened:
                web.write(b"seq 1 200000; echo do''ne\n")
                until(web, b"done")
            each = (server.resident_mb() - start) / TERMINALS
            table.row("each when it has printed more than is kept", each, "MB", "1.05 is kept",
                      most=1.05 + 0.1)
        close_all(opened)
        left.append(settled(server) - start)
    table.row(f"left after {TIMES} times {TERMINALS} terminals", left[-1], "MB",
              f"over {start:.1f}; after each time {' '.join(f'{mb:.1f}' for mb in left)}", most=1)
    table.row("grown from the third time to the last", left[-1] - left[2], "MB", most=0.5)
    more = server.threads() - before[0] + server.descriptors() - before[1] + len(server.children())
    table.row("threads, descriptors and processes left", more + processes_inside(session) - inside,
              "", most=0)


def share_mb(pid: int) -> float:
    """What a process holds, its share of what it has with others."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) * 1024 / 1e6 for line in text.splitlines()
               if line.startswith("Pss:"))


def settled(server: Server) -> float:
    """Resident memory when the threads that are ending have ended."""
    time.sleep(2)
    return server.resident_mb()


# --- Many pages ---


def poll(port: int, cookie: str, pages: int, seconds: float) -> None:
    """Ask for the list again and again, as so many pages would; never returns."""
    def page() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        while True:
            connection.request("GET", "/api/sessions", headers={"Cookie": cookie})
            connection.getresponse().read()
            time.sleep(seconds)

    for _ in range(pages):
        threading.Thread(target=page, daemon=True).start()
        time.sleep(seconds / pages)
    time.sleep(1e6)


@contextmanager
def polled(server: Server, pages: int, seconds: float) -> Iterator[None]:
    process = multiprocessing.Process(target=poll, args=(server.port, server.cookie, pages,
                                                         seconds), daemon=True)
    process.start()
    time.sleep(2 * seconds + 0.5)
    try:
        yield
    finally:
        process.terminate()
        process.join()


def list_ms(server: Server) -> float:
    time.sleep(0.6)  # longer than an answer is given again
    began = time.perf_counter()
    server.get("/api/sessions")
    return (time.perf_counter() - began) * 1000


def ps_ms() -> float:
    began = time.perf_counter()
    subprocess.run(["docker", "ps"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                   check=True)
    return (time.perf_counter() - began) * 1000


def sessions(server: Server, table: Table) -> None:
    """The list of many sessions beside `docker ps`, and what its polling costs a terminal."""
    for _ in range(SESSIONS):
        server.session()
    list_ms(server), ps_ms()
    pairs = [(list_ms(server), ps_ms()) for _ in range(30)]
    ratios = [ours / theirs for ours, theirs in pairs]
    ours, theirs = (median(column) for column in zip(*pairs, strict=True))
    table.row(f"list of {SESSIONS} sessions over docker ps", median(ratios), "x",
              f"{ours:.1f} over {theirs:.1f} ms {quartiles(ratios)}", most=1.2)
    with polled(server, POLLERS, 0):
        most, calls = engine_calls(server, 5)
    table.row(f"engine calls at once, {POLLERS} pages flat out", most, "",
              f"{calls / 5:.1f} a second", most=1)
    with raw_pair(server, server.sessions[0]) as (web, bare):
        for title, pages, seconds in ((f"{POLLERS} pages", POLLERS, POLL_SECONDS),
                                      ("one flat out", 1, 0)):
            before = list[tuple[list[float], list[float]]]()
            during = list[tuple[list[float], list[float]]]()
            for _ in range(ROUNDS):
                before.append((echo_ms(web), echo_ms(bare)))
                with polled(server, pages, seconds):
                    during.append((echo_ms(web), echo_ms(bare)))
            echo_beside(table, f"echo while polled by {title}", before, during)


def engine_calls(server: Server, seconds: float) -> tuple[int, int]:
    """How many processes the server had at most at once, and how many in all."""
    most, seen, deadline = 0, set[int](), time.monotonic() + seconds
    while time.monotonic() < deadline:
        children = server.children()
        most, seen = max(most, len(children)), seen | children
        time.sleep(0.002)
    return most, len(seen)


# --- An agent's turn ---

TURN = f"""
i=0
while [ $i -lt {EVENTS} ]; do
  echo '{{"t":'$EPOCHREALTIME',"text":"{"x" * EVENT_BYTES}"}}'
  usleep {EVENT_SECONDS * 1e6:.0f}
  i=$((i+1))
done
sleep 1
"""


def delays_ms(lines: Iterator[str]) -> list[float]:
    """How long after it was printed each event came."""
    delays = []
    for line in lines:
        delays.append((time.time() - json.loads(line)["t"]) * 1000)
        if len(delays) == EVENTS:
            break
    return delays


def bare_lines(session: str) -> Iterator[str]:
    with subprocess.Popen(["docker", "exec", session, "sh", "-c", TURN], stdout=subprocess.PIPE,
                          text=True) as process:
        assert process.stdout
        yield from process.stdout


def event_lines(server: Server, job: dict[str, str]) -> Iterator[str]:
    """What a job prints, from its server-sent events."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    path = f"/api/sessions/{job['session']}/jobs/{job['id']}/events"
    connection.request("GET", path, headers={"Cookie": server.cookie})
    name, text = "", ""
    for raw in connection.getresponse():
        key, _, value = raw.decode().rstrip("\n").partition(": ")
        name = value if key == "event" else name
        if key == "data" and name == "stdout":
            text += json.loads(value)
            *lines, text = text.split("\n")
            yield from lines


def written(pid: int) -> tuple[int, int]:
    """Bytes that a process has written, by its calls and to the disk."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["wchar"]), int(fields["write_bytes"])


def supervisor(folder: Path) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if str(folder).encode() in path.read_bytes().split(b"\0"):
            return int(path.parent.name)
    raise AssertionError(f"nobody supervises {folder}")


def turn(server: Server, table: Table) -> None:
    """An agent's turn through the events of a job, beside the same command's output from `docker
    exec`."""
    session = server.session()
    delays, added, costs = list[float](), list[float](), list[list[float]]()
    for _ in range(3):
        theirs = delays_ms(bare_lines(session))
        before = written(server.process.pid)
        job = server.post(f"/api/sessions/{session}/command", {"command": TURN})
        folder = server.home / "jobs" / session / job["id"]
        ours = delays_ms(event_lines(server, job))
        parts = zip(written(supervisor(folder)), written(server.process.pid), before, strict=True)
        stream = (folder / "output").stat().st_size
        disk = sum(512 * path.stat().st_blocks for path in folder.iterdir())
        costs.append([(a + b - c) / stream for a, b, c in parts] + [disk / stream])
        delays += ours
        added.append(median(ours) - median(theirs))
    table.row(f"{EVENTS} events, from printed to received", median(delays), "ms",
              f"{quartiles(delays)} p99 {p99(delays):.1f}", most=20)
    table.row("of which added to docker exec", median(added), "ms", quartiles(added), most=20)
    for title, ratios in zip(("written by calls", "written to the disk", "taken on the disk"),
                             zip(*costs, strict=True), strict=True):
        table.row(f"{title}, over the stream", median(ratios), "x", f"of {stream} bytes", most=3)


# --- A short job ---


def first_byte_ms(server: Server, session: str) -> float:
    """How long after it was asked for a job has printed something."""
    began = time.perf_counter()
    job = server.post(f"/api/sessions/{session}/command", {"command": "echo x"})
    output = server.home / "jobs" / session / job["id"] / "output"
    while not output.stat().st_size:
        time.sleep(0.0005)
    return (time.perf_counter() - began) * 1000


def bare_first_byte_ms(session: str) -> float:
    began = time.perf_counter()
    argv = ["docker", "exec", session, "sh", "-c", "echo x"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.read(1)
        return (time.perf_counter() - began) * 1000


def supervisor_mb(server: Server, session: str) -> tuple[float, float]:
    """What the supervisor of a job holds: all, and its share of what it has with others."""
    job = server.post(f"/api/sessions/{session}/command", {"command": "echo x; sleep 1000"})
    folder = server.home / "jobs" / session / job["id"]
    while not (folder / "output").stat().st_size:
        time.sleep(0.01)
    text = Path(f"/proc/{supervisor(folder)}/smaps_rollup").read_text()
    resident, share = (int(line.split()[1]) * 1024 / 1e6 for line in text.splitlines()
                       if line.startswith(("Rss:", "Pss:")))
    return resident, share


def job(server: Server, table: Table) -> None:
    """The first byte of a job beside that of `docker exec`, and what the supervisors hold."""
    session = server.session()
    first_byte_ms(server, session), bare_first_byte_ms(session)
    pairs = [(first_byte_ms(server, session), bare_first_byte_ms(session)) for _ in range(JOBS)]
    ours, theirs = (median(column) for column in zip(*pairs, strict=True))
    added = [job - bare for job, bare in pairs]
    table.row("first byte of a job, added to docker exec", median(added), "ms",
              f"{ours:.1f} over {theirs:.1f} {quartiles(added)}", most=50)
    held = [supervisor_mb(server, session) for _ in range(JOBS)]
    for title, values, most in zip(("resident", "its share"), zip(*held, strict=True), (9, 6),
                                   strict=True):
        table.row(f"each of {JOBS} supervisors, {title}", median(values), "MB", quartiles(values),
                  most=most)


# --- Many connections ---

HALF = b"GET / HTTP/1.1\r\nHo"


def connections(server: Server, count: int, sent: bytes) -> list[socket.socket]:
    opened = []
    for _ in range(count):
        opened.append(socket.create_connection(("127.0.0.1", server.port)))
        opened[-1].sendall(sent)
    return opened


def requests_ms(server: Server, path: str) -> list[float]:
    times = []
    for _ in range(300):
        began = time.perf_counter()
        server.request("GET", path)
        times.append((time.perf_counter() - began) * 1000)
    return times


def life_seconds(held: list[socket.socket], drip: bytes = b"") -> float:
    """How long until the server has closed a connection, to which a byte is sent now and then."""
    began, poller = time.monotonic(), select.poll()
    poller.register(held[0], select.POLLIN | select.POLLHUP)
    while not poller.poll(500):
        held[0].sendall(drip)
    return time.monotonic() - began


def crowd(server: Server, table: Table) -> None:
    """Other requests while many connections are held that ask nothing, and how long and how many
    may be held."""
    path = f"/api/sessions/{server.session()}/jobs"
    requests_ms(server, path)
    pairs: Pairs = []
    for _ in range(ROUNDS):
        alone = requests_ms(server, path)
        held = connections(server, HELD // 2, b"") + connections(server, HELD // 2, HALF)
        time.sleep(0.5)
        pairs.append((requests_ms(server, path), alone))
        for sock in held:
            sock.close()
        time.sleep(0.5)
    ours, theirs = joined(pairs)
    ratios = [p99(beside) / p99(alone) for beside, alone in pairs]
    table.row(f"p99 beside {HELD} held connections", p99(ours) / p99(theirs), "x",
              f"{p99(ours):.2f} over {p99(theirs):.2f} ms {quartiles(ratios)}", most=2)
    before = server.descriptors()
    held = connections(server, 800, HALF)
    time.sleep(1)
    table.row("connections held of 800 tried", server.descriptors() - before, "", most=650)
    for sock in held:
        sock.close()
    for title, sent, drip, most in (("half a head", HALF, b"", 11),
                                    ("a head byte by byte", HALF, b"x", 11),
                                    ("nothing", b"", b"", 61)):
        table.row(f"life of a connection that sends {title}",
                  life_seconds(connections(server, 1, sent), drip), "s",
                  most=most)


# --- The first page ---


def page(server: Server, table: Table) -> None:
    """What a browser loads before it shows the first page, and what again with its cache."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from browser import chromium

    name, _, value = server.cookie.partition("=")
    with chromium() as browser:
        tab = browser.page()
        tab.call("Network.setCookie", name=name, value=value, url=f"http://127.0.0.1:{server.port}")
        for title, most in (("first page", 150), ("first page again", 15)):
            tab.call("Page.navigate", url="about:blank")
            tab.requests.clear()
            tab.bytes = 0
            tab.goto(f"http://127.0.0.1:{server.port}/")
            tab.see("New session")
            tab.wait("performance.getEntriesByType('resource').every((entry) => entry.responseEnd)")
            table.row(title, tab.bytes / 1000, "kB", f"{len(tab.requests)} requests", most=most)
        terminal = [url for url in tab.requests if "xterm" in url or "terminal" in url]
        table.row("of them for terminals", len(terminal), "", most=0)
        tab.close()


# --- A diff ---

OPEN = """(async () => {
    const frame = () => new Promise(requestAnimationFrame);
    const button = document.querySelector(".files .file"), began = performance.now();
    button.click();
    while (document.querySelectorAll(".patch .slice > div").length < %d) await frame();
    await frame(); // the one before has been painted
    return performance.now() - began;
})()"""


def diff(server: Server, table: Table) -> None:
    """A file's patch of many lines, from the click to the painted page, its turn being open."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from browser import chromium

    config = {"imageName": "localhost/sandbox", "imageVersion": "1.0-common", "runtime": "docker",
              "agentPromptCommand": "sh -c {prompt}"}
    (server.home / "sandbox.json").write_text(json.dumps(config))
    session, times, opens = server.session(), list[float](), list[float]()
    job = server.post(f"/api/sessions/{session}/prompt",
                      {"prompt": f"seq -f 'line %g of a file' {LINES} >a"})
    while server.get(f"/api/sessions/{session}/jobs/{job['id']}")["state"] == "running":
        time.sleep(0.1)
    name, _, value = server.cookie.partition("=")
    with chromium() as browser:
        tab = browser.page()
        tab.call("Network.setCookie", name=name, value=value, url=f"http://127.0.0.1:{server.port}")
        for _ in range(PATCHES):
            tab.call("Page.navigate", url="about:blank")
            tab.goto(f"http://127.0.0.1:{server.port}/#/s/{session}/command")
            tab.see("Nothing was run here yet.")
            began = time.perf_counter()
            tab.click(".tabs a:nth-child(2)")
            tab.wait("document.querySelector('.files .file')")
            opens.append((time.perf_counter() - began) * 1000)
            times.append(tab.eval(OPEN % (LINES + 1)))
        tab.close()
    table.row(f"a patch of {LINES} lines, from click to painted", median(times), "ms",
              quartiles(times), most=300)
    table.row("before it the tab with its turn, from click", median(opens), "ms", quartiles(opens))


PARTS: list[Callable[[Server, Table], None]] = [echo, ttyd, flood, floods, stalled, memory,
                                                sessions, turn, job, crowd, page, diff]


def main(argv: Sequence[str] | None = None) -> int:
    parts = {part.__name__: part for part in PARTS}
    parser = argparse.ArgumentParser(description="Measure the web service.")
    parser.add_argument("parts", nargs="*", metavar="PART",
                        help=f"one of {', '.join(parts)}; all by default")
    names = parser.parse_args(argv).parts or list(parts)
    if unknown := set(names) - set(parts):
        parser.error(f"there is no part {unknown.pop()}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was made goes
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        sandbox = build_zipapp(folder)
        for name in names:
            print(
                f"\n{name}: {str(parts[name].__doc__).splitlines()[0]}  "
                f"(load {os.getloadavg()[0]:.1f})", flush=True)
            with Server(sandbox) as server:
                parts[name](server, table)
    return int(not table.fine)


if __name__ == "__main__":
    sys.exit(main())
