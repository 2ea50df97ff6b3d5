# mounts_are BOOT_ID [PLACE TARGET]...: whether what the engine has mounted is what was checked,
# because a path can be turned elsewhere in between. PLACE is the device and the path on it. On
# another machine, whose paths are its own, there is nothing to compare. What has been replaced or
# removed since, as a file that is written anew, is shown as deleted there.
mounts_are() {
  [ "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)" = "$1" ] || return 0
  shift
  while [ $# -gt 1 ]; do
    at=$(readlink -f "$2" | sed 's/\\/\\134/g; s/ /\\040/g')
    found=
    while read -r _ _ device root target _; do
      [ "$target" != "$at" ] || found="$device $root"
    done </proc/self/mountinfo
    if [ "${found%//deleted}" != "$1" ]; then
      echo "sandbox: what is mounted at $2 is not what was checked" >&2
      return 1
    fi
    shift 2
  done
}
