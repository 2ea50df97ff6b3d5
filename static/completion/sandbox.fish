function __sandbox_complete
  set -l words (commandline -opc) (commandline -ct)
  set -l found (sandbox __complete $words[2..-1] 2>/dev/null)
  if test -n "$found"
    printf '%s\n' $found
  else
    __fish_complete_path (commandline -ct)
  end
end
complete -c sandbox -f -a '(__sandbox_complete)'
