"""Run a command in a container of a pod, as `docker exec -i` would.

    python3 -I -S kube.py STDIN USER WORKDIR NAMES CLIENT POD COMMAND...

STDIN is 1 where ours goes to the command, USER a numeric uid:gid, CLIENT the words of kubectl and
its options, and NAMES those of variables that have our own values; both are lines of one argument.

`kubectl exec` knows no user, directory or variables. Above all it ends with status 0 when the API
server goes away under it (kubernetes/kubectl#1208). So a script goes first that reads the
variables from stdin, where no argv shows them, and closes each stream of output with a mark and
the status of the command. Where the marks are missing, so may be any part of the output. The
script stays until we have them: what is left unread of stdin would have the connection reset.

Exit code: the command's; 125 where it is not known, 137 where the pod has ended meanwhile.

Import budget: this runs for every command in a session. What it imports takes 1 ms.
"""

import os
import select
import sys

SCRIPT = """
SANDBOX_K=
while IFS= read -r SANDBOX_L || exit 125; [ "$SANDBOX_L" != "$1" ]; do SANDBOX_K="$SANDBOX_K
$SANDBOX_L"; done
eval "$SANDBOX_K"
SANDBOX_L=$1 SANDBOX_U=$2 SANDBOX_G=$3 SANDBOX_K=$4
shift 4
printf '\\377%s +\\n' "$SANDBOX_L" >&2
if [ "$SANDBOX_U" = 0 ]; then :
elif setpriv --reuid "$SANDBOX_U" --regid "$SANDBOX_G" --clear-groups true 2>/dev/null; then
  set -- setpriv --reuid "$SANDBOX_U" --regid "$SANDBOX_G" --clear-groups "$@"
else
  set -- python3 -I -S -c 'import os, sys
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1]))
os.execvp(sys.argv[3], sys.argv[3:])' "$SANDBOX_U" "$SANDBOX_G" "$@"
fi
[ -z "$SANDBOX_K" ] || cd "$SANDBOX_K" || set -- sh -c "exit 126"
"$@"
SANDBOX_K=$?
printf '\\377%s %s\\n' "$SANDBOX_L" "$SANDBOX_K"
printf '\\377%s %s\\n' "$SANDBOX_L" "$SANDBOX_K" >&2
cat >/dev/null
"""
HELD_MS = 50  # the beginning of a mark is held back for its rest, but not for ever
CHUNK_BYTES = 65536
QUIT_SECONDS = 10
CUT, ENDED = 125, 137


class Stream:
    """What comes out of kubectl on one descriptor, without the marks."""

    def __init__(self, fd: int, to: int, mark: bytes) -> None:
        self.fd, self.to, self.mark = fd, to, mark
        self.held, self.begun, self.status = b"", False, -1

    def feed(self, data: bytes) -> None:
        data, self.held = self.held + data, b""
        while self.status < 0 and (at := data.find(self.mark)) >= 0:
            line, newline, rest = data[at + len(self.mark):].partition(b"\n")
            if not newline:
                return self.keep(data, at)
            self.begun = True
            if line != b"+":
                self.status = int(line) if line.isdigit() else CUT
            data = data[:at] + (rest if self.status < 0 else b"")
        at = data.rfind(b"\xff")
        if at >= 0 and self.status < 0 and self.mark.startswith(data[at:]):
            return self.keep(data, at)
        self.write(data)

    def keep(self, data: bytes, at: int) -> None:
        self.held = data[at:]
        self.write(data[:at])

    def release(self) -> None:
        """It was no mark, or its rest does not come."""
        data, self.held = self.held, b""
        self.write(data)

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self.to, data):]


def header(names: list[str], mark: str) -> bytes:
    """The variables as a script, and the line that ends it."""
    pairs = [(*name.partition("="), os.environ.get(name, "")) for name in names]
    lines = ["export " + name + "='" + (value if equals else own).replace("'", "'\\''") + "'\n"
             for name, equals, value, own in pairs]
    return os.fsencode("".join([*lines, mark, "\n"]))


