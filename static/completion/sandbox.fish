function __sandbox_complete
  set -l words (commandline -opc) (commandline -ct)
  sandbox __complete $words[2..-1] 2>/dev/null
end
complete -c sandbox -a '(__sandbox_complete)'
