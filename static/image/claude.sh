#!/bin/sh
# Claude Code asks whether it may use the key that ANTHROPIC_API_KEY holds, and recommends not to.
# Who gives a session a key wants it used. A file that is mounted is the person's and stays.
file=${CLAUDE_CONFIG_DIR:-$HOME}/.claude.json
key=$(printf %s "$ANTHROPIC_API_KEY" | tail -c 20)
if [ -n "$key" ] && [ -w "$file" ] && [ "$(stat -c %m "$file")" != "$file" ] &&
    ! grep -qF "\"$key\"" "$file"; then
    new=$(KEY=$key jq '.customApiKeyResponses.approved += [env.KEY]' "$file") &&
        printf '%s\n' "$new" > "$file"
fi
exec /opt/agents/bin/claude "$@"
