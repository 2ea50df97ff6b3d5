# Prints each of the agents $@ with its version, or with "missing": side by side, for each takes up
# to a second.
cd /tmp
for a; do { $a --version 2>/dev/null || echo missing; } | head -n 1 >version-$a & done
wait
for a; do echo "$a $(cat version-$a)"; done
