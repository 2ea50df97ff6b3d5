#!/bin/sh
# Codex takes its base URL from its configuration only, and its key from a file unless it runs headless;
# here the environment can give both. A file that holds more than a key is the person's and stays.
home=${CODEX_HOME:-$HOME/.codex}

# It has no command that lists its sessions: here `list` prints id and start, newest first.
case "$*" in list | "--dangerously-bypass-approvals-and-sandbox list")
    find "$home/sessions" -name 'rollout-*.jsonl' 2> /dev/null |
        sed -E 's/.*rollout-(.{10})T(..)-(..)-(..)-(.*)\.jsonl/\5  \1 \2:\3:\4/' | sort -rk2
    exit
    ;;
esac

[ -z "$OPENAI_BASE_URL" ] || set -- -c "openai_base_url=$OPENAI_BASE_URL" "$@"
if [ -n "$OPENAI_API_KEY" ]; then
    export CODEX_API_KEY="${CODEX_API_KEY:-$OPENAI_API_KEY}"
    if [ ! -s "$home/auth.json" ] || ! grep -qv '^{"OPENAI_API_KEY": "[^"]*"}$' "$home/auth.json"; then
        (umask 077 && mkdir -p "$home" && printf '{"OPENAI_API_KEY": "%s"}\n' "$OPENAI_API_KEY" > "$home/auth.json")
    fi
fi

# It asks whether the directory is trusted, unless its configuration says so. What the person's own
# says of it, counts.
directory=$(pwd -P | sed 's/[\\"]/\\&/g')
grep -qsF "[projects.\"$directory\"]" "$home/config.toml" ||
    set -- -c "projects={\"$directory\"={trust_level=\"trusted\"}}" "$@"
exec /opt/agents/bin/codex "$@"
