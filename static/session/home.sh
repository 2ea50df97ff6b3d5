# Runs as root in a container of its own, on the home of a session, which is /run/sandbox-home.
#   copy FOLDER           all of a folder; what goes away meanwhile is no failure
#   drop FOLDER PLACE...  what is there as this image has it in the folder or in /etc/skel, and what
#                         an engine has made at these places to mount something there
#   fill FOLDER           what this image has in the folder or in /etc/skel and is not there yet
step=$1 folder=$2 home=/run/sandbox-home
shift 2
is_there() { [ -e "$1" ] || [ -L "$1" ]; }
is_folder() { [ -d "$1" ] && [ ! -L "$1" ]; }
is_file() { [ -f "$1" ] && [ ! -L "$1" ]; }
# Not with cp -n: that of busybox leaves out all that is in a folder that is there.
fill() {
  for path in "$1"/* "$1"/.[!.]* "$1"/..?*; do
    is_there "$path" || continue
    if ! is_there "$home/$path"; then
      cp -a "$path" "$home/$path" || exit 1
    elif is_folder "$path" && is_folder "$home/$path"; then
      fill "$path"
    fi
  done
}
case $step in
copy)
  cd "$folder" || exit 0
  said=$(cp -a . $home/ 2>&1) ||
    { [ $? = 1 ] && ! echo "$said" | grep -v 'No such file or directory$'; } ;;
drop)
  for from in "$folder" /etc/skel; do
    cd "$from" 2>/dev/null || continue
    find . -type f | while IFS= read -r file; do
      ! is_file "$home/$file" || ! cmp -s "$file" "$home/$file" || rm "$home/$file"
    done
  done
  for place; do
    ! is_file "$home/$place" || [ -s "$home/$place" ] || rm "$home/$place"
    rmdir "$home/$place" 2>/dev/null
  done ;;
fill)
  for from in "$folder" /etc/skel; do
    ! cd "$from" 2>/dev/null || fill .
  done ;;
esac
