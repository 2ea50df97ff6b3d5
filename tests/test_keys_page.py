"""Hidden keys, budgets and what was used, in a real Chromium, with a real agent through the broker.

The vendors are those of test_keys.py. What the pages see is the same on all engines.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from browser import DESKTOP, PHONE, Browser, Page
from conftest import Engine
from fuzz import NASTY, written
from service import Service, wait_for
from test_agents import START_SECONDS, image
from test_broker import Ca, ca
from test_browser import moved_by_what_is_late, open_screen, show_decisions, submit, watched
from test_changes_page import CONTRAST
from test_keys import REAL, Hidden

import sandbox_keys

__all__ = ["ca", "image"]  # fixtures

pytestmark = pytest.mark.parametrize("engine", ["docker"], indirect=True, scope="session")

MODEL = "claude-sonnet-4-5"
PROMPT = "claude --dangerously-skip-permissions -p {prompt}"
IN_SETTINGS = "gsk-of-the-settings"
COUNTS = "/var/lib/sandbox-net/counts.json"


@pytest.fixture(scope="module")
def hidden(engine: Engine, image: str, ca: Ca) -> Iterator[Hidden]:
    hidden = Hidden(engine, ca, image=image, agentPromptCommand=PROMPT,
                    env={"ANTHROPIC_MODEL": MODEL, "ANTHROPIC_SMALL_FAST_MODEL": MODEL})
    yield hidden
    hidden.end()


@pytest.fixture
def service(hidden: Hidden) -> Iterator[Service]:
    before, hidden.engine.home = hidden.engine.home, hidden.home
    service = Service(hidden.engine, env=hidden.where["env"])
    yield service
    service.end()
    hidden.engine.home = before


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[Page]:
    with watched(browser, service) as page:
        yield page
        page.resize(DESKTOP)
        html = page.eval("document.documentElement.innerHTML")
        assert not [key for key in (*REAL.values(), IN_SETTINGS) if key in html]


def label(text: str) -> str:
    """A field of the settings by its label."""
    return (f"document.getElementById([...document.querySelectorAll('.settings label')]"
            f".find((label) => label.textContent === {json.dumps(text)}).htmlFor)")


def set_budget(page: Page, **amounts: str) -> None:
    for name, amount in amounts.items():
        page.eval(f"{label(name)}.focus()")
        page.eval(f"{label(name)}.select()")
        page.type(amount)
    page.press("Enter")


def ask(page: Page, prompt: str, answer: str = "") -> None:
    submit(page, prompt)
    page.see(prompt, ".turn:last-child .ask")
    page.see(answer or f"pong {prompt}", ".turn:last-child", START_SECONDS)
    page.see("Ask again", ".turn:last-child .job-foot")


def test_keys_are_named_what_they_cost_is_shown_and_a_budget_holds(
    page: Page, service: Service, hidden: Hidden
) -> None:
    name = hidden.name
    given = {"env": {"GROQ_API_KEY": IN_SETTINGS, "PLAIN": "1"}}
    assert service.post(f"/api/sessions/{name}/settings", given, "PUT").status == 200
    open_screen(page, service, name, "settings")
    page.see("The broker has them", ".broker")
    names = page.eval("[...document.querySelectorAll('.keys li')].map((key) => key.textContent)")
    assert {*names} == {*REAL, "GROQ_API_KEY"}
    page.see("There is no budget", ".settings")
    page.fill(".env-row:nth-child(2) textarea", "2")
    page.click(".settings button[type=submit]")
    page.told("Settings saved")
    stored = json.loads((hidden.home / "sessions" / f"{name}.json").read_text())
    assert stored["env"] == {"GROQ_API_KEY": IN_SETTINGS, "PLAIN": "2"}

    open_screen(page, service, name, "agent")
    ask(page, "say it")
    page.see("tokens · $0.0", ".session-head .who a")
    page.click(".session-head .who a")
    page.see("tokens · $0.0", ".usage-facts")
    assert hidden.ask().stdout.startswith("200 ")  # of a model without a price
    page.click(".usage .row.end button")
    page.see("at least $0.0", ".usage-facts")
    page.see("No price is known of stub: only its tokens are counted", ".usage-facts")
    page.see("stub", ".legend")
    page.goto(f"http://{service.address}/preview")
    page.see("at least $0.0", f".tile:has([href*='{name}']) .used")
    page.click(f".tile:has([href*='{name}']) .used")
    page.see("stub", ".legend")

    open_screen(page, service, name, "settings")
    page.see("There is no budget", ".settings")
    set_budget(page, Tokens="1")
    page.see("0 of 1 tokens left: requests are refused", ".budget")
    page.click(".tabs a")
    ask(page, "say more", "402 sandbox: the budget is spent: 4.00 of 1 tokens.")
    page.see("exit 1", ".turn:last-child .job-foot")
    page.click(".tabs [href$=network]")
    page.see("the budget is spent", ".decision.denied")
    assert page.eval("document.querySelectorAll('.decision button:not([hidden])').length") == 0
    page.click(".decision a")
    page.see("0 of 1 tokens left", ".budget")
    set_budget(page, Tokens="1000000", Dollars="5")
    page.see("of 1,000,000 tokens left", ".budget")
    page.see("of $5.00 left", ".budget")
    page.click(".tabs a")
    ask(page, "go on")

    assert hidden.engine.run("restart", "-t", "1", hidden.proxy).returncode == 0
    hidden.engine.remove({hidden.vendors})
    hidden.start_vendors()
    open_screen(page, service, name, "settings")
    page.see("The broker has none", ".broker")
    set_budget(page, Tokens="-1")
    page.see("is not such as", ".settings .problem")
    page.errors.clear()  # the 400 that was asked for


def test_what_is_told_of_keys_late_moves_nothing(page: Page, service: Service,
                                                 hidden: Hidden) -> None:
    path, session = f"s/{hidden.name}/settings", f"/api/sessions/{hidden.name}"
    for part in (f"{session}/usage", session):
        assert moved_by_what_is_late(page, service, path, part, ".broker") == [], part


def put_counts(hidden: Hidden, days: Any) -> None:
    """Have a broker's counts say this, which a companion could, too."""
    file = hidden.directory / "counts.json"
    file.write_text(json.dumps({"days": days}))
    put = hidden.engine.run("cp", str(file), f"{hidden.proxy}:{COUNTS}")
    assert put.returncode == 0, put.stderr


