_sandbox() {
  local IFS=$'\n'
  local found=$(sandbox __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  COMPREPLY=($(compgen -W "$found" -- "${COMP_WORDS[COMP_CWORD]}"))
  [[ "${COMPREPLY[0]}" != *: ]] || compopt -o nospace 2>/dev/null  # a path follows
}
complete -o default -F _sandbox sandbox
