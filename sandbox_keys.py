"""Hidden keys: what runs in a session sees placeholders, and its broker, static/image/broker.py in
the companion container, has the keys.

They go there over the stdin of an exec, into memory, before each run or job: in no file, argv,
environment or volume. Which variables are keys, of which provider, and where that is, is said in
static/providers.json: for a provider with a `variable` that holds the URL which was configured or
is the broker's, and for the `config` of one agent the ids that it knows the provider by, with what
it expects behind the base URL. The `env` of a provider is for its own URL alone.

It counts what they use, by day and model, and holds their budget: see static/image/usage.py.

Imported only where a session with hidden keys is used.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import sandbox
from sandbox import LONG_SECONDS, PIPE_BYTES, Output, SandboxError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from sandbox import Config, Engine, Session

URL = "http://127.0.0.1:3129"
ANSWER_BYTES = 4 << 20
TURN_SECONDS = 60  # that a prompt waits for its checkpoint, where somebody makes that


def table() -> dict[str, Any]:
    data: dict[str, Any] = sandbox.parse_json(sandbox.asset("providers.json"))
    return data


# --- Placeholders ---


def hide(env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """The variables with placeholders for keys, and the providers of them as the broker wants them.

    Raises SandboxError for what cannot be hidden.
    """
    data, hidden, providers = table(), dict(env), dict[str, Any]()
    urls: dict[str, str] = {}
    config = Settings(data["config"], env.get(data["config"], ""))
    for name, row in data["providers"].items():
        given = {variable: env[variable] for variable in row["keys"] if variable in env}
        for variable, key in given.items():
            check_key(variable, key)
        if not given:
            continue
        keys = {row["keys"][variable]: key for variable, key in given.items()}
        hidden.update((variable, row["keys"][variable]) for variable in given)
        variable = row.get("variable", "")
        url = checked_url(variable, env.get(variable, "")) or row["url"]
        fixed = {"keys": keys, **{field: row[field] for field in ("status", "counted", "free")}}
        providers[name] = {"url": url, **fixed}
        if variable:
            hidden[variable] = f"{URL}/{name}"
        if url == row["url"]:
            hidden = {**row.get("env", {}), **hidden}
        for id, end in row.get("config", {}).items():
            own = config.url(id, end)
            if own:
                providers[f"own-{id}"] = {"url": own, **fixed}
            urls[id] = f"{URL}/{f'own-{id}' if own else name}{end}"
    if urls:
        hidden[data["config"]] = config.with_urls(urls)
    if env.keys() & {*sandbox.PROXY_VARIABLES}:  # none is on the way to the broker
        hidden |= {name: ",".join(filter(None, [env.get(name), "127.0.0.1"]))
                   for name in ("NO_PROXY", "no_proxy")}
    return hidden, providers


def check_key(variable: str, key: str) -> None:
    if not re.fullmatch("[!-~]+", key):
        what = "has other than printable ASCII" if key else "is empty"
        raise SandboxError(f"{variable} is to be hidden, and {what}",
                           "correct it, take it away, or say --keys visible", 125)


def checked_url(variable: str, url: str) -> str:
    """The base URL that a variable holds, '' for none."""
    if url and not re.fullmatch(r"https?://[^/?#@\\\s]+(/[^?#\\\s]*)?", url):
        raise SandboxError(f"{variable} is no http(s)://host[:port][/path], and its key is to be "
                           "hidden", "correct it, or say --keys visible", 125)
    return url


class Settings:
    """What the variable of an agent's settings holds, a JSON object."""

    def __init__(self, variable: str, text: str) -> None:
        self.variable = variable
        try:
            self.data = sandbox.parse_json(text or "{}")
        except ValueError:
            self.data = None

    def options(self, id: str) -> dict[str, Any]:
        """The options of a provider, to change them. Raises SandboxError."""
        place: Any = self.data
        for name in ("provider", id, "options"):
            place = place.setdefault(name, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise SandboxError(f"{self.variable} is no JSON object of such settings, and the URL "
                               "of the broker has to be put there", "correct it", 125)
        return place

    def url(self, id: str, end: str) -> str:
        """The base URL that it configures for a provider, without its end; '' for none."""
        url = self.options(id).get("baseURL")
        if not isinstance(url, str):
            return ""
        if not url.rstrip("/").endswith(end):
            raise SandboxError(f"{self.variable}: the baseURL of {id} does not end with {end}",
                               "correct it, or say --keys visible", 125)
        return checked_url(self.variable, url.rstrip("/").removesuffix(end))

    def with_urls(self, urls: Mapping[str, str]) -> str:
        for id, url in urls.items():
            self.options(id)["baseURL"] = url
        return sandbox.to_json(self.data)


def given_env(config: Config) -> dict[str, str]:
    return {variable: value for variable, (value, _) in config.env().items()}


def names(config: Config) -> list[str]:
    """The variables of a configuration that are keys."""
    known = {variable for row in table()["providers"].values() for variable in row["keys"]}
    return [variable for variable in given_env(config) if variable in known]


def say_visible(name: str, config: Config, spec: Mapping[str, Any]) -> None:
    """Say which secrets stay visible, and why."""
    known, settings = names(config), table()["config"]
    left = [variable for variable, value in given_env(config).items()
            if variable not in known and sandbox.is_secret(variable, value)
            and (variable != settings or "apiKey" in value)]
    if left:
        sandbox.say(f"what runs in {name} sees {', '.join(left)}: of no provider that can be "
                    "hidden")
    files = {file.partition(":")[0] for agent in sandbox.AGENTS.values() for file in agent.files
             if not file.endswith(":ro")}
    if mounted := [target for target in sandbox.mount_targets(spec)
                   if sandbox.within(target, sandbox.CONTAINER_HOME) in files]:
        sandbox.say(f"what runs in {name} sees {', '.join(mounted)}: only keys in variables are "
                    "hidden")


# --- The broker ---


def give(engine: Engine, session: Session, config: Config, start: bool) -> bool:
    """Give the broker its keys. Where it is down it is started, or this is False."""
    request = {"do": "set", "session": session.name, "providers": hide(given_env(config))[1],
               "prices": table()["prices"]["models"], "budget": config.get("budget") or {},
               "turns": TURN_SECONDS,
               "ca": sandbox.host_ca_bundle().decode("ascii", "ignore")}
    try:
        ask(engine, session, request)
    except Down:
        if not start:
            return False
        sandbox.start_proxy(engine, session)
        ask(engine, session, request)
        sandbox.wait_for_gate(engine, session, sandbox.BROKER_PORT)
    return True


class Down(SandboxError):
    """The broker does not run."""


def ask_argv(engine: Engine, session: Session) -> list[str]:
    """The engine call whose stdin and stdout are the broker's control."""
    source = sandbox.asset("session/ask.py").decode().split('"""', 2)[2]
    return engine.exec_argv(session.proxy, [*sandbox.BROKER_PROGRAM[:3], "-c", source,
                                            f"{sandbox.KEPT_DIRECTORY}/broker.sock"], stdin=True)


def ask(engine: Engine, session: Session, request: Mapping[str, Any]) -> dict[str, Any]:
    """The broker's answer. Raises SandboxError, Down where there is none."""
    text = sandbox.to_json(request).encode() + b"\n"
    asked = Output(ask_argv(engine, session), LONG_SECONDS, stdin=text)
    status, out, err = asked.result(ANSWER_BYTES)
    try:
        answer = sandbox.parse_json(out)
    except ValueError:
        answer = None
    if status or not isinstance(answer, dict):
        raise down(engine, session, err)
    if answer.get("ok") is not True:
        reason = sandbox.one_line(str(answer.get("error", "")))[:1000]
        raise SandboxError(f"the broker of {session.name} takes no keys: {reason}",
                           f"see: sandbox net log {session.name}", 125)
    return answer


def down(engine: Engine, session: Session, err: str) -> Down:
    _, out, log = Output(engine.logs_argv(session.proxy, tail=3)).result(ANSWER_BYTES)
    if re.search("broker.py.*No such file", err + out + log):
        image = session.created()[0]["image"]
        return Down(f"the image {image} is too old to hide keys",
                    f"sandbox build, then sandbox recreate {session.name}; or --keys visible", 125)
    failure = engine.failure("\n".join(err.strip().splitlines()[-1:]))
    return Down(failure.message, failure.hint, 125)


# --- Prompts ---


def watch_prompts(engine: Engine, session: Session, checkpoint: Callable[[str], str],
                  wait: Sequence[str]) -> bool:
    """Make a checkpoint before each prompt of an agent on a terminal: `checkpoint` is called with
    the provider's name, and gives why there is none. It goes on until our stdin ends, and then as
    long as the call `wait` runs; True as soon as stdin brings a word.
    """
    import select

    (theirs, to), (answers, end) = os.pipe(), os.pipe()
    pid = sandbox.spawn(ask_argv(engine, session), fds={0: theirs, 1: end}, own_group=True)
    Output.close(theirs, end)
    poller, rest, waiter = select.poll(), b"", -1
    for fd in (0, answers):
        poller.register(fd, select.POLLIN)
    try:
        tell(to, {"do": "watch"})
        while True:
            for fd, _ in poller.poll():
                data = os.read(fd, PIPE_BYTES)
                if fd == answers and data:
                    *lines, rest = (rest + data).split(b"\n")
                    for entry in filter(None, map(sandbox.decision_of, lines)):
                        if id := entry.get("turn"):
                            error = checkpoint(sandbox.one_line(str(entry.get("provider")))[:40])
                            tell(to, {"do": "turn", "id": str(id)[:100], "error": error[:400]})
                elif fd == answers:  # the broker has gone
                    poller.unregister(fd)
                elif fd == waiter or data:
                    return fd == 0
                else:  # what it is about goes on without who has started it
                    waiter, out = os.pipe()
                    sandbox.spawn(wait, fds={1: out})
                    os.close(out)
                    poller.unregister(fd)
                    poller.register(waiter, select.POLLIN)
    finally:
        os.close(to)
        sandbox.wait_for(pid)


def tell(to: int, line: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the broker has gone
        os.write(to, sandbox.to_json(line).encode() + b"\n")


# --- What was used ---

AT_ONCE = 8  # calls of the engine
COUNTS = ("requests", "input", "output", "cached", "written", "written_long")


def ask_counts(engine: Engine, session: Session) -> Output:
    """The question for the file of counts, begun. Without one nothing was used yet."""
    return Output(engine.copy_argv(session.proxy, f"{sandbox.KEPT_DIRECTORY}/counts.json"),
                  sandbox.kept_seconds(engine, session))


def read_counts(text: str) -> Any:
    """The file of counts in a tar archive, whose header has no brace. Raises ValueError."""
    return sandbox.parse_json(text[text.index("{"):text.rindex("}") + 1])


def days_of(data: Any) -> dict[str, Any]:
    """What was used, {day: {"seconds", "models": {model: {COUNTS, "usd" or None}}}}. Raises
    ValueError.
    """
    try:
        return {sandbox.one_line(day)[:10]: {
                    "seconds": float(an_amount(row["seconds"])),
                    "models": {sandbox.one_line(model)[:100]: counts_of(counts)
                               for model, counts in row["models"].items()}}
                for day, row in data["days"].items()}
    except (LookupError, TypeError, AttributeError, OverflowError):
        raise ValueError("these are no counts") from None


def counts_of(row: Any) -> dict[str, Any]:
    *counts, usd = row
    return {**dict(zip(COUNTS, (int(an_amount(count)) for count in counts), strict=True)),
            "usd": None if usd is None else float(an_amount(usd))}


def an_amount(value: Any) -> Any:
    """What can be counted with, and sums of it, too. Raises ValueError."""
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise ValueError("this is no amount")
    return value


def spent_of(days: Mapping[str, Any], per: str) -> dict[str, float]:
    """What counts for a budget: see Ledger.spent() of static/image/usage.py."""
    today = max([time.strftime("%Y-%m-%d", time.gmtime()), *days])
    counted = [row for day, row in days.items() if per != "day" or day == today]
    models = [model for row in counted for model in row["models"].values()]
    kinds = [name for name in COUNTS if name not in ("requests", "cached")]
    return {"usd": sum(model["usd"] or 0.0 for model in models),
            "tokens": sum(model[kind] for model in models for kind in kinds),
            "minutes": sum(row["seconds"] for row in counted) / 60}


def used(sessions: Sequence[tuple[Engine, Session]]) -> list[dict[str, Any]]:
    """What sessions have used, each with its budget, and what of that is spent and left; with an
    `error` instead where the counts cannot be read. Some are asked at once.
    """
    entries: list[dict[str, Any]] = []
    for some in (sessions[at:at + AT_ONCE] for at in range(0, len(sessions), AT_ONCE)):
        asked = [ask_counts(engine, session) for engine, session in some]
        entries += [use_of(session, counts) for (_, session), counts in
                    zip(some, asked, strict=True)]
    return entries


def use_of(session: Session, asked: Output) -> dict[str, Any]:
    try:
        status, out, _ = asked.result(ANSWER_BYTES)
        days = {} if status else days_of(read_counts(out))
        budget = sandbox.session_config(session).get("budget") or {}
    except ValueError:
        error = f"the counts of {session.name} cannot be read; sandbox recreate begins anew"
        return {"name": session.name, "error": error}
    except SandboxError as failure:
        return {"name": session.name, "error": failure.message}
    spent = spent_of(days, budget.get("per", "session"))
    unpriced = {model for row in days.values() for model, counts in row["models"].items()
                if counts["usd"] is None}
    return {"name": session.name, "budget": budget, "spent": spent,
            "left": {name: max(budget[name] - spent[name], 0)
                     for name in sandbox.AMOUNTS if name in budget},
            "days": days, "unpriced": sorted(unpriced)}


def used_by(engine: Engine, session: Session) -> dict[str, Any]:
    """What one session has used. Raises SandboxError."""
    (entry,) = used([(engine, session)])
    if error := entry.get("error"):
        raise SandboxError(error)
    return entry


def take_counts(engine: Engine, old: Session, new: Session) -> None:
    """Let a session go on from what the one has counted whose place it takes. Raises
    SandboxError.
    """
    status, out, err = ask_counts(engine, old).result(ANSWER_BYTES)
    if status and engine.host and not (engine.is_absent(err) or "o such file" in err
                                       or "ould not find" in err):
        raise engine.failure(err)
    if not status:
        try:
            days_of(data := read_counts(out))
        except ValueError:
            sandbox.say(f"the counts of {new.name} could not be read, and begin anew")
        else:
            ask(engine, new, {"do": "set", "days": data["days"]})


def state_of(engine: Engine, session: Session) -> str:
    """Of a broker: `ready`, `empty` where it waits for its keys, or `down`."""
    if session.state == "running":
        with suppress(Down):
            return "ready" if ask(engine, session, {"do": "usage"})["providers"] else "empty"
    return "down"


def hidden_sessions(config: Config, aside: dict[str, Any] | None = None,
                    ) -> tuple[list[tuple[Engine, Session]], dict[str, str]]:
    """See sandbox.list_everywhere()."""
    def hidden(engine: Engine, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Engine, Session]]:
        found = [known_session(engine, row) for row in rows if not sandbox.is_proxy(row)]
        return [(engine, one) for one in sorted(found, key=lambda one: one.name) if one.hides_keys]

    return sandbox.list_everywhere(config, hidden, aside)


def cmd_usage(args: argparse.Namespace) -> int:
    config, lost = sandbox.config_of(args), dict[str, str]()
    if args.any:
        engine, session = sandbox.find_given(sandbox.candidates(config), args.any, "usage")
        check_hidden(session)
        sessions = [(engine, session)]
    else:
        sessions, lost = hidden_sessions(config)
    entries = used(sessions)
    failed = [*lost.values(), *(entry["error"] for entry in entries if "error" in entry)]
    for error in failed:
        sandbox.report(SandboxError(error))
    entries = [entry for entry in entries if "error" not in entry]
    if args.json:
        print(sandbox.to_json(entries, indent=2))
    else:
        print_usage(entries)
    return 1 if failed else 0


def known_session(engine: Engine, row: Mapping[str, Any]) -> Session:
    """A session as a list has it; as we last saw it, where that is the same one."""
    known = sandbox.recall([engine], row["name"])
    if known and known[1].proxy == f"sandbox-proxy-{row['labels']['sandbox.session']}":
        return known[1]
    return sandbox.Session(row["name"], row["state"], row["labels"])


def print_usage(entries: Sequence[Mapping[str, Any]]) -> None:
    rows = [{"name": entry["name"], "day": day, "model": model, **counts,
             "usd": "" if counts["usd"] is None else f"{counts['usd']:.4f}"}
            for entry in entries for day, row in sorted(entry["days"].items())
            for model, counts in row["models"].items()]
    sandbox.print_columns(("name", "day", "model", *COUNTS, "usd"), rows)
    prices = table()["prices"]
    if unknown := sorted({model for entry in entries for model in entry["unpriced"]}):
        sandbox.say(f"no price is known of {', '.join(unknown)}; the prices are of "
                    f"{prices['date']}")
    for entry in entries:
        if entry["budget"]:
            sandbox.say(f"{entry['name']}: {said(entry)}")


def said(entry: Mapping[str, Any]) -> str:
    """What of a budget is spent, in words."""
    budget = entry["budget"]
    per = " of this day" if budget.get("per") == "day" else ""
    return "; ".join(f"{entry['spent'][name]:.2f} of {budget[name]:g} {name}{per} are spent"
                     for name in sandbox.AMOUNTS if name in budget) or "no budget"


def check_hidden(session: Session) -> None:
    if not session.hides_keys:
        raise SandboxError(f"the keys of {session.name} are visible: nothing counts what it uses",
                           f"sandbox recreate {session.name} --keys hidden")


def cmd_budget(args: argparse.Namespace) -> int:
    engine, session = sandbox.find_given(sandbox.engines_of(args), args.session, "budget")
    check_hidden(session)
    if args.amount is not None:
        change_budget(engine, session, args.amount)
    print(said(used_by(engine, session)))
    return 0


def change_budget(engine: Engine, session: Session, amounts: Any) -> None:
    """Put amounts in force, at once and for good; those that are not named stay, '' is none."""
    given = sandbox.Layer({"budget": amounts}, "check", code=2, places={"budget": "budget"})
    with sandbox.lock_settings(session.name):
        settings = sandbox.read_settings(session.name)
        had = sandbox.session_config(session, settings).get("budget") or {}
        budget = {**had, **given.values["budget"]} if amounts else {}
        sandbox.write_settings(session.name, settings | {"budget": budget})
        if session.state == "running":
            try:
                ask(engine, session, {"do": "set", "budget": budget})
            except Down as error:
                sandbox.say(f"it is in force with the next run: {error.message}")