NOW = time.time()  # a midnight may come between what is written and what is asked for


def day(ago: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(NOW - 86_400 * ago))


DAYS: dict[str, Any] = {day(ago): {"seconds": 60.0, "models": {
    MODEL: [3, 40_000 - 900 * ago, 2000 * (ago % 4), 9000, 0, 0, 1.25 - ago / 40],
    "gpt-5.3-codex": [1, 9000 * (ago % 3), 500, 0, 0, 0, 0.3 * (ago % 3)],
    **({"<b>unknown</b>": [1, 20_000, 7, 0, 0, 0, None]} if ago == 2 else {})}}
    for ago in range(20)}


def test_the_chart_is_a_table_for_who_cannot_see_it(page: Page, service: Service,
                                                    hidden: Hidden) -> None:
    put_counts(hidden, DAYS)
    page.goto(f"http://{service.address}/#/s/{hidden.name}/usage")
    page.see("at most $1.", ".plot")
    models = [model for row in DAYS.values() for model in row["models"].values()]
    bars = len([model for model in models if model[-1]])
    assert page.eval("document.querySelectorAll('.plot rect').length") == bars
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    (table,) = [node for node in nodes if node.get("role", {}).get("value") == "table"]
    assert table["name"]["value"] == "What was used by day and model"
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    assert roles.count("row") == 1 + len(models) and roles.count("rowheader") == len(models)
    assert "image" not in roles
    page.eval("document.querySelector('.usage-chart button').focus()")
    order = []
    for _ in range(2):
        page.press("Tab")
        order.append(page.eval("document.activeElement.textContent"))
    assert order == ["Tokens", "As a table"]
    page.press("Enter")
    page.see(day(19), ".usage-table")
    rows = page.eval("[...document.querySelectorAll('.usage-table tr')].map((row) => "
                     "[...row.children].map((cell) => cell.textContent))")
    assert [row[1:] for row in rows if row[0] == day(2)] == [
        [MODEL, "42,200", "9,000", "$1.20"], ["<b>unknown</b>", "20,007", "0", "no price known"],
        ["gpt-5.3-codex", "18,500", "0", "$0.60"]]
    page.press("Enter")
    assert page.eval("document.querySelector('.usage-table').offsetWidth") == 1
    page.click(".usage-chart [role=group] button:last-child")
    page.see("Tokens by day and model", ".plot")
    assert page.eval("document.querySelectorAll('.plot rect').length") == len(models)
    # The server tells of all sessions what it has read a moment ago.
    wait_for(lambda: day(19) in service.get("/api/usage").body.decode())
    page.goto(f"http://{service.address}/#/usage")
    page.see(hidden.name, ".legend")
    rows = page.eval("[...document.querySelectorAll('.usage-table tr')].map((row) => "
                     "[...row.children].map((cell) => cell.textContent))")
    assert [day(2), hidden.name, "80,707", "9,000", "at least $1.80"] in rows
    page.click(f".copies .card [href*='{hidden.name}']")
    page.see("<b>unknown</b>", ".legend")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_can_be_read_everywhere(page: Page, service: Service, hidden: Hidden,
                                   size: tuple[int, int], dark: bool) -> None:
    put_counts(hidden, DAYS)
    budget = {"budget": {"usd": 100, "tokens": 5, "minutes": 1000}}
    assert service.post(f"/api/sessions/{hidden.name}/settings", budget, "PUT").status == 200
    page.resize(size, dark)
    for path, seen, part in ((f"s/{hidden.name}/usage", ".legend li", ".usage"),
                             ("usage", ".legend li", ".usage"),
                             (f"s/{hidden.name}/settings", ".budget li", ".settings")):
        page.call("Page.navigate", url="about:blank")
        page.goto(f"http://{service.address}/#/{path}")
        page.wait(f"document.querySelector('{seen}')")
        page.eval("document.querySelector('.usage-chart .quiet')?.click()")
        assert page.eval("document.documentElement.scrollWidth <= innerWidth"), path
        wide = ("[...document.querySelectorAll('.scroll, .page, .tabs, .usage-table')]"
                ".filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.className)")
        assert page.eval(wide) == [], path
        assert page.eval(CONTRAST.replace(".changes", part)) == [], path
        bars = ("[...document.querySelectorAll('.legend .swatch')].map((e) => "
                "getComputedStyle(e).color)")
        assert len({*page.eval(bars)}) == len(page.eval(bars))


