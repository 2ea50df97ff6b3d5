# Runs as root when the container starts: gives the numeric user $1:$2 a name and a home, then
# idles. What follows the two are the arguments of mounts_are() for the first start: devices may
# have other numbers later.
# What is mounted into the home is the host's: it is neither filled nor given to anybody.
if [ $# -gt 2 ] && [ ! -e /run/sandbox-ready ]; then
  (shift 2 && mounts_are "$@") || exit 3
fi
mkdir -p "$HOME" /run/sandbox
chown -h "$1:$2" /run/sandbox  # of what runs on terminals: see hold.py
rm -f /run/sandbox-ready
# Every command notes here that it began; the notes of an earlier start stay.
[ -e /run/sandbox-began ] || { echo sandbox >/run/sandbox-began; chmod 666 /run/sandbox-began; }
grep -q "^[^:]*:[^:]*:$1:" /etc/passwd ||
  echo "agent:*:$1:$2::$HOME:$(command -v bash || echo /bin/sh)" >>/etc/passwd
grep -q "^[^:]*:[^:]*:$2:" /etc/group || echo "agent:x:$2:" >>/etc/group
mounted() { grep -qF " $1 " /proc/mounts; }
if ! mounted "$HOME"; then
  [ -d /etc/skel ] && cp -Rn /etc/skel/. "$HOME"/ 2>/dev/null
  [ "$1" = 0 ] || find "$HOME" -xdev -user 0 ! -path '*[[:space:]]*' | while read -r path; do
    mounted "$path" || chown -h "$1:$2" "$path"
  done
fi
# With an allowlist the way out is a proxy: sudo, cron and login shells do not pass the variables
# that name it.
if [ -n "$SANDBOX_PROXY" ]; then
  program=/usr/local/lib/sandbox/proxy.py
  [ -f $program ] ||
    { echo "sandbox: this image has no $program: build it again (sandbox build)" >&2; exit 1; }
  python3 -I -S $program gate || exit 1
  [ ! -d /etc/apt/apt.conf.d ] ||
    echo "Acquire { http::Proxy \"$SANDBOX_PROXY\"; https::Proxy \"$SANDBOX_PROXY\"; };" \
      >/etc/apt/apt.conf.d/99sandbox
  ! command -v git >/dev/null || git config --system http.proxy "$SANDBOX_PROXY"
  printf '[global]\nproxy = %s\n' "$SANDBOX_PROXY" >/etc/pip.conf
  [ ! -d /opt/node/lib/node_modules/npm ] ||
    printf 'proxy=%s\nhttps-proxy=%s\n' "$SANDBOX_PROXY" "$SANDBOX_PROXY" \
      >/opt/node/lib/node_modules/npm/npmrc
fi
: >/run/sandbox-ready
exec sleep infinity
