# Runs as root when the container starts: gives the numeric user $1:$2 a name and a home, then idles.
# What is mounted into the home is the host's: it is neither filled nor given to anybody.
mkdir -p "$HOME" /run
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
: >/run/sandbox-ready
exec sleep infinity
