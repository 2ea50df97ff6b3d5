# Runs before every command: $1 rows (0 without a terminal), $2 columns, then the command. With
# `hold` for the rows that is a python3 which holds the terminal itself: see hold.py, whose frame
# `n` says why that cannot be.
n=0
until [ -e /run/sandbox-ready ]; do
  n=$((n+1))
  [ $n -le 400 ] || { echo 'sandbox: the container did not become ready' >&2; exit 125; }
  sleep 0.05
done
if [ "$1" = hold ]; then
  n=
  [ -w /run/sandbox ] || n='it was made by an earlier version'
  command -v python3 >/dev/null || n='it has no python3'
  [ -z "$n" ] || { printf "n\\0\\0\\0\\$(printf %03o ${#n})%s" "$n"; exit 125; }
  shift 3
  set -- 0 0 "$(command -v python3)" "$@"  # that of the image, whatever PATH will be
fi
[ "$1" = 0 ] || stty rows "$1" cols "$2" 2>/dev/null
shift 2
# The first command after a start of the container starts the autostart script: a client that is
# killed loses nothing. The first one is who makes a directory that is named after the time at which
# the container started.
read -r _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ SANDBOX_START _ </proc/1/stat
SANDBOX_START=/dev/shm/sandbox-start-$SANDBOX_START SANDBOX_SETSID= SANDBOX_STOP=
trap 'SANDBOX_STOP=1' HUP INT TERM  # who has made the directory starts the script in any case
[ -d "$SANDBOX_START" ] || ! SANDBOX_EXEC= mkdir "$SANDBOX_START" 2>/dev/null ||
  SANDBOX_SETSID=$(command -v setsid || echo setsid)
# The environment arrives as a script in one variable: whole lines, any name, nothing in an argv.
eval "$SANDBOX_ENV"
SANDBOX_SCRIPT=$SANDBOX_AUTOSTART
unset SANDBOX_ENV SANDBOX_AUTOSTART
[ -z "$SANDBOX_PROXY" ] || {
  export HTTP_PROXY="$SANDBOX_PROXY" HTTPS_PROXY="$SANDBOX_PROXY"
  export NO_PROXY=localhost,127.0.0.1,::1 NODE_USE_ENV_PROXY=1
  export http_proxy="$SANDBOX_PROXY" https_proxy="$SANDBOX_PROXY" no_proxy="$NO_PROXY"
  export NODE_OPTIONS="$NODE_OPTIONS --disable-warning=UNDICI-EHPA"
}
# SANDBOX_SCRIPT is `job` where the command itself is that script. Two setsid detach it: the second
# one leads a process group and therefore forks. `&` would make the script ignore SIGINT.
if [ "$SANDBOX_SCRIPT" = job ]; then
  [ "$SANDBOX_SETSID" ] ||
    { echo 'another command has started it: see /tmp/autostart.log'; exit 0; }
elif [ "$SANDBOX_SETSID" ] && [ "$SANDBOX_SCRIPT" ]; then
  SANDBOX_EXEC=autostart "$SANDBOX_SETSID" "$SANDBOX_SETSID" sh -c "$SANDBOX_SCRIPT" \
    </dev/null >/tmp/autostart.log 2>&1
fi
trap - HUP INT TERM
[ -z "$SANDBOX_STOP" ] || exit 130
# Note that the command begins: see has_begun(). On a full disk the notes are emptied: then nobody
# can claim that a command has not begun.
{ echo "$SANDBOX_EXEC" >>/run/sandbox-began || true >/run/sandbox-began; } 2>/dev/null
[ -z "$SANDBOX_HOLD" ] || unset SANDBOX_EXEC  # it marks what is held, and not the holder
exec "$@"
