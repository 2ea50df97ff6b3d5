# Brings the commits of a session's copy, which is /run/sandbox-work, into the repository at $3 as
# the branch $1. It runs in a container of its own, as the user of the session. $2 says how:
#   0  bring them, and print how many there are, and how many more other branches, tags, stashes
#      and worktrees of the copy have
#   1  only print these numbers
#   2  print the commits as a bundle, which has them as the branch work
#   3  bring them from such a bundle on stdin: in $FOLDER on the person's machine, in no container
# After $3 come the arguments of mounts_are().
# git sees two repositories that are made here: of the copy they have the objects and one commit,
# of the person's the objects and the refs, and of neither any configuration or hook.
branch=$1 how=$2 ours=$3 theirs=/run/sandbox-work/.git
shift 3
[ $# = 0 ] || mounts_are "$@" || exit 97
export HOME="${FOLDER:=/dev/shm}" LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
export GIT_ATTR_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 GIT_ALLOW_PROTOCOL=file
cd "$FOLDER" || exit 1
make_person() {
  git init -q --bare --template= --object-format=$1 person || exit 1
  for part in objects refs; do rm -r person/$part && ln -s "$ours/$part" person; done
  for part in packed-refs shallow; do [ ! -f "$ours/$part" ] || ln -s "$ours/$part" person; done
}
bring() {
  said=$(git --git-dir=person -c transfer.fsckObjects=true -c core.hooksPath=/dev/null \
    -c gc.auto=0 -c maintenance.auto=false fetch --no-tags --no-write-fetch-head --no-auto-gc \
    $1 "refs/heads/work:refs/heads/$branch" 2>&1) && exit 0
  case $said in *'(non-fast-forward)'*) exit 98 ;; esac
  echo "$said" >&2
  exit 1
}
if [ "$how" = 3 ]; then
  command -v git >/dev/null || { echo "there is no git on this machine" >&2; exit 1; }
  head -c 4294967296 >bundle
  make_person "$(head -n 2 bundle | grep -aqx '@object-format=sha256' && echo sha256 || echo sha1)"
  bring bundle
fi
# What is read as text may be a FIFO a moment later.
text() { [ ! -f "$1" ] || timeout 10 head -c "$2" "$1"; }
tip=$(text $theirs/HEAD 1000)
case $tip in
"ref: refs/"*)
  ref=${tip#ref: }
  tip=$(text "$theirs/$ref" 100)
  [ "$tip" ] ||
    tip=$(text $theirs/packed-refs 100000000 | awk -v ref="$ref" '$2 == ref {print $1}') ;;
esac
case $tip in *[!0-9a-f]*) tip= ;; esac
if [ -d $theirs/reftable ]; then
  echo "the copy has another format than git's files of refs" >&2
  exit 1
fi
# What the refs, stashes and worktrees of a repository name.
named() {
  {
    timeout 20 grep -rhs . "$1/refs" "$1/HEAD" "$1"/worktrees/*/HEAD
    text "$1/packed-refs" 100000000 |
      while read -r id ref; do [ -e "$1/$ref" ] || echo "$id"; done # a file of its own is newer
    text "$1/logs/refs/stash" 10000000 | cut -d ' ' -f 2
  } | grep -aEx '[0-9a-f]{40}|[0-9a-f]{64}'
}
others=$(named $theirs)
[ "$tip$others" ] || { echo 0 0; exit 0; }
format=sha1
any=${tip:-${others%%[!0-9a-f]*}}
[ ${#any} = 40 ] || format=sha256
git init -q --bare --template= --object-format=$format copy || exit 1
make_person $format
echo $theirs/objects >copy/objects/info/alternates
text $theirs/shallow 1000000 | grep -Ex '[0-9a-f]{40,64}' >copy/shallow || rm copy/shallow
count() {
  GIT_ALTERNATE_OBJECT_DIRECTORIES=$theirs/objects git --git-dir=person rev-list --count "$@"
}
count=0
[ -z "$tip" ] || count=$(count "$tip" --not --all) || exit 1
more=$({ echo "$others"; named $ours | sed 's/^/^/'; } | grep . |
  count --ignore-missing --stdin --not --all $tip) || exit 1
[ "$how" = 2 ] || echo "$count $more"
[ "$count" != 0 ] && [ "$how" != 1 ] || exit 0
git --git-dir=copy update-ref refs/heads/work "$tip" || exit 1
if [ "$how" = 2 ]; then
  echo $ours/objects >>copy/objects/info/alternates
  git --git-dir=person rev-parse --not --all >known || exit 1
  git --git-dir=copy bundle create -q - refs/heads/work --stdin <known
  exit
fi
bring copy
