# Runs as root when the container starts: gives the numeric user $1:$2 a name and a home, then
# idles. $3 is the volume that the home is, or empty. What follows are the arguments of mounts_are()
# for the first start: devices may have other numbers later.
# What else is mounted into the home is the host's: it is neither filled nor given to anybody.
if [ $# -gt 3 ] && [ ! -e /run/sandbox-ready ]; then
  (shift 3 && mounts_are "$@") || exit 3
fi
mkdir -p "$HOME" /run/sandbox
chown -h "$1:$2" /run/sandbox  # of what runs on terminals: see hold.py
rm -f /run/sandbox-ready
# Every command notes here that it began; the notes of an earlier start stay.
[ -e /run/sandbox-began ] || { echo sandbox >/run/sandbox-began; chmod 666 /run/sandbox-began; }
grep -q "^[^:]*:[^:]*:$1:" /etc/passwd ||
  echo "agent:*:$1:$2::$HOME:$(command -v bash || echo /bin/sh)" >>/etc/passwd
grep -q "^[^:]*:[^:]*:$2:" /etc/group || echo "agent:x:$2:" >>/etc/group
# The mounts below the home as patterns of find. They may be on its device: -xdev is not enough.
mounts() {
  sed -n "s|^[^ ]* $HOME\(/[^ ]*\) .*|\1|p" /proc/mounts |
    sed 's/\\134/&&/g; s/[][*?]/\\&/g; s/\\\([0-7]\{3\}\)/\\0\1/g'
}
give() {
  owner=$1:$2
  set -- -path ''
  while IFS= read -r path; do
    [ -z "$path" ] || set -- "$@" -o -path "$HOME$(printf %b "$path")"
  done <<END
$(mounts)
END
  find "$HOME" -xdev \( "$@" \) -prune -o -user 0 -exec chown -h "$owner" {} +
}
if [ "$3" ] || ! grep -qF " $HOME " /proc/mounts; then
  [ -d /etc/skel ] && cp -Rn /etc/skel/. "$HOME"/ 2>/dev/null
  [ "$1" = 0 ] || give "$1" "$2"
fi
# Where git looks for the repository of a linked worktree is a directory of our own, with links to
# what is mounted of it, most of it read-only. For git locks packed-refs, beside it, whenever it
# removes a file such as AUTO_MERGE, after each commit. It follows five links to find out where, so
# the sixth leads to the file itself; and what it would put in its place it cannot write. The logs
# are copied: git outside writes to its own through links, which could be planted there.
if [ -n "$SANDBOX_GIT" ] && [ ! -L "$SANDBOX_GIT/packed-refs" ]; then
  mkdir "$SANDBOX_GIT/packed-refs.5.new"
  for path in /run/sandbox-git/* /run/sandbox-git/worktrees/* /run/sandbox-git/config.worktree \
    /run/sandbox-git/hooks /run/sandbox-git/info /run/sandbox-git/modules /run/sandbox-git/shallow
  do
    name=${path#/run/sandbox-git/}
    case $name in logs | packed-refs | *.lock | gc.*) continue ;; esac
    [ -e "$SANDBOX_GIT/$name" ] || ln -sf "$path" "$SANDBOX_GIT/$name"
  done
  ln -s /run/sandbox-git/packed-refs "$SANDBOX_GIT/packed-refs.5"
  for n in 4 3 2 1; do ln -s packed-refs.$((n+1)) "$SANDBOX_GIT/packed-refs.$n"; done
  mkdir "$SANDBOX_GIT/logs"
  cp -R /run/sandbox-git/logs/. "$SANDBOX_GIT/logs" 2>/dev/null
  chown "$1:$2" "$SANDBOX_GIT"
  chown -hR "$1:$2" "$SANDBOX_GIT/logs"
  ! command -v git >/dev/null || git config --system gc.auto 0
  ln -s packed-refs.1 "$SANDBOX_GIT/packed-refs"
fi
gate() {
  programs=/usr/local/lib/sandbox
  [ -f "$programs/$1.py" ] || {
    echo "sandbox: this image has no $programs/$1.py: build it again (sandbox build)" >&2
    exit 1
  }
  SANDBOX_NET_SOCKET=$1.sock SANDBOX_NET_PORT=$2 python3 -I -S $programs/proxy.py gate || exit 1
}
# With hidden keys the agents' way to their models is the broker.
broker=
[ -z "$SANDBOX_KEYS" ] || { gate broker 3129 & broker=$!; }
# With an allowlist the way out is a proxy: sudo, cron and login shells do not pass the variables
# that name it.
if [ -n "$SANDBOX_PROXY" ]; then
  gate proxy 3128
  [ ! -d /etc/apt/apt.conf.d ] ||
    echo "Acquire { http::Proxy \"$SANDBOX_PROXY\"; https::Proxy \"$SANDBOX_PROXY\"; };" \
      >/etc/apt/apt.conf.d/99sandbox
  ! command -v git >/dev/null || git config --system http.proxy "$SANDBOX_PROXY"
  printf '[global]\nproxy = %s\n' "$SANDBOX_PROXY" >/etc/pip.conf
  [ ! -d /opt/node/lib/node_modules/npm ] ||
    printf 'proxy=%s\nhttps-proxy=%s\n' "$SANDBOX_PROXY" "$SANDBOX_PROXY" \
      >/opt/node/lib/node_modules/npm/npmrc
fi
[ -z "$broker" ] || wait "$broker" || exit 1
: >/run/sandbox-ready
exec sleep infinity
