# Unpack what was copied: $1 is the target, $2 the name of what comes, or empty for what a folder
# holds.
if [ -z "$2" ] || [ -d "$1" ]; then mkdir -p "$1" && exec tar -C "$1" -xf -; fi
new=$(mktemp -d "$(dirname "$1")/.sandbox-XXXXXX") || exit
tar -C "$new" -xf - && mv -f "$new/$2" "$1"
status=$?
rm -rf "$new"
exit $status
