# Sends signal $1 to all that carries the tag $2; with $3 > 0 kills what is left after $3 seconds.
tagged() { grep -ls "SANDBOX_EXEC=$1" /proc/[0-9]*/environ | cut -d/ -f3; }
kill -"$1" $(tagged "$2") 2>/dev/null
n=$(($3*10))
while [ $n -gt 0 ] && [ -n "$(tagged "$2")" ]; do n=$((n-1)); sleep 0.1; done
[ "$3" = 0 ] || kill -KILL $(tagged "$2") 2>/dev/null
:
