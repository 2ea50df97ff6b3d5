# Prints the id, the tag and the command line of each process that a command has started.
for environ in $(grep -ls SANDBOX_EXEC= /proc/[0-9]*/environ); do
  pid=${environ#/proc/} tag=$(tr '\0' '\n' <"$environ" | sed -n 's/^SANDBOX_EXEC=//p')
  [ -z "$tag" ] ||
    echo "${pid%/*} $tag $(tr '\0\n' '  ' <"${environ%environ}cmdline" | cut -c 1-200)"
done 2>/dev/null
