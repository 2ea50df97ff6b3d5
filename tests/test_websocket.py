"""Terminals over WebSockets on real engines: every byte both ways, resume, sharing, and nothing
left inside."""

import hashlib
import http.client
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import everywhere, on_docker
from service import PASSWORD, Screen, Service, wait_for
from test_engines import sleeping
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.protocol import State
from websockets.server import ServerProtocol

from sandbox_web import FLOOD_SECONDS, REST_SECONDS, Terminal, Terminals, Viewer


def frame(kind: bytes, data: bytes) -> bytes:
    """As a holder sends it; see static/session/hold.py."""
    return kind + len(data).to_bytes(4, "big") + data


def run(screen: Screen, line: str) -> None:
    screen.type(line + "\n")


@everywhere
def test_a_shell_with_size_and_resize(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name, "rows=41&cols=133") as screen:
        run(screen, "stty size; echo $TERM $COLORTERM; pwd")
        screen.expect("41 133")
        screen.expect("xterm-256color truecolor")
        screen.expect(str(service.engine.project))
        run(screen, """sh -c 'trap "stty size" WINCH; echo rea""dy; while :; do sleep 0.1; done'""")
        screen.expect("ready")
        screen.send(type="resize", rows=30, cols=101)
        screen.expect("30 101")
        assert screen.message("size") == {"type": "size", "rows": 30, "cols": 101}


