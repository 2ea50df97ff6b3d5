#!/bin/sh
# Claude Code asks whether it may use the key that ANTHROPIC_API_KEY holds, and recommends not to.
# Who gives a session a key wants it used. And its home may be older than this image: what that
# brings and the home lacks is added. A file that is mounted is the person's and stays.
file=${CLAUDE_CONFIG_DIR:-$HOME}/.claude.json
if [ -w "$file" ] && [ "$(stat -c %m "$file")" != "$file" ]; then
    new=$(KEY=$(printf %s "$ANTHROPIC_API_KEY" | tail -c 20) jq -s '.[1] as $have | .[0] * $have |
        if env.KEY == "" or any(.customApiKeyResponses.approved[]?; . == env.KEY) then .
        else .customApiKeyResponses.approved += [env.KEY] end | select(. != $have)' \
        /etc/skel/.claude.json "$file") && [ -n "$new" ] && printf '%s\n' "$new" > "$file"
fi
exec /opt/agents/bin/claude "$@"
