#compdef sandbox
_sandbox() {
  local -a found
  found=("${(@f)$(sandbox __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  if [[ -n "${found[1]}" ]]; then
    compadd -S '' -- "${(@M)found:#*:}"  # a path follows
    compadd -- "${(@)found:#*:}"
  else _files; fi
}
if [[ "$funcstack[1]" = _sandbox ]]; then _sandbox "$@"; else compdef _sandbox sandbox; fi