def test_closing_leaves_no_process_inside(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        run(screen, "nohup sleep 87654 & sleep 87655 & sleep 87656")
        wait_for(lambda: sleeping(service.engine, name, "87656") == 1)
        id = screen.hello["id"]
    rows = service.get(f"/api/sessions/{name}/terminals").json
    assert [(row["id"], row["ended"]) for row in rows] == [(id, False)]  # it outlives its viewer
    assert service.request("DELETE", f"/api/sessions/{name}/terminals/{id}").status == 200
    for mark in ("87654", "87655", "87656"):
        wait_for(lambda: sleeping(service.engine, name, mark) == 0)  # noqa: B023
    wait_for(lambda: service.get(f"/api/sessions/{name}/terminals").json == [])


@everywhere
def test_ten_megabytes_of_random_bytes_come_back_as_they_went(service: Service, name: str) -> None:
    """In pieces that a PTY holds: podman gets stuck when both directions are flooded."""
    service.create(name)
    data = random.Random(1).randbytes(10_000_000)
    received, at = hashlib.sha256(), 0
    with service.terminal(name) as screen:
        run(screen, "stty raw -echo; echo rea''dy; exec cat")
        screen.expect("ready")
        screen.expect("\n")
        while at < len(data):
            piece = data[at : at + 2048]
            screen.output, at = bytearray(), at + len(piece)
            screen.type(piece)
            while len(screen.output) < len(piece):
                screen.receive()
            received.update(screen.output)
    assert received.digest() == hashlib.sha256(data).digest()


@on_docker
def test_frames_that_come_in_pieces_and_together(service: Service, name: str) -> None:
    service.create(name)

    def masked(opcode: int, data: bytes) -> bytes:
        mask = b"\x11\x22\x33\x44"
        body = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
        return bytes([opcode, 0x80 | len(data)]) + mask + body

    with service.terminal(name) as screen:
        run(screen, "stty raw -echo; echo rea''dy; exec cat")
        screen.expect("ready")
        wire = screen.socket.socket
        for cut in range(1, 9):
            typed = masked(0x82, b"<%d>" % cut)
            wire.sendall(typed[:cut])
            wait_for(service.is_idle)
            wire.sendall(typed[cut:] + masked(0x82, b"a") + masked(0x89, b"ping"))
            screen.expect(f"<{cut}>a")
            wire.sendall(masked(0x82, b"[%d]" % cut))
            screen.expect(f"[{cut}]")
        wire.sendall(masked(0x02, b"first"))
        wait_for(service.is_idle)
        wire.sendall(masked(0x80, b"last"))
        screen.expect("firstlast")
        wire.sendall(masked(0x82, b"x" * 125) + masked(0x82, b""))
        screen.expect("x" * 125)
        wire.sendall(masked(0x02, b"first"))
        wait_for(service.is_idle)
        wire.sendall(masked(0x82, b"no continuation"))
        with pytest.raises(ConnectionClosed) as closed:
            screen.expect("no continuation")
        assert closed.value.rcvd and closed.value.rcvd.code == 1002


@on_docker
def test_a_flood_both_ways_neither_sticks_nor_loses_anything(service: Service, name: str) -> None:
    service.create(name)
    data = random.Random(2).randbytes(3_000_000) + b"."
    with service.terminal(name) as screen:
        run(screen, "stty raw -echo; echo rea''dy; exec cat")
        screen.expect("ready")
        screen.expect("\n")
        screen.output, screen.at = bytearray(), 0

        def send() -> None:
            for at in range(0, len(data), 50_000):
                screen.type(data[at : at + 50_000])

        sender = threading.Thread(target=send)
        sender.start()
        while len(screen.output) < len(data):
            screen.receive()
        sender.join()
        assert screen.output == data


@on_docker
def test_the_last_line_always_arrives(service: Service, name: str) -> None:
    """A hundred times, ten at once."""
    service.create(name)
    for first in range(0, 100, 10):
        with ExitStack() as stack:
            screens = {first + n: stack.enter_context(service.terminal(name)) for n in range(10)}
            for number, screen in screens.items():
                run(screen, f"exec sh -c 'seq 1 2000; echo la''st-{number}-; exit {number}'")
            for number, screen in screens.items():
                screen.expect(f"last-{number}-")
                assert screen.message("exit")["status"] == number
                with pytest.raises(ConnectionClosed):
                    screen.receive()


@on_docker
def test_resume_has_nothing_missing_and_nothing_twice(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        run(screen,
            "stty -echo; i=0; while [ $i -lt 3000 ]; do echo line-$i; i=$((i+1)); done; "
            "read -r _; echo al''l")
        screen.expect("line-100\r\n")
        id, seq, first = screen.hello["id"], screen.seq, screen.output
    with service.terminal(name, f"id={id}&from={seq}") as screen:
        assert screen.hello["resumed"] and screen.hello["seq"] == seq
        run(screen, "")  # what is left may have come to the first one
        screen.expect("all")
        whole = first + screen.output
    lines = whole.decode().split("line-0\r\n", 1)[1].split()
    assert lines[: 2999 + 1] == [f"line-{i}" for i in range(1, 3000)] + ["all"]


@on_docker
def test_a_position_that_is_gone_is_said(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        id = screen.hello["id"]
        run(screen, "seq 1 400000; echo do''ne")
        screen.expect("done")
    with service.terminal(name, f"id={id}&from=5") as screen:
        assert not screen.hello["resumed"] and screen.hello["seq"] == screen.hello["start"] > 5
        screen.expect("done")
    with service.terminal(name, f"id={id}&from=999999999") as screen:
        assert not screen.hello["resumed"]


@on_docker
def test_one_writer_many_viewers(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as first:
        assert first.message("role")["writer"]
        with service.terminal(name, f"id={first.hello['id']}&view=1") as second:
            role = second.message("role")
            assert not role["writer"] and role["viewers"] == 2
            second.type("echo never\n")
            run(first, "echo bo''th")
            first.expect("both")
            second.expect("both")
            second.send(type="take")
            assert second.message("role")["writer"]
            run(second, "echo se''cond")
            first.expect("second")
            assert b"never" not in first.output
        with service.terminal(name, f"id={first.hello['id']}") as third:
            assert third.message("role")["writer"]


@on_docker
def test_a_reader_that_stops_neither_blocks_others_nor_costs_memory(service: Service,
                                                                    name: str) -> None:
    service.create(name)
    with service.terminal(name) as slow, service.terminal(name) as other:
        before = service.resident_bytes()
        run(slow, "yes 0123456789")
        slow.expect("0123456789")
        for number in range(50):
            run(other, f"echo num''ber-{number}")
            other.expect(f"number-{number}")
        assert service.resident_bytes() - before < 4_000_000
        slow.type("\x03")
        run(slow, "echo al''ive")
        slow.expect("alive")


def test_a_flood_rests_only_beside_another() -> None:
    many: list[Terminal] = []
    app: Any = SimpleNamespace(terminals=SimpleNamespace(all=lambda: many))
    many += [Terminal(app, None, None, "shell", (24, 80))  # type: ignore[arg-type]
             for _ in range(3)]
    many[0].rest()
    assert many[0].rest_seconds() == 0  # the others are silent
    many[1].rest()
    many[2].rest()
    assert 0 < many[1].resting - many[1].flooding + FLOOD_SECONDS < 2 * REST_SECONDS
    assert many[2].resting - many[2].flooding + FLOOD_SECONDS > 1.5 * REST_SECONDS
    many[1].resting = time.monotonic() - 1
    assert many[1].rest_seconds() == 0


def test_a_reader_that_is_silent_for_long_stays() -> None:
    """One that reads nothing gets no ping either; the kernel knows whether its host is there."""
    terminal = Terminal(None, None, None, "shell", (24, 80))  # type: ignore[arg-type]
    ours, theirs = socket.socketpair()
    protocol = ServerProtocol()
    protocol.state = State.OPEN
    gone = list[bool]()
    viewer = Viewer(ours, protocol, lambda: gone.append(True), True, 0, None)
    terminal.viewers.append(viewer)
    for _ in range(3):
        viewer.seen = viewer.pinged = time.monotonic() - 1000
        terminal.look_after_viewers()
    assert terminal.viewers == [viewer] and not gone
    assert theirs.recv(100).startswith(b"\x89\x00")
    theirs.close()
    viewer.receive()
    terminal.look_after_viewers()
    assert terminal.viewers == [] and gone


@on_docker
def test_a_viewer_that_never_acknowledges_is_resynchronised(service: Service, name: str) -> None:
    service.create(name)
    with (service.terminal(name) as writer,
          service.terminal(name, f"id={writer.hello['id']}&view=1") as mute):
        run(writer, "seq 1 1000000; echo do''ne")
        mute.acked = 1 << 60  # so that it sends none
        writer.expect("done")
        mute.acked = 0
        mute.send(type="ack", seq=mute.hello["seq"])
        while not any(message["type"] == "reset" for message in mute.messages):
            mute.receive()
        mute.seq = mute.message("reset")["seq"]
        mute.at = len(mute.output)
        mute.expect("done")


@on_docker
@pytest.mark.parametrize(
    "frame",
    [
        "not json",
        "[]",
        '{"type":"dance"}',
        '{"type":"resize","rows":0,"cols":1}',
        '{"type":"resize","rows":true,"cols":1}',
        '{"type":"ack","seq":99999999999}',
        '{"type":"ack"}',
        "[" * 100_000,
    ],
)
def test_a_wrong_control_message_ends_the_connection_and_not_the_terminal(
    service: Service, name: str, frame: str
) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        screen.socket.send(frame)
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                screen.receive()
        assert closed.value.rcvd and closed.value.rcvd.code == 1008
    with service.terminal(name, f"id={screen.hello['id']}") as screen:
        run(screen, "echo al''ive")
        screen.expect("alive")


def children(service: Service) -> set[int]:
    found = set[int]()
    for task in Path(f"/proc/{service.pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def listed(service: Service, name: str) -> list[dict[str, object]]:
    rows = service.get(f"/api/sessions/{name}/terminals").json
    assert isinstance(rows, list)
    return rows


def count(service: Service, name: str) -> int:
    rows = service.get("/api/sessions").json
    return sum(int(row["terminals"]) for row in rows if row["name"] == name)


def test_a_killed_server_loses_no_terminal(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name, "rows=41&cols=133") as screen:
        run(screen, "mark=kept; sleep 76543 & echo fir''st")
        screen.expect("first")
        screen.quiet()
        id, seq, whole = screen.hello["id"], screen.seq, bytes(screen.output)
        service.restart_after_kill()
    assert [(row["id"], row["ended"]) for row in listed(service, name)] == [(id, False)]
    with service.terminal(name, f"id={id}&from={seq}") as screen:
        assert screen.hello["resumed"] and screen.hello["seq"] == seq
        assert (screen.hello["rows"], screen.hello["cols"]) == (41, 133)
        run(screen, "echo $mark.")
        screen.expect("kept.")
    with service.terminal(name, f"id={id}&from=0") as screen:
        screen.expect("kept.")
        assert screen.output.startswith(whole)
    assert sleeping(service.engine, name, "76543") == 1
    assert service.request("DELETE", f"/api/sessions/{name}/terminals/{id}").status == 200
    wait_for(lambda: sleeping(service.engine, name, "76543") == 0)


@on_docker
def test_the_last_mebibyte_outlives_the_server(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        run(screen, "printf '\\033[?2004h'; seq 1 400000; echo do''ne; exec sleep 1000")
        screen.expect("done\r\n")  # after which nothing comes
        end, last = screen.seq, bytes(screen.output[-1_000_000:])
        service.restart_after_kill()
    with service.terminal(name, f"id={screen.hello['id']}&from=0") as screen:
        assert screen.hello["end"] - screen.hello["start"] == 1 << 20
        assert screen.hello["end"] == end and not screen.hello["resumed"]
        assert "[?2004h" in screen.message("modes")["data"]
        while screen.seq < end:
            screen.receive()
        assert screen.output.endswith(last)


@on_docker
def test_an_orderly_end_of_the_server_detaches(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        run(screen, "sleep 65432")
        wait_for(lambda: sleeping(service.engine, name, "65432") == 1)
        clients = children(service)
        assert clients
        service.process.terminate()
        assert service.process.wait(60) == 0
        service.process.end()
    # Whoever has adopted the last one takes note of its end a moment later.
    wait_for(lambda: not [pid for pid in clients if Path(f"/proc/{pid}").exists()])
    service.start()
    with service.terminal(name, f"id={screen.hello['id']}&from={screen.seq}") as screen:
        screen.type("\x03")
        run(screen, "echo al''ive")
        screen.expect("alive")


@on_docker
def test_an_end_that_nobody_saw(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        run(screen, "echo be''gun; until [ -e /tmp/go ]; do sleep 0.1; done; echo la''st; exit 7")
        screen.expect("begun")
        id = screen.hello["id"]
        service.process.kill()
    service.process.wait()
    service.process.end()
    service.engine.run("exec", name, "touch", "/tmp/go")
    service.start()
    wait_for(lambda: [row["exit"] for row in listed(service, name)] == [7])
    assert count(service, name) == 1  # which nobody knows yet
    with service.terminal(name, f"id={id}&from=0") as screen:
        screen.expect("last")
        assert screen.message("exit")["status"] == 7
    wait_for(lambda: listed(service, name) == [])
    assert count(service, name) == 0
    with pytest.raises(InvalidStatus) as refused, service.terminal(name, f"id={id}"):
        pass
    assert refused.value.response.status_code == 404


def test_a_killed_client_of_the_engine_is_replaced(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        run(screen, "mark=kept; echo be''gun")
        screen.expect("begun")
        for turn in range(3):
            (client,) = children(service)
            os.kill(client, signal.SIGKILL)
            wait_for(lambda: children(service) not in ({client}, set()))  # noqa: B023
            run(screen, f"echo $mark-{turn}.")
            screen.expect(f"kept-{turn}.")
        run(screen, "exit 7")
        assert screen.message("exit")["status"] == 7


@on_docker
def test_two_servers_and_the_size_of_who_typed_last(service: Service, name: str) -> None:
    service.create(name)
    with ExitStack() as stack:
        first = stack.enter_context(service.terminal(name, "rows=40&cols=100"))
        run(first, "sleep 1; echo fi''rst")
        first.expect("first")
        other = Service(service.engine)
        look = f"id={first.hello['id']}&from=0&rows=30&cols=90"
        second = stack.enter_context(other.terminal(name, look))
        assert first.message("size") == {"type": "size", "rows": 30, "cols": 90}
        wait_for(lambda: [row["viewers"] for row in listed(service, name)] == [2])
        first.send(type="resize", rows=41, cols=101)  # a wish, until something is typed
        run(first, "stty size")
        first.expect("41 101")
        assert second.message("size") == {"type": "size", "rows": 41, "cols": 101}
        run(second, "stty size")
        first.expect("30 90")
        assert first.message("size") == {"type": "size", "rows": 41, "cols": 101}
        assert first.message("size") == {"type": "size", "rows": 30, "cols": 90}


@on_docker
def test_a_thousand_viewers_come_and_go(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        run(screen, "sleep 1; echo rea''dy")
        screen.expect("ready")
        clients, counts = children(service), service.resources()
        for number in range(1000):
            with service.terminal(name, f"id={screen.hello['id']}&from={number}"):
                pass
            if number % 100 == 99:  # or its log fills the pipe that nobody reads
                assert service.process.stderr
                os.read(service.process.stderr.fileno(), 65536)
        wait_for(lambda: [row["viewers"] for row in listed(service, name)] == [1])
        wait_for(lambda: service.resources() <= counts)
        assert children(service) == clients
        screen.send(type="take")
        run(screen, "echo al''ive")
        screen.expect("alive")


@on_docker
def test_a_session_that_cannot_hold_terminals(service: Service, name: str) -> None:
    """As one that was made by an earlier version: said once, and ended with its server."""
    service.create(name)
    service.engine.run("exec", name, "sh", "-c", "rm $(command -v python3)")
    with service.terminal(name) as screen:
        screen.expect("this terminal ends with its server")
        run(screen, "stty size")
        screen.expect("24 80")
        screen.send(type="resize", rows=30, cols=101)
        assert screen.message("size") == {"type": "size", "rows": 30, "cols": 101}
        with service.terminal(name) as second:
            run(second, "sleep 76543")
            wait_for(lambda: sleeping(service.engine, name, "76543") == 1)
            assert b"sandbox" not in second.output
            service.restart_after_kill()
    wait_for(lambda: sleeping(service.engine, name, "76543") == 0)
    with service.terminal(name) as screen:
        run(screen, "sleep 65432")
        wait_for(lambda: sleeping(service.engine, name, "65432") == 1)
        service.process.terminate()
        assert service.process.wait(60) == 0
    wait_for(lambda: sleeping(service.engine, name, "65432") == 0)


def test_a_server_waits_for_terminals_that_have_left_its_list(tmp_path: Path) -> None:
    """What hangs up their programs would end with it."""
    terminals = Terminals(str(tmp_path / "terminals"))
    waited: list[float] = []
    going: Any = SimpleNamespace(id="x", ended=False, held=True,
                                 thread=SimpleNamespace(join=waited.append))
    going.wake = lambda: terminals.remove(going)  # before it is waited for
    terminals.by_id["x"] = going
    terminals.leave()
    assert waited and not terminals.all()


def lie(service: Service, name: str, said: bytes, then: str) -> None:
    """Have a program that prints these bytes in the place of each holder's client to come."""
    project = service.engine.project
    (project / "said").write_bytes(said)
    (project / "python3").write_text(f"#!/bin/sh\ncat {project}/said; {then}\n")
    (project / "python3").chmod(0o755)
    put = f'ln -sf {project}/python3 "$(command -v python3)"'
    assert service.engine.run("exec", name, "sh", "-c", put).returncode == 0


@on_docker
def test_a_session_that_is_not_what_it_was(service: Service, name: str) -> None:
    """A terminal is begun in the container that was last seen, before it is looked at."""
    service.create(name)
    before = service.resources()
    service.engine.run("stop", "-t", "0", name)
    for status, change in ((409, ["rm", "-f", name]), (404, ["version"])):
        with pytest.raises(InvalidStatus) as refused, service.terminal(name):
            pass
        assert refused.value.response.status_code == status
        service.engine.run(*change)
    wait_for(lambda: service.resources() <= before and not children(service))
    service.create(name)
    with service.terminal(name) as screen:
        run(screen, "echo al''ive")
        screen.expect("alive")
    assert len(listed(service, name)) == 1


@on_docker
@pytest.mark.parametrize("how", ["stopped", "created anew", "removed"])
@pytest.mark.parametrize("where", ["page", "command line"])
def test_viewers_are_told_what_became_of_the_session(service: Service, name: str, how: str,
                                                     where: str) -> None:
    path = f"/api/sessions/{name}"
    service.create(name)
    with service.terminal(name) as screen:
        run(screen, "echo rea''dy")
        screen.expect("ready")
        if where == "command line":
            word = {"stopped": "stop", "created anew": "recreate", "removed": "rm"}[how]
            assert service.engine.sandbox(word, name).returncode == 0
        elif how == "removed":
            assert service.request("DELETE", path).status == 200
        else:
            word = {"stopped": "stop", "created anew": "recreate"}[how]
            assert service.post(f"{path}/{word}").status == 200
        assert f"the session {name} was {how}" in screen.message("exit")["reason"]


@on_docker
def test_a_session_that_is_not_there_has_no_terminals(service: Service, name: str) -> None:
    path = f"/api/sessions/{name}/terminals"
    assert service.get(path).status == 404
    service.create(name)
    assert (service.get(path).status, service.get(path).json) == (200, [])


@on_docker
def test_a_holder_that_dies(service: Service, name: str) -> None:
    service.create(name)
    with service.terminal(name) as screen:
        run(screen, "echo rea''dy; sleep 76543")
        screen.expect("ready")
        service.engine.run("exec", name, "sh", "-c", "kill -9 $(pidof python3)")
        assert screen.message("exit")["status"] is None
    wait_for(lambda: sleeping(service.engine, name, "76543") == 0)
    wait_for(lambda: listed(service, name) == [])


GREETING = frame(b"h", b"0 24 80 0")
LIES = {
    "an unknown frame": frame(b"x", b"x"),
    "a frame of 4 GB": GREETING + b"o\xff\xff\xff\xff",
    "half a frame": GREETING + frame(b"o", b"abc")[:-1],
    "no numbers": frame(b"h", b"a b"),
    "too few numbers": frame(b"h", b"1"),
    "a position beyond all": frame(b"h", b"9223372036854775806 1 1 0"),
    "a size beyond all": GREETING + frame(b"s", b"9999 9") + frame(b"s", b"0 0"),
    "a status beyond all": GREETING + frame(b"e", b"9" * 5000),
    "nothing at all": b"",
}


@on_docker
@pytest.mark.parametrize("what", LIES)
def test_a_holder_that_lies_harms_its_terminal_alone(service: Service, name: str,
                                                     what: str) -> None:
    service.create(name)
    with service.terminal(name) as other:
        run(other, "echo rea''dy")
        other.expect("ready")
        lie(service, name, LIES[what], "exit 3")
        with service.terminal(name) as screen:
            assert screen.message("exit")["status"] in (3, None, 125, 143)
        run(other, "echo al''ive")
        other.expect("alive")


@on_docker
def test_a_client_that_stays_after_what_is_no_frame_is_ended(service: Service, name: str) -> None:
    service.create(name)
    lie(service, name, b"XXXXXXXX", "trap '' HUP TERM; sleep 1000")
    with service.terminal(name) as screen:
        assert screen.message("exit")["type"] == "exit"


@on_docker
def test_a_holder_that_goes_back_starts_its_viewers_anew(service: Service, name: str) -> None:
    service.create(name)
    lie(service, name, frame(b"h", b"10 24 80 0") + frame(b"o", b"abc"),
        "sleep 1; printf 'h\\0\\0\\0\\0111 24 80 0o\\0\\0\\0\\003xyz'; sleep 1000")
    with service.terminal(name) as screen:
        screen.expect("abc")
        screen.expect("xyz")
        assert screen.message("reset")["seq"] in (1, 10)


def until_closed(screen: Screen) -> None:
    with pytest.raises(ConnectionClosed):
        while True:
            screen.receive()


def is_cut(stream: Iterator[tuple[str, object, int]]) -> bool:
    """Whether the events of a job end without its end."""
    return "end" not in [kind for kind, _, _ in stream]


@on_docker
def test_a_logout_ends_what_its_login_has_open_and_no_more(service: Service, name: str) -> None:
    session = service.create(name, network={"allow": ["a.test"]})["name"]
    job = service.job(session, "echo ready; sleep 1000")
    mine = service.cookie
    with service.terminal(session) as kept:
        service.log_in()
        look = f"id={kept.hello['id']}&view=1"
        with service.terminal(session) as screen, service.terminal(session, look) as shared:
            run(screen, "echo fir''st")
            screen.expect("first")
            id, seq = screen.hello["id"], screen.seq
            stream = service.events(job)
            next(event for event in stream if event[1] == "ready\n")
            decisions = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
            path = f"/api/sessions/{session}/network/events"
            decisions.request("GET", path, headers={"Cookie": service.cookie})
            answer = decisions.getresponse()
            assert answer.readline().startswith(b":")
            assert service.post("/auth/logout").status == 200
            until_closed(screen)
            until_closed(shared)
            assert is_cut(stream)
            assert answer.read().count(b"event:") == 0
            decisions.close()
        run(kept, "echo ki''ck")
        kept.expect("kick")
    service.cookie = mine
    with service.terminal(session, f"id={id}&from={seq}") as screen:
        assert screen.hello["resumed"]
        run(screen, "echo aga''in")
        screen.expect("again")


@on_docker
def test_a_logout_ends_a_terminal_that_takes_nothing(service: Service, name: str) -> None:
    """And one whose input the program does not take."""
    service.create(name)
    with service.terminal(name) as screen, service.terminal(name) as stuck:
        run(screen, "yes 0123456789")
        screen.expect("0123456789")
        run(stuck, "stty raw -echo; echo rea''dy; exec sleep 1000")
        stuck.expect("ready")
        stuck.type(bytes(500_000))
        threads = service.resources()[0]
        assert service.post("/auth/logout").status == 200
        service.log_in()
        path = f"/api/sessions/{name}/terminals"
        assert [row["ended"] for row in service.get(path).json] == [False, False]
        wait_for(lambda: [row["viewers"] for row in service.get(path).json] == [0, 0])
        # a thread ends after its connection
        wait_for(lambda: service.resources()[0] <= threads + 1)


@on_docker
def test_expiry_and_a_new_password_end_what_is_open(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name, "echo ready; sleep 1000")
    with service.terminal(name) as screen:  # to begin one takes long
        look = f"id={screen.hello['id']}"
    service.cookie = service.signed_cookie(8)  # in which all below is opened
    with service.terminal(name, look) as screen:
        stream = service.events(job)
        next(event for event in stream if event[1] == "ready\n")
        until_closed(screen)
        assert is_cut(stream)
    service.log_in()
    wait_for(lambda: [row["viewers"] for row in listed(service, name)] == [0])
    service.end()
    service.engine.sandbox("serve", service.address, "-d", "-P", PASSWORD)
    service.log_in()
    with service.terminal(name) as screen:
        stream = service.events(job)
        next(stream)
        answer = service.engine.sandbox("serve", service.address, "--restart", "-P", "another")
        assert answer.returncode == 0, answer.stderr
        until_closed(screen)
        assert is_cut(stream)
    assert service.engine.sandbox("serve", service.address, "--stop").returncode == 0


@on_docker
def test_handshakes_that_are_refused(service: Service, name: str) -> None:
    service.create(name)
    for query, status in (
        ("rows=0", 400),
        ("cols=x", 400),
        ("id=nope", 404),
        ("run=nonsense", 400),
        ("run=agent", 409),
    ):
        with pytest.raises(InvalidStatus) as refused, service.terminal(name, query):
            pass
        assert refused.value.response.status_code == status, query
    with pytest.raises(InvalidStatus) as refused, service.terminal(name + "x"):
        pass
    assert refused.value.response.status_code == 404
    assert service.get(f"/api/sessions/{name}/terminal").status == 400
    service.cookie, cookie = "", service.cookie
    with pytest.raises(InvalidStatus) as refused, service.terminal(name):
        pass
    service.cookie = cookie
    assert refused.value.response.status_code == 401


@on_docker
def test_many_terminals_come_and_go_without_a_trace(service: Service, name: str) -> None:
    service.create(name)
    for turn in range(3):
        screens = []
        contexts = [service.terminal(name) for _ in range(10)]
        for context in contexts:
            screens.append(context.__enter__())
        for number, screen in enumerate(screens):
            run(screen, f"echo num''ber-{number}")
            screen.expect(f"number-{number}")
            screen.send(type="close")
        for screen, context in zip(screens, contexts, strict=True):
            screen.message("exit")
            context.__exit__(None, None, None)
        wait_for(lambda: service.get(f"/api/sessions/{name}/terminals").json == [])
        counts = wait_for(service.resources)
        if turn == 0:
            first = counts
    wait_for(lambda: service.resources() <= first)
    wait_for(lambda: not children(service))