def pump(to: int, waiting: bytes, streams: list[Stream], stdin: bool) -> None:
    """Pass on what comes until both streams have their status or have ended."""
    poller = select.poll()
    for stream in streams:
        poller.register(stream.fd, select.POLLIN)
    live = {stream.fd: stream for stream in streams}
    os.set_blocking(to, False)
    reading = False
    while live and any(stream.status < 0 for stream in streams):
        if to >= 0 and waiting:
            poller.register(to, select.POLLOUT)
        elif to >= 0 and not stdin:
            to = close(poller, to)
        elif to >= 0:
            poller.register(to, 0)
        if reading != (stdin and not waiting and to >= 0):
            reading = not reading
            (poller.register(0, select.POLLIN) if reading else poller.unregister(0))
        ready = poller.poll(HELD_MS if any(stream.held for stream in streams) else None)
        for stream in streams if not ready else ():
            stream.release()
        for fd, event in ready:
            if fd in live:
                data = os.read(fd, CHUNK_BYTES)
                live[fd].feed(data)
                if not data:
                    poller.unregister(fd)
                    live.pop(fd).release()
            elif fd == 0:
                waiting = os.read(0, CHUNK_BYTES)
                stdin = bool(waiting)
            elif fd == to and event & select.POLLOUT:
                try:
                    waiting = waiting[os.write(to, waiting):]
                except BrokenPipeError:
                    to, waiting = close(poller, to), b""
            elif fd == to:  # nobody reads it any more
                to, waiting = close(poller, to), b""
    for stream in streams:
        stream.release()


def close(poller: select.poll, fd: int) -> int:
    poller.unregister(fd)
    os.close(fd)
    return -1


def start(argv: list[str], *fds: int) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, fd, place) for place, fd in enumerate(fds)]
    return os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions, setsigdef=[13])


def has_ended(client: list[str], pod: str) -> bool:
    """Whether a pod has gone away, or what ran in it has."""
    out, end = os.pipe()
    pid = start([*client, "get", pod, "--ignore-not-found", f"--request-timeout={QUIT_SECONDS}s",
                 "-o", "jsonpath={.status.phase}{.metadata.deletionTimestamp}"],
                os.open(os.devnull, os.O_RDONLY), end, os.open(os.devnull, os.O_WRONLY))
    os.close(end)
    said = b"".join(iter(lambda: os.read(out, CHUNK_BYTES), b""))
    return not os.waitpid(pid, 0)[1] and said != b"Running"


def main() -> int:
    stdin, user, workdir, names, words, pod, *command = sys.argv[1:]
    client, mark = words.split("\n"), os.urandom(16).hex()
    uid, _, gid = (user or "0:0").partition(":")
    argv = [*client, "exec", "-i", pod, "-c", "session", "--", "sh", "-c", SCRIPT, "sandbox", mark,
            uid, gid or uid, workdir, *command]
    (inp, to), (out, out_end), (err, err_end) = os.pipe(), os.pipe(), os.pipe()
    pid = start(argv, inp, out_end, err_end)
    for fd in (inp, out_end, err_end):
        os.close(fd)
    streams = [Stream(fd, to, b"\xff%s " % mark.encode()) for fd, to in ((out, 1), (err, 2))]
    pump(to, header(names.split("\n") if names else [], mark), streams, stdin == "1")
    if all(stream.status >= 0 for stream in streams):
        os.kill(pid, 15)  # what the command has left behind may hold it
        return streams[0].status
    begun, failed = any(stream.begun for stream in streams), os.waitpid(pid, 0)[1]
    if begun and has_ended(client, pod):
        return ENDED
    if begun or not failed:
        os.write(2, b"sandbox: the connection to %s was cut%s; sandbox ps shows what there is\n"
                 % (os.fsencode(pod), b", and what ran there may go on" if begun else b""))
    return CUT


if __name__ == "__main__":
    try:
        status = main()
    except BrokenPipeError:
        status = 141
    os._exit(status)
