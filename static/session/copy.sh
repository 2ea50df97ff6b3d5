# Runs as root in a container of its own: fills the copy of a session, which is /run/sandbox-work,
# with what is at /run/sandbox-from, or $FROM. $1 is the name of the linked worktree that this is,
# or empty; its repository is at /run/sandbox-git, or $GIT. Then come the arguments of
# mounts_are().
worktree=$1 to=/run/sandbox-work from=${FROM:-/run/sandbox-from} git=${GIT:-/run/sandbox-git}
shift
[ $# = 0 ] || mounts_are "$@" || exit 97
for program in python3 git; do
  command -v $program >/dev/null || { echo "a copy needs an image with $program"; exit 1; }
done
# What cannot be read, a device, and what goes meanwhile is said and left out.
copy() {
  said=$(LC_ALL=C cp -a "$1/." "$2" 2>&1)
  status=$?
  [ $status != 0 ] || return 0
  echo "$said" | sed "s|^cp: |not copied: |; s|$1/\./||g; s|$2/\./||g" | head -n 5
  [ $status = 1 ] || exit 1
  for end in 'No space left on device' 'Disk quota exceeded' 'Input/output error' \
    'Read-only file system'; do ! echo "$said" | grep -q ": $end\$" || exit 1; done
}
copy $from $to
# A commit in the copy must not write in the repository of the person, so it gets one of its own.
if [ -n "$worktree" ]; then
  rm -rf $to/.git
  mkdir $to/.git
  copy $git $to/.git
  rm -f $to/.git/config.worktree
  copy "$git/worktrees/$worktree" $to/.git
  rm -rf $to/.git/worktrees $to/.git/commondir $to/.git/gitdir $to/.git/locked
  for key in core.bare core.worktree; do git config -f $to/.git/config --unset-all $key; done
fi
:
