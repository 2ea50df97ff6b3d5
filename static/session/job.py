"""Supervise a job: run a command, keep what it prints, and note how it ended.

    python3 -I -S job.py FOLDER BYTES COMMAND [ARGUMENT ...]

The web service starts this program, which detaches itself and outlives the service. FOLDER is that
of the job. The files output, runs, lock and status are there, and job.json is named job.json.new
until the lock is held: who saw the job without its lock would take it for lost. At most BYTES of
output are kept.

SANDBOX_TURN_ARGV, as Python writes a list, is another command that is run with `begin` before and,
where that succeeds, with `end` after it: it takes snapshots, see sandbox_changes.py. What it prints
at the end goes into the file changes.

Exit code: 0 as soon as the program has detached itself.

Import budget: as long as a job runs, so does this program. What it imports takes 1 ms; json would
take 5 more and signal 3. Nothing is imported later: Python may be upgraded while a job runs.
"""

import fcntl
import os
import select
import sys
import time

SIGPIPE = 13  # Python ignores it, and a command expects to end by it


class Recorder:
    """Writes two streams into one file as they come, and the lengths of their runs into another.

    The runs are stdout's and stderr's in turn, stdout's first, as LEB128; the last one is not
    written, as it still grows. A run's length is written before what follows it.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self.output, self.runs = (os.open(f"{folder}/{name}", os.O_WRONLY | os.O_APPEND)
                                  for name in ("output", "runs"))
        self.limit_bytes = limit_bytes
        self.stream, self.run, self.total, self.error = 0, 0, 0, ""

    def add(self, stream: int, data: bytes) -> None:
        """Keep the data. A failure is noted, and what comes after it is dropped."""
        if self.error:
            return
        if self.total + len(data) > self.limit_bytes:
            self.error = f"only the first {self.total} bytes of the output were kept"
            return
        try:
            if stream != self.stream:
                write_all(self.runs, leb128(self.run))
                self.stream, self.run = stream, 0
            write_all(self.output, data)
        except OSError as error:
            self.error = f"the output could not be kept: {error.strerror}"
        self.run, self.total = self.run + len(data), self.total + len(data)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def leb128(number: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    result = bytearray()
    while number > 127:
        result.append(number & 127 | 128)
        number >>= 7
    return bytes([*result, number])


def record(argv: list[str], recorder: Recorder, stdout: int = -1) -> int:
    """Run argv with its output going to a recorder, or that on stdout to another descriptor; its
    exit status, or 128+n for a signal n.
    """
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    fds = ((out_end if stdout < 0 else stdout, 1), (err_end, 2))
    actions = [(os.POSIX_SPAWN_DUP2, end, fd) for end, fd in fds]
    pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions, setsigdef=[SIGPIPE])
    os.close(out_end)
    os.close(err_end)
    streams, poller = {out: 0, err: 1}, select.poll()
    for fd in streams:
        poller.register(fd, select.POLLIN)
    while streams:
        for fd, _ in poller.poll():
            if data := os.read(fd, 65536):
                recorder.add(streams[fd], data)
            else:
                poller.unregister(fd)
                del streams[fd]
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 128 - code if code < 0 else code


def status_json(exit: int, error: str) -> str:
    """How the job ended, as JSON; `error` is '' for none."""
    now = time.time()
    ended = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    text = "".join(c if " " <= c <= "~" and c not in '"\\' else "?" for c in error)
    return f'{{"exit": {exit}, "ended": "{ended}"' + (f', "error": "{text}"}}' if text else "}")


def main(folder: str, limit_bytes: str, *argv: str) -> None:
    """Detach, run the command to its end, and write its status."""
    lock = os.open(f"{folder}/lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.rename(f"{folder}/job.json.new", f"{folder}/job.json")
    if os.fork():
        os._exit(0)
    os.setsid()
    os.dup2(1, 0)  # this program was read from 0; it is started with /dev/null on 1
    recorder = Recorder(folder, int(limit_bytes))
    status = os.open(f"{folder}/status", os.O_WRONLY)  # now: the session may be renamed
    turn = eval(os.environ.pop("SANDBOX_TURN_ARGV", "[]"))
    try:
        changes = os.open(f"{folder}/changes", os.O_WRONLY | os.O_CREAT, 0o600) if turn else -1
        exit = record([*turn, "begin"], recorder) if turn else 0
        if not exit:
            exit = 130 if os.path.exists(f"{folder}/cancel") else record(list(argv), recorder)
            if turn:
                record([*turn, "end"], recorder, changes)
        error = recorder.error
    except OSError as failure:
        exit, error = 125, f"{argv[0]}: {failure.strerror}"
    write_all(status, status_json(exit, error).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