def test_counts_that_lie_hide_nothing(page: Page, service: Service, hidden: Hidden) -> None:
    nothing: tuple[Any, ...] = ("nan", "NaN", 1e400, -1, 1e15, True, None, [], {})
    for odd in nothing:
        for row in ({"seconds": odd, "models": {}},
                    {"seconds": 1, "models": {"m": [1, 1, odd, 1, 1, 1, 1]}}):
            with pytest.raises(ValueError):
                sandbox_keys.days_of({"days": {day(0): row}})
    put_counts(hidden, {"x" * 500: DAYS[day(0)], day(0): {"seconds": 1e14, "models": {
        f"{number}{'m' * 300}": [10**14] * 6 + [1e14] for number in range(40)}}})
    page.goto(f"http://{service.address}/#/s/{hidden.name}/usage")
    page.see("others", ".legend")
    page.goto(f"http://{service.address}/preview")
    page.see("tokens", f".tile:has([href*='{hidden.name}']) .used")
    put_counts(hidden, 5)
    page.see("the counts of", f".tile:has([href*='{hidden.name}']) .used.bad")
    page.goto(f"http://{service.address}/#/usage")
    page.see(f"the counts of {hidden.name} cannot be read",
             f".copies .card:has([href*='{hidden.name}'])")


def test_values_of_odd_types_are_shown(page: Page, service: Service, hidden: Hidden) -> None:
    odd: list[Any] = [*NASTY, 5, None, "text", ["a"], {"toString": 1}, True, -1, 1e308]
    model = {"requests": 1, "input": 1, "output": 1, "cached": 1, "usd": 1}
    entry: dict[str, Any] = {"name": "n", "budget": {"usd": 1}, "left": {"usd": 0},
                             "unpriced": ["m"], "days": {day(0): {"models": {"m": model}}}}
    sessions = [*odd, *({**entry, "name": f"{key}{at}", key: value}
                        for key in entry for at, value in enumerate(odd))]
    sessions += [{**entry, "days": {day(0): {"models": {"m": {**model, key: value}}}}}
                 for key in model for value in odd]
    sessions.append({**entry, "name": "the-last-one"})
    body = json.dumps(written({"sessions": sessions, "prices": {}}))
    page.goto(f"http://{service.address}/")
    page.see(hidden.name)
    page.eval(f"""(() => {{
        const real = fetch;
        window.fetch = async (url, options) =>
            url.endsWith("/usage") ? new Response({body}) : real(url, options);
        location.hash = "#/usage";
    }})()""")
    page.see("the-last-one", ".usage")
    assert page.eval("document.querySelectorAll('.copies .card h3').length") == len(sessions)
    page.see("others", ".legend")


def test_what_a_broker_refuses_is_told_from_a_host(page: Page, service: Service) -> None:
    base = {"host": "api.anthropic.com", "port": 443, "verdict": "deny", "rule": "", "reason": "r",
            "time": "2026-11-21T00:00:00Z"}
    kinds = ("key", "path", "budget", "turn", "upstream")
    show_decisions(page, service, [
        *({**base, "host": f"{kind}.example", "kind": kind} for kind in kinds),
        {**base, "kind": "unlisted"}, {**base, "verdict": "allow", "rule": "keys"}])
    page.wait(f"document.querySelectorAll('.decision').length === {len(kinds) + 2}")
    shown = page.eval("""[...document.querySelectorAll(".decision")].map((row) => [
        row.querySelector("h3").textContent, row.querySelector(".why").textContent,
        ...[...row.querySelectorAll("button, a")].filter((e) => !e.hidden)
            .map((e) => e.textContent)])""")
    assert shown == [
        ["api.anthropic.com:443 with its key", "by the broker, which has the key"],
        ["api.anthropic.com:443", "r", "Allow"],
        *([f"{kind}.example:443 with its key", "r", *(["Budget"] if kind == "budget" else [])]
          for kind in reversed(kinds))]


def test_a_session_with_visible_keys_has_nothing_to_count(page: Page, service: Service,
                                                          name: str) -> None:
    service.create(name, **{"keys": "visible"})
    open_screen(page, service, name, "settings")
    assert not page.eval("document.querySelector('.tabs [href$=usage]').checkVisibility()")
    assert not page.eval("document.querySelector('.keys, .amounts')")
    page.goto(f"http://{service.address}/#/s/{name}/usage")
    page.see(f"the keys of {name} are visible: nothing counts", ".problem")
    wait_for(lambda: page.eval("true") and page.errors)
    page.errors.clear()  # the 409 that was asked for
