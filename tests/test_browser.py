"""The web UI in a real Chromium: what a person does, sees and must never see. It complains and
calls abroad nowhere."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from browser import DESKTOP, PHONE, Browser, Page, chromium
from conftest import IMAGE, write_config
from fuzz import AGENTS, STREAMS, TILES, TURNS, streams
from service import PASSWORD, Service, free_port, wait_for

# The pages see the service and no engine: what differs between engines is tested at the service's
# API.
pytestmark = pytest.mark.parametrize("engine", ["docker"], indirect=True, scope="session")

CONTROL, SHIFT = 2, 8
FIRST_PAGE_BYTES = 150_000
BOX = ".composer textarea:not(:disabled)"
ROWS = "[...document.querySelectorAll('.xterm-rows > div')]"
SCREENS = ("agent", "command", "terminal", "network", "settings")
WENT_AWAY = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE",
             "ERR_INCOMPLETE_CHUNKED_ENCODING",
             "WebSocket connection to")


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[Page]:
    with watched(browser, service) as page:
        yield page


@contextmanager
def watched(browser: Browser, service: Service) -> Iterator[Page]:
    """A page that is logged in, and in the end has neither complained nor asked another host."""
    page = browser.page()
    page.call("Network.clearBrowserCookies")
    log_in(page, service)
    yield page
    page.settle()
    page.close()
    ours = (f"http://{service.address}/", f"ws://{service.address}/", "data:", "about:")
    abroad = [url for url in page.requests if not url.startswith(ours)]
    assert not abroad
    assert not page.errors


def log_in(page: Page, service: Service, where: str = "/auth/login") -> None:
    page.goto(f"http://{service.address}{where}")
    fill_login(page)


def fill_login(page: Page) -> None:
    page.settle()  # before its script has come, Enter leads nowhere
    page.fill("#username", "admin")
    page.fill("#password", PASSWORD)
    page.press("Enter")
    page.wait("!location.pathname.includes('login')")
    page.settle()


def cookie_of(page: Page) -> str:
    (cookie,) = page.call("Network.getCookies")["cookies"]
    return f"{cookie['name']}={cookie['value']}"


def open_screen(page: Page, service: Service, session: str, screen: str) -> None:
    page.call("Page.navigate", url="about:blank")
    page.goto(f"http://{service.address}/#/s/{session}/{screen}")
    page.wait(f"document.querySelector('.screen[data-screen={screen}]')?.children.length > 1 || "
              f"document.querySelector('.settings, .network, .change, .blank')")


def open_terminal(page: Page, service: Service, session: str) -> None:
    open_screen(page, service, session, "terminal")
    see_in_terminal(page, "# ")  # in a rootless container too one is root
    page.wait("document.activeElement.className === 'xterm-helper-textarea'")


def submit(page: Page, text: str) -> None:
    page.click(BOX)
    page.type(text)
    page.press("Enter")


def screen_text(page: Page) -> str:
    """What can be read in the terminal."""
    return str(page.eval(f"{ROWS}.map((row) => row.textContent).join('\\n')"))


def see_in_terminal(page: Page, text: str) -> None:
    page.wait(f"{ROWS}.map((row) => row.textContent).join('').includes({json.dumps(text)})")


def enter(page: Page, line: str) -> None:
    """Type a line once the shell asks for it: busybox loses what comes earlier."""
    page.wait(f"/[#>]$/.test({ROWS}.map((row) => row.textContent).join('').trimEnd())")
    page.type(line)
    page.press("Enter")


# --- Login ---


def test_login_wrong_and_right(browser: Browser, service: Service) -> None:
    page = browser.page()
    page.call("Network.clearBrowserCookies")
    page.goto(f"http://{service.address}/")
    assert page.eval("location.pathname") == "/auth/login"
    page.fill("#username", "admin")
    page.fill("#password", "nonsense")
    page.click("button")
    page.see("Wrong user name or password", "#message")
    assert [error for error in page.errors if "401" not in error] == []
    page.fill("#password", PASSWORD)
    page.click("button")
    page.see("New session")
    assert page.eval("location.pathname") == "/"
    page.click(".side-foot button")
    page.wait("location.pathname === '/auth/login' && document.readyState === 'complete'")
    page.call("Page.navigate", url=f"http://{service.address}/preview")
    page.wait("location.pathname === '/auth/login' && document.readyState === 'complete'")
    page.close()


def test_a_login_leads_back_to_where_it_began_and_nowhere_else(page: Page, service: Service,
                                                               name: str) -> None:
    service.create(name)
    cases = {"/preview": "/", "/preview/auth/login": "/preview", f"/#/s/{name}/command": "/",
             "/auth/login?next=//192.0.2.1/&data-next=//192.0.2.1/": "/",
             "/auth/login#//192.0.2.1/": "/"}
    for began, path in cases.items():
        cookie = cookie_of(page)
        page.call("Page.navigate", url="about:blank")  # or the page itself goes to the login
        page.wait("location.href === 'about:blank'")
        service.post("/auth/logout", cookie=cookie)
        page.call("Page.navigate", url=f"http://{service.address}{began}")
        page.wait("location.pathname.endsWith('/auth/login') && document.readyState === 'complete'")
        fill_login(page)
        assert page.eval("location.origin + location.pathname") == f"http://{service.address}{path}"
        assert page.eval("location.hash") == "".join(began.partition("#")[1:])
    page.goto(f"http://{service.address}/#/s/{name}/command")
    page.see("Nothing was run here yet.")
    service.post("/auth/logout", cookie=cookie_of(page))  # in another window
    page.wait("location.pathname === '/auth/login'")
    page.errors.clear()  # the 401 that was asked for
    fill_login(page)
    page.see("Nothing was run here yet.")


def test_the_first_page_is_light(page: Page, service: Service) -> None:
    page.call("Network.setCacheDisabled", cacheDisabled=True)
    page.call("Page.navigate", url="about:blank")
    page.requests.clear()
    page.bytes = 0
    page.goto(f"http://{service.address}/")
    page.see("New session")
    page.wait("performance.getEntriesByType('resource').every((entry) => entry.responseEnd)")
    assert 0 < page.bytes < FIRST_PAGE_BYTES
    assert not [url for url in page.requests if "vendor" in url or "terminal" in url]


def test_a_part_of_a_page_that_is_lost_on_its_way_is_asked_for_again(browser: Browser,
                                                                     service: Service,
                                                                     name: str) -> None:
    """As when a container comes or goes on the browser's machine."""
    service.create(name)
    page = browser.page()
    page.call("Network.clearBrowserCookies")
    for lost in ("login.js", "login.css"):
        page.lose(lost)
        page.goto(f"http://{service.address}/auth/login")
        assert not page.losing
    fill_login(page)
    page.see(name)
    for path, seen in (("/", "Choose a session"), ("/preview", name)):
        for lost in ("tokens.css", "/main.js", "/dom.js", "/typed.js"):
            page.lose(lost)
            page.call("Page.navigate", url="about:blank")
            page.goto(f"http://{service.address}{path}")
            page.see(seen)
            assert not page.losing
    for screen, lost in (("agent", "/agent.js"), ("command", "/command.js"),
                         ("terminal", "/xterm.mjs"), ("terminal", "/xterm.css")):
        page.lose(lost)
        open_screen(page, service, name, screen)
        page.wait("document.querySelector('.xterm-rows, .composer')")
        assert not page.losing and not page.eval("document.querySelector('.problem')")
    page.lose("/usage.js")
    page.call("Page.navigate", url="about:blank")
    page.goto(f"http://{service.address}/#/usage")
    page.see("Usage", "h1")
    assert not page.losing
    page.close()


def test_a_part_of_a_page_that_never_comes_is_not_asked_for_for_ever(page: Page,
                                                                     service: Service) -> None:
    page.call("Network.setBlockedURLs", urls=["*/dom.js"])
    page.goto(f"http://{service.address}/?again")
    page.wait("sessionStorage.getItem('reloads') === '5'")
    page.settle()
    page.requests.clear()
    time.sleep(1)
    page.settle()
    assert not [url for url in page.requests if url.endswith("/main.js")]
    page.errors.clear()  # those of what was blocked


def test_the_harness_waits_for_a_page_that_is_being_left(page: Page, service: Service) -> None:
    page.eval("document.body.remove()")  # as it is for a moment under heavy load
    assert page.text() == ""
    page.eval(f"void setTimeout(() => location.assign('http://{service.address}/preview'))")


def test_all_pages_have_the_same_colours(page: Page, service: Service) -> None:
    """Custom properties are made in one sheet, which the login page has before the login."""
    sheets = "[...document.styleSheets].flatMap((sheet) => [...sheet.cssRules])"
    rules = f"{sheets}.flatMap((rule) => rule.media ? [...rule.cssRules] : [rule])"
    names = f"[...new Set({rules}.flatMap((rule) => [...rule.style ?? []]))]"
    values = (f"{names}.filter((name) => name.startsWith('--')).map((name) => "
              "[name, getComputedStyle(document.documentElement).getPropertyValue(name)])")
    for dark in (False, True):
        page.resize(DESKTOP, dark)
        seen = []
        for path in ("/", "/preview", "/auth/login", "/preview/auth/login"):
            page.call("Page.navigate", url="about:blank")
            page.goto(f"http://{service.address}{path}")
            seen.append(page.eval(values))
        assert len(seen[0]) > 10 and seen == [seen[0]] * 4
        assert dict(seen[0])["--bg"] == ("#121417" if dark else "#f6f6f4")
    page.resize(DESKTOP)


# --- Sessions ---


def test_a_session_from_the_form_to_its_removal(page: Page, service: Service, name: str) -> None:
    page.click("a[href='#/new']")
    page.see("Directory on the host")
    directory = "input[placeholder='/home/me/project']"
    page.wait(f"document.querySelector({json.dumps(directory)}).value")
    page.fill(directory, "/no/such/directory")
    page.click("form button[type=submit]")
    page.see("/no/such/directory is not a directory", ".problem")
    page.errors.clear()  # the 400 that was asked for
    inner = service.engine.project / "abc" / "<b> 'c'"
    inner.mkdir(parents=True)
    (service.engine.project / "abd").mkdir()
    button = "document.querySelector('form button[type=submit]').getBoundingClientRect().y"
    before = page.eval(button)
    page.fill(directory, f"{service.engine.project}/a")
    page.see("abc\nabd", "[role=listbox]")
    assert page.eval(button) == before  # the list goes when that is pressed
    page.press("ArrowDown")
    page.press("ArrowDown")
    page.press("Escape")
    page.wait("document.querySelector('[role=listbox]').hidden")
    page.press("ArrowDown")
    page.see("abc", "[role=listbox]")
    page.press("ArrowDown")
    page.wait("document.activeElement.ariaActiveDescendantElement.innerText === 'abc'")
    page.press("Enter")
    page.see(inner.name, "[role=listbox]")
    page.click("[role=option]")
    assert page.eval("document.activeElement.value") == f"{inner}/"
    page.fill("input[placeholder^='made from']", name)
    page.click("form input[value=list]")
    page.fill("[aria-label='Allowed hosts']", "http://no/rule")
    page.click("form button[type=submit]")
    page.see("no/rule", ".problem")
    page.errors.clear()  # the 400 that was asked for
    page.fill("[aria-label='Allowed hosts']", "one.example\n*.two.example:443")
    page.click("form button[type=submit]")
    page.wait(f"location.hash === '#/s/{name}/agent'", 60)
    assert service.get(f"/api/sessions/{name}").json["directory"] == str(inner)
    assert rules(service, name) == {"allow": ["one.example", "*.two.example:443"]}
    page.see("What should Claude Code do?")
    page.see(name, ".sessions [aria-current]")
    page.click(".acts button[aria-label^=Stop]")
    page.see(f"{name} is", ".callout")
    page.click(".callout button")
    page.wait("!document.querySelector('.callout')")
    page.click(".acts button[aria-label^=Remove]")
    page.see(f"Remove {name}?", "dialog")
    page.click("dialog .danger")
    page.wait("location.hash === '#/'", 60)
    page.wait(
        "![...document.querySelectorAll('.sessions .name')]"
        f".some((e) => e.textContent === {json.dumps(name)})")


def test_who_uses_a_session_is_named_before_it_is_removed(service: Service, name: str) -> None:
    service.create(name)
    job = service.job(name, "echo going; sleep 87654")
    users = f"/api/sessions/{name}/users"
    wait_for(lambda: service.get(users).json["users"] == ["sleep 87654"])  # no longer its shell
    with chromium() as browser:
        page = browser.page()
        log_in(page, service)
        open_screen(page, service, name, "command")
        page.click(".acts button[aria-label^=Remove]")
        page.see("It is in use, and this ends: sleep 87654", "dialog")
        page.click("dialog .quiet")
        assert service.get(f"/api/sessions/{name}/jobs/{job['id']}").json["state"] == "running"
        page.close()


# --- Command mode ---


def test_command_mode(page: Page, service: Service, name: str) -> None:
    service.create(name)
    open_screen(page, service, name, "command")
    submit(page, "echo out; echo err >&2; printf '\\033[32mgreen\\033[0m\\n'; exit 3")
    page.see("exit 3", ".job-foot")
    assert page.eval("document.querySelector('.output .stderr').textContent") == "err\n"
    assert page.eval("document.querySelector('.output .fg2').textContent") == "green"
    submit(page, "echo begun; sleep 300")
    page.see("begun", ".job:last-child .output")
    page.click(".job:last-child .job-foot button")
    page.see("cancelled", ".job:last-child .chip")
    page.click(BOX)
    page.press("ArrowUp")
    page.press("ArrowUp")
    assert page.eval("document.querySelector('.composer textarea').value").startswith("echo out")
    page.press("Enter")
    page.see("exit 3", ".job:nth-child(3) .job-foot")


LOSING = """
    window.real = fetch;
    window.lost = {};
    window.fetch = async (address, options) => {
        if (options?.method !== "POST") return window.real(address, options);
        const before = window.lost[address] ?? 0;
        window.lost[address] = before + 1;
        if (before > 1) return window.real(address, options);
        if (before < 1) await window.real(address, options);
        throw new TypeError("Failed to fetch");
    };
"""


def test_what_is_lost_on_its_way_is_done_once(browser: Browser, service: Service,
                                              name: str) -> None:
    """The first time the answer is lost, the second time what was asked."""
    service.create(name)
    page = browser.page()
    page.goto(f"http://{service.address}/auth/login")
    page.eval(LOSING)
    fill_login(page)
    open_screen(page, service, name, "command")
    page.eval(LOSING)
    submit(page, "echo out")
    page.see("exit 0", ".job-foot")
    assert page.eval("window.lost") == {f"/api/sessions/{name}/command": 3}
    assert page.eval("document.querySelectorAll('.job').length") == 1
    assert len(service.get(f"/api/sessions/{name}/jobs").json) == 1


def test_much_output_stays_light(page: Page, service: Service, name: str) -> None:
    service.create(name)
    open_screen(page, service, name, "command")
    submit(page,
           "yes 'a line of some length, more or less' | head -c 30000000; echo; echo l${x}ast")
    page.see("exit 0", ".job-foot", 60)
    assert page.eval("document.querySelector('.output').textContent").endswith("last\n")
    assert page.eval("document.querySelector('.output').textContent.length") < 300_000
    page.see("The beginning is not shown", ".job")


def test_a_command_outlives_the_server_that_started_it(page: Page, service: Service,
                                                       name: str) -> None:
    service.create(name)
    open_screen(page, service, name, "command")
    submit(page, "for i in 1 2 3 4 5 6; do echo tick $i; sleep 1; done")
    page.see("tick 2", ".output")
    place = "document.querySelector('.tabs').getBoundingClientRect().y"
    before = page.eval(place)
    service.process.kill()
    service.process.wait()
    page.see("The server does not answer", "#banner")
    assert page.eval(place) == before
    service.process.end()
    service.start()
    page.see("exit 0", ".job-foot")
    shown = page.eval("document.querySelector('.output').textContent")
    assert shown == "".join(f"tick {i}\n" for i in range(1, 7))
    page.wait("document.querySelector('#banner').hidden")
    page.errors[:] = [error for error in page.errors
                      if not any(word in error for word in WENT_AWAY)]


# --- AGENT mode ---


@pytest.mark.parametrize("agent", AGENTS)
def test_agent_mode_shows_what_the_events_mean(page: Page, service: Service, name: str,
                                               agent: str) -> None:
    shutil.copy(STREAMS / f"{agent}.jsonl", service.engine.project)
    service.create(name, agent=agent, agentPromptCommand=f"cat {agent}.jsonl; : {{prompt}}")
    open_screen(page, service, name, "agent")
    submit(page, "run: echo hi; ls /etc | head -3")
    page.see("done", ".job-foot")
    asked = page.eval("document.querySelector('.ask').innerText")
    assert asked == "run: echo hi; ls /etc | head -3"
    page.see("pong tool", ".md")
    assert page.eval("document.querySelectorAll('.tool').length") == 1
    page.see("echo hi; ls /etc | head -3", ".tool-title")
    assert page.eval("document.querySelector('.tool').dataset.status") == "ok"
    page.click(".tool summary")
    page.see("adduser.conf", ".tool-out pre")
    page.see("2 tokens in, 2 out", ".facts")
    if agent == "claude":
        page.see("$0.00005", ".facts")
    assert page.eval("document.querySelectorAll('.raw').length") == 0  # nothing was left unread
    open_screen(page, service, name, "agent")
    page.see("pong tool", ".md")  # it is there again


def test_agent_mode_streams_markdown_and_keeps_what_it_does_not_know(page: Page, service: Service,
                                                                     name: str) -> None:
    def event(**data: object) -> str:
        return json.dumps({**data, "session_id": "s"})

    def partial(**what: object) -> str:
        return event(type="stream_event", event=what, parent_tool_use_id=None)

    def delta(text: str) -> str:
        return partial(type="content_block_delta", delta={"type": "text_delta", "text": text})

    evil = (
        "<img src=http://192.0.2.1/x onerror=alert(1)> ![p](http://192.0.2.1/y) "
        "[bad](javascript:alert(1)) "
            "<script>alert(1)</script>")
    text = f"# Title\n\nSome **bold** text {evil}\n"
    begins = partial(type="message_start", message={"id": "m"})
    # comes between the parts
    helper = {"id": "h", "content": [{"type": "text", "text": "A helper's report."}]}
    first = [begins, delta("# Title\n\nSome **bo"),
             event(type="assistant", message=helper, parent_tool_use_id="t")]
    second = [delta(text[len("# Title\n\nSome **bo") :]),
              event(type="assistant",
                    message={"id": "m", "content": [{"type": "text", "text": text}]}),
              event(type="brand_new", some="thing"), "no JSON at all"]
    for file, lines in (("first", first), ("second", second)):
        (service.engine.project / file).write_text("\n".join(lines) + "\n")
    wait = "until [ -e go ]; do sleep 0.1; done"
    service.create(name, agentPromptCommand=f"cat first; {wait}; cat second; : {{prompt}}")
    open_screen(page, service, name, "agent")
    submit(page, "say it")
    page.see("Title", ".md h1")
    page.see("running", ".job-foot")  # it is shown while it comes
    (service.engine.project / "go").touch()
    page.see("done", ".job-foot")
    page.see("bold", ".md strong")
    page.see("brand_new", ".raw")
    page.see("no JSON at all", ".raw")
    active = ".md img, .md script, .md a[href^=javascript]"
    assert page.eval(f"document.querySelectorAll('{active}').length") == 0
    # deltas and whole text are one
    assert page.eval("document.querySelectorAll('.md').length") == 2
    assert page.eval("document.querySelector('.md').innerText.match(/Title/g).length") == 1


LEVELS = 20_000
def said(text: str) -> str:
    """OpenCode's event for a text, which is as it stands in JSON."""
    return f'{{"type":"text","sessionID":"s","part":{{"id":"i","text":{text}}}}}'


ODD = {  # a line that an agent never prints, and what of it must be seen
    "number": '{"type":"assistant","session_id":"s","message":{"id":"seen","content":'
              '[{"type":"text","text":5}]}}',
    "cost": '{"type":"result","session_id":"s","total_cost_usd":"0.5","result":"seen"}',
    "error": '{"type":"assistant","session_id":"s","error":{"odd":"seen"},'
             '"message":{"content":[]}}',
    "levels": '{"type":"tool_use","timestamp":"t","tool_id":"i","tool_name":"n","parameters":'
              + '{"a":' * LEVELS + "1" + "}" * LEVELS + ',"uuid":"seen"}',
    "method": '{"type":"turn.completed","usage":{"input_tokens":{"toLocaleString":"seen"}}}',
    "prototype": said('{"__proto__":{"text":"seen"}}'),
    "surrogates": said(r'"\ud800 seen \udfff"'),
    "huge": '{"type":"result","session_id":"s","duration_ms":1e999,"uuid":"seen"}',
    "no-number": '{"type":"result","timestamp":"t","stats":{"input_tokens":"NaN","uuid":"seen"}}',
    "long": said('"' + "long " * 400_000 + 'seen"'),
    "quotes": said('"' + ">" * LEVELS + 'seen"'),
    "nothing": said('"[seen]: nowhere"'),
    "one-line": said('{"odd":"' + "x" * 20_000 + 'seen"}'),
}


@pytest.mark.parametrize("case", ODD)
def test_a_line_that_no_agent_prints_is_shown(
    page: Page, service: Service, name: str, case: str
) -> None:
    line = ODD[case]
    (service.engine.project / "odd").write_text(f"{line}\n")
    later = f"{name}-later"  # whose tile comes after it
    service.create(name, agentPromptCommand="cat odd; : {prompt}")
    service.create(later, agentPromptCommand="echo what comes later: {prompt}")
    open_screen(page, service, name, "agent")
    submit(page, "go on")
    page.see("done", ".turn .job-foot")
    page.wait("document.querySelector('.blocks').textContent.includes('seen')")
    service.ended(service.post(f"/api/sessions/{later}/prompt", {"prompt": "well"}).json)
    page.goto(f"http://{service.address}/preview")
    page.see("what comes later: well", f".tile:has([aria-label='Prompt for {later}']) .tail")
    tail = f"document.querySelector(\".tile:has([aria-label='Prompt for {name}']) .tail\")"
    page.wait(f"{tail}.textContent.trim() && !{tail}.querySelector('.nothing')")
    if len(line) < 400:
        page.wait(f"{tail}.textContent.includes('seen')")
    assert page.eval("document.querySelectorAll('.undrawn').length") == 0


def fuzz(page: Page, service: Service, count: int, seed: int) -> list[list[str]]:
    """What went wrong as mutated streams were shown: each is [what, stream]."""
    cases = list(streams(count, seed))
    wrong = []
    for path, script, size in (("/", TURNS, 10), ("/preview", TILES, 50)):
        page.goto(f"http://{service.address}{path}")
        page.wait("document.querySelector('.grid, .sessions')")
        for start in range(0, count, size):
            wrong += page.eval(f"({script})({json.dumps(cases[start : start + size])})")
            assert not page.errors, cases[start : start + size]
    return wrong


def test_no_mutated_stream_blinds_or_freezes_a_page(page: Page, service: Service) -> None:
    assert fuzz(page, service, 300, seed=7) == []


def test_what_cannot_be_drawn_stops_nothing_else(page: Page, service: Service, name: str) -> None:
    shutil.copy(STREAMS / "claude.jsonl", service.engine.project)
    later = f"{name}-later"
    service.create(name, agentPromptCommand="cat claude.jsonl; : {prompt}")
    service.create(later, agentPromptCommand="echo what comes later: {prompt}")
    open_screen(page, service, name, "agent")
    page.eval("void (Number.prototype.toLocaleString = () => { throw Error('no') })")
    submit(page, "go on")
    page.see("done", ".turn .job-foot")
    page.see("pong tool", ".md")
    page.see("This could not be shown: no", ".undrawn")
    page.wait("document.querySelector('.undrawn pre').textContent.includes('\"cost\"')")
    service.ended(service.post(f"/api/sessions/{later}/prompt", {"prompt": "well"}).json)
    page.goto(f"http://{service.address}/preview")
    page.see("what comes later: well")
    page.eval(f"""(() => {{
        const {{ replaceChildren }} = Element.prototype;
        Element.prototype.replaceChildren = function (...children) {{
            const fails = children[0]?.className !== "bad undrawn";
            if (this.ariaLabel === "What {name} does" && fails) throw Error("no");
            replaceChildren.apply(this, children);
        }};
    }})()""")
    for session in (name, later):
        service.ended(service.post(f"/api/sessions/{session}/prompt", {"prompt": "once more"}).json)
    page.see("what comes later: once more", f".tile:has([aria-label='Prompt for {later}']) .tail")
    page.see("This could not be shown: no", f".tile:has([aria-label='Prompt for {name}']) .tail")
    page.see("Waiting for you", f".tile:has([aria-label='Prompt for {name}']) .state")


def test_a_turn_of_very_many_events_stays_light(page: Page, service: Service, name: str) -> None:
    event = r'{"type":"error","message":"number %s"}\n'
    service.create(name, agentPromptCommand=f"printf '{event}' $(seq 5000); : {{prompt}}")
    open_screen(page, service, name, "agent")
    submit(page, "go on")
    page.see("number 5000", ".blocks")
    assert page.eval("document.querySelector('.blocks').children.length") == 2000
    page.see("Whole output", ".job-foot")


def show_decisions(page: Page, service: Service, decisions: list[Any]) -> None:
    """Mount the list of decisions on a page, for a proxy that has taken just these."""
    page.goto(f"http://{service.address}/")
    page.eval(f"""(async () => {{
        const base = document.querySelector("script[type=module]").src.replace(/main.js$/, "");
        const {{ mount }} = await import(base + "decisions.js");
        const real = fetch, body = {json.dumps(json.dumps(decisions))};
        window.fetch = async (url, options) =>
            url.includes("/shown/") ? Response.json({{ allow: [] }}) : real(url, options);
        window.EventSource = class extends EventTarget {{
            constructor() {{
                super();
                setTimeout(() => JSON.parse(body).forEach((one) => this.dispatchEvent(
                    new MessageEvent("decision", {{ data: JSON.stringify(one) }}))));
            }}
            close() {{}}
        }};
        const root = document.body.appendChild(document.createElement("div"));
        const session = {{ name: "shown", state: "running", network: {{ allow: [] }} }};
        mount(root, {{ name: "shown", session, reload: async () => {{}} }});
    }})()""")


def test_rows_of_odd_types_hide_no_others(page: Page, service: Service) -> None:
    odd: list[Any] = [5, None, "text", ["a"], {"toString": 1, "toLocaleString": 1},
                      {"__proto__": {}}, "constructor", "\ud800", 1e308, True]

    def variants(whole: dict[str, Any], prefix: str) -> list[tuple[str, dict[str, Any]]]:
        return [(f"{prefix}{key}{index}", {**whole, key: value})
                for key in whole for index, value in enumerate(odd)]

    job = {"id": "1", "kind": "prompt", "state": "ended", "exit": 0, "prompt": "p", "command": None,
           "size": 9, "error": None, "tail": "tail", "started": "2026-11-21T00:00:00Z",
           "ended": "2026-11-21T00:00:01Z"}
    row = {"name": "row", "state": "running", "agent": "claude", "directory": "/d",
           "network": "open", "agentMode": True, "jobs": 0, "terminals": 0, "last": job}
    rows = [{**given, "name": name} for name, given in variants(row, "row")]
    rows += [{**row, "name": value} for value in odd]
    rows += [{**row, "name": name, "last": last} for name, last in variants(job, "job")]
    everything = json.dumps([*odd, *rows, {**row, "name": "the-last-one"}])
    for path, found in (("/", "[...document.querySelectorAll('.sessions .name')]"),
                        ("/preview", "[...document.querySelectorAll('.tile h2')]")):
        page.goto(f"http://{service.address}{path}")
        page.wait("document.querySelector('.grid, .sessions')")
        names, text = page.eval(f"""(async () => {{
            const script = document.querySelector("script[type=module]").src;
            const base = script.replace(/main.js$/, "").replace("/preview/", "/ui/");
            const {{ refresh }} = await import(base + "store.js");
            window.fetch = async () => new Response({json.dumps(everything)});
            await refresh(); // the one that was under way
            await refresh();
            return [{found}.map((element) => element.textContent), document.body.textContent];
        }})()""")
        assert "the-last-one" in names and len(names) > len(rows) * 0.8
        assert "could not be shown" not in text
    decision = {"host": "a", "port": 443, "verdict": "deny", "rule": "", "reason": "r",
                "time": "2026-11-21T00:00:00Z"}
    decisions = [{**given, "host": host} for host, given in variants(decision, "of")]
    decisions += [*odd, *({**decision, "host": value} for value in odd)]
    decisions.append({**decision, "host": "last.example"})
    show_decisions(page, service, decisions)
    page.see("last.example:443", ".decision")
    assert page.eval("document.querySelectorAll('.decision').length") > len(decisions) / 2
    assert page.eval("document.querySelectorAll('.decision.undrawn').length") == 0


def test_agent_mode_without_a_command_says_what_is_missing(page: Page, service: Service,
                                                           name: str) -> None:
    service.create(name)
    open_screen(page, service, name, "agent")
    page.see("AGENT mode needs a command", ".callout")
    assert page.eval("document.querySelector('.composer textarea').disabled")
    page.click(".callout a")
    page.wait("document.querySelector('.settings')")


# --- Terminal ---


def test_a_terminal(page: Page, service: Service, name: str) -> None:
    service.create(name)
    open_terminal(page, service, name)
    enter(page, "echo $((6*7)) t${x}erm")
    see_in_terminal(page, "42 term")
    page.resize((900, 600))
    page.wait("document.querySelectorAll('.xterm-rows > div').length < 36")
    rows = page.eval("document.querySelectorAll('.xterm-rows > div').length")
    enter(page, f"until stty size | grep '^{rows} '; do sleep .1; done; echo re${{x}}sized")
    see_in_terminal(page, "resized")
    page.press("f", modifiers=CONTROL | SHIFT)
    page.wait("document.activeElement.getAttribute('aria-label') === 'Find in the terminal'")
    page.press("Escape")
    page.press("l", modifiers=CONTROL | SHIFT)
    page.wait("document.activeElement.role === 'tab'")  # the keyboard is not caught
    page.click(".term-tools button")
    page.see("Shell 2", ".term-tabs")
    see_in_terminal(page, "# ")
    page.click(".term-bar > [aria-label='Close Shell 2']")
    page.wait("document.querySelectorAll('.term-tab').length === 1")
    see_in_terminal(page, "resized")
    page.press("l", modifiers=CONTROL | SHIFT)
    page.press("Delete")
    page.see("No terminal is open", ".term-place")
    page.resize(DESKTOP)


def test_a_terminal_is_where_it_was_after_a_reload(page: Page, service: Service, name: str) -> None:
    service.create(name)
    open_terminal(page, service, name)
    enter(page, "mark=kept; echo o${x}nce")
    see_in_terminal(page, "once")
    open_terminal(page, service, name)
    see_in_terminal(page, "once")
    enter(page, "echo $mark.")
    see_in_terminal(page, "kept.")
    lines = [line for line in screen_text(page).splitlines() if line.strip() == "once"]
    assert len(lines) == 1
    assert page.eval("document.querySelectorAll('.term-tab').length") == 1


def test_two_windows_and_one_keyboard(page: Page, browser: Browser, service: Service,
                                      name: str) -> None:
    service.create(name)
    open_terminal(page, service, name)
    enter(page, "echo fi${x}rst")
    see_in_terminal(page, "first")
    other = browser.page()
    open_terminal(other, service, name)
    see_in_terminal(other, "first")
    page.see("Another window types here", ".term-note")
    enter(other, "echo sec${x}ond")
    see_in_terminal(other, "second")
    page.call("Page.bringToFront")
    see_in_terminal(page, "second")
    other.close()
    enter(page, "echo thi${x}rd")
    see_in_terminal(page, "third")
    page.wait("document.querySelector('.term-note').hidden")


def test_a_terminal_goes_on_when_its_server_is_killed(page: Page, service: Service,
                                                      name: str) -> None:
    service.create(name)
    open_terminal(page, service, name)
    enter(page, "mark=kept; echo be${x}gun")
    see_in_terminal(page, "begun")
    page.requests.clear()
    service.restart_after_kill()
    wait_for(lambda: page.eval("true") and [url for url in page.requests if url.startswith("ws:")])
    page.wait("document.querySelector('.term-note').hidden")
    enter(page, "echo $mark.")
    see_in_terminal(page, "kept.")
    assert screen_text(page).count("begun") == 1
    open_terminal(page, service, name)
    see_in_terminal(page, "kept.")
    enter(page, "exit 7")
    page.see("The program has ended with status 7", ".term-note")
    page.click(".term-note button")
    page.wait("document.querySelector('.term-note').hidden")
    enter(page, "echo ag${x}ain")
    see_in_terminal(page, "again")
    page.errors[:] = [error for error in page.errors
                      if not any(word in error for word in WENT_AWAY)]


def test_the_command_line_and_the_page_share_terminals(page: Page, service: Service,
                                                       name: str) -> None:
    service.create(name)
    with service.engine.pty("run", "-n", name, rows=20, cols=70) as terminal:
        terminal.send("echo fi''rst\n")
        terminal.expect("first")
        open_terminal(page, service, name)
        see_in_terminal(page, "first")
        assert page.eval("document.querySelectorAll('.term-tab').length") == 1
        enter(page, "stty size; echo sec${x}ond")
        terminal.expect("second")
        see_in_terminal(page, "second")
        assert "20 70" not in screen_text(page)  # the page has the size
        terminal.send("echo thi''rd; stty size\n")
        see_in_terminal(page, "third")
        see_in_terminal(page, "20 70")
        page.see("Another window types here", ".term-note")
        enter(page, "echo fou${x}rth; exit 7")
        terminal.expect("fourth")
        page.see("The program has ended with status 7", ".term-note")
        terminal.expect("Keep it?")
        terminal.send("y\n")
        assert terminal.wait() == 7
    page.click(".term-note button")
    see_in_terminal(page, "# ")
    with service.engine.pty("attach", name) as terminal:
        terminal.send("echo fi''fth\n")
        terminal.expect("fifth")
        see_in_terminal(page, "fifth")
        enter(page, "echo si${x}xth; exit 8")
        terminal.expect("sixth")
        assert terminal.wait() == 8


def permit(page: Page, service: Service, *permissions: str) -> None:
    page.call("Browser.grantPermissions", origin=f"http://{service.address}",
              permissions=list(permissions))


def test_a_bell_and_a_programs_notification_reach_the_desktop(page: Page, browser: Browser,
                                                              service: Service,
                                                              name: str) -> None:
    service.create(name)
    open_terminal(page, service, name)
    page.click("[aria-label^='Notify me']")  # a headless browser says no by itself
    page.told("The browser does not allow notifications")
    permit(page, service, "notifications")
    page.click("[aria-label^='Notify me']")
    page.told("You will be notified")
    assert not page.eval("document.querySelector('[aria-label^=\"Notify me\"]').checkVisibility()")
    page.eval("""{
        const Shown = Notification;
        window.shown = [];
        window.Notification = class extends Shown {
            constructor(title, options) {
                super(title, options);
                this.addEventListener("show", () => shown.push(`${title}: ${options.body}`));
            }
        };
    }""")
    enter(page, "go() { until [ -e /tmp/$1 ]; do sleep 0.1; done; }; go 1; printf 'x\\a'; go 2;"
                " printf '\\033]9;4;1;50\\007\\033]9;the build is done\\007'; go 3;"
                " printf '\\033]777;notify;Tests;all; of them\\007'; echo ra${x}ng")
    other = browser.page()
    other.call("Page.bringToFront")
    page.wait("document.hidden || !document.hasFocus()")
    expected = [f"{name}: The terminal rang its bell", f"{name}: the build is done",
                f"{name}: Tests: all; of them"]
    for number, told in enumerate(expected, 1):  # of those that come together the last is told
        service.job(name, f"touch /tmp/{number}")
        page.wait(f"shown.at(-1) === {json.dumps(told)}")
    assert page.eval("shown") == expected
    other.close()
    page.call("Page.bringToFront")
    open_terminal(page, service, name)  # what is shown again rings no more
    see_in_terminal(page, "rang")
    assert page.eval("document.querySelectorAll('#toasts *').length") == 0


def test_what_a_program_rings_names_and_asks_without_end_is_taken_together(
    page: Page, browser: Browser, service: Service, name: str
) -> None:
    title = "printf '\\033]0;title %s\\007' $(seq 100)"
    again = "for i in $(seq 100); do cat /tmp/f; done"
    floods = {"bells": "head -c 20000 /dev/zero | tr '\\0' '\\a'",
              "notes": f"{title.replace(']0', ']9')} > /tmp/f; {again}",
              "titles": f"{title} > /tmp/f; {again}",
              "questions": "stty -echo; printf '\\033[6n%.0s' $(seq 10000); sleep 1; stty echo"}
    service.create(name)
    permit(page, service, "notifications")
    open_terminal(page, service, name)
    page.click(".term-tools button")
    page.wait("document.querySelectorAll('.term-tab').length === 2")
    page.click(".term-tab")
    page.eval("""{
        window.counts = { toasts: 0, most: 0, tabs: 0, sent: 0, notifications: 0 };
        const toasts = document.querySelector("#toasts");
        new MutationObserver((records) => {
            for (const record of records) counts.toasts += record.addedNodes.length;
            counts.most = Math.max(counts.most, toasts.children.length);
        }).observe(toasts, { childList: true });
        const tabs = document.querySelector(".term-tabs");
        new MutationObserver((records) => (counts.tabs += records.length))
            .observe(tabs, { childList: true, subtree: true });
        const { send } = WebSocket.prototype;
        WebSocket.prototype.send = function (data) {
            counts.sent += typeof data !== "string";
            send.call(this, data);
        };
        const Shown = Notification;
        window.Notification = class extends Shown {
            constructor(...args) {
                super(...args);
                counts.notifications += 1;
            }
        };
    }""")

    def flood(what: str) -> None:
        see_in_terminal(page, "# ")
        enter(page, f"until [ -e /tmp/{what} ]; do sleep .1; done; clear; "
                    f"{floods[what]}; echo e${{x}}nd of {what}")

    flood("titles")
    service.job(name, "touch /tmp/titles")
    see_in_terminal(page, "end of titles")
    page.see("title 100", ".term-tabs")
    for what in ("bells", "notes"):  # in the other terminal's tab
        flood(what)
        page.click(".term-tab:nth-child(2)")
        service.job(name, f"touch /tmp/{what}")
        last = {"bells": "The terminal rang its bell", "notes": "title 100"}[what]
        page.told(f"{name}: {last}")
        page.click(".term-tab")  # which is drawn all the time
        see_in_terminal(page, f"end of {what}")
    assert not page.eval("counts.notifications")
    service.ended(service.job(name, "rm /tmp/bells"))
    flood("bells")  # while somebody looks at another page
    other = browser.page()
    other.call("Page.bringToFront")
    page.wait("document.hidden || !document.hasFocus()")
    service.job(name, "touch /tmp/bells")
    page.wait("counts.notifications")
    other.close()
    page.call("Page.bringToFront")
    see_in_terminal(page, "end of bells")
    flood("questions")  # the last, for the shell gets the answers
    service.job(name, "touch /tmp/questions")
    see_in_terminal(page, "end of questions")
    counts = page.eval("counts")
    assert 3 <= counts["toasts"] < 200 and counts["most"] == 1, counts
    assert 1 <= counts["notifications"] < 50, counts
    assert 1 <= counts["tabs"] < 1000 and 1 <= counts["sent"] < 1000, counts


def test_the_clipboard_of_a_terminal(page: Page, service: Service, name: str) -> None:
    service.create(name)
    permit(page, service, "clipboardReadWrite", "clipboardSanitizedWrite")
    open_terminal(page, service, name)
    page.click("[aria-label^='Copy the selection']")
    page.told("Nothing is selected")
    enter(page, "clear; PS1='> '; echo lone${x}word")
    see_in_terminal(page, "loneword")
    for how in ("button", "keys"):
        page.eval("navigator.clipboard.writeText('')")
        x, y = page.eval(f"""(() => {{
            const row = {ROWS}.find((row) => row.textContent.startsWith("loneword"));
            const box = row.getBoundingClientRect();
            return [box.x + 20, box.y + box.height / 2];
        }})()""")
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                page.mouse(kind, [x, y], count)
        if how == "button":
            page.click("[aria-label^='Copy the selection']")
        else:
            page.press("c", modifiers=CONTROL | SHIFT)
        page.wait("navigator.clipboard.readText().then((text) => text === 'loneword')")
    page.eval("navigator.clipboard.writeText('echo pa${x}sted; : ünï')")
    page.click("[aria-label^='Paste']")
    see_in_terminal(page, "ünï")
    page.wait("document.activeElement.className === 'xterm-helper-textarea'")
    page.press("Enter")
    see_in_terminal(page, "pasted")


# --- Settings ---


def test_settings_are_in_force_at_the_next_command(page: Page, service: Service, name: str) -> None:
    service.create(name)
    open_screen(page, service, name, "settings")
    page.wait("document.querySelector('.settings')")
    page.click(".settings fieldset .row button")
    page.type("GREETING")
    page.fill(".env textarea", "hello 'there'")
    page.fill("textarea[placeholder*='{prompt}']", "echo no placeholder")
    page.click(".settings button[type=submit]")
    page.see("{prompt}", ".problem")
    page.errors.clear()  # the 400 that was asked for
    page.fill("textarea[placeholder*='{prompt}']", "echo $GREETING {prompt}")
    page.click(".settings button[type=submit]")
    page.told("Settings saved")
    open_screen(page, service, name, "agent")
    submit(page, "it's \"$HOME\"; `x`")
    page.see("hello 'there' it's \"$HOME\"; `x`", ".raw")
    open_screen(page, service, name, "settings")
    page.click("input[value=none]")
    page.click(".settings button[type=submit]")
    page.told("Settings saved")


def test_a_session_is_renamed_and_duplicated(page: Page, service: Service, name: str) -> None:
    service.create(name)
    open_screen(page, service, name, "settings")
    field = ".settings [aria-label='Another name']"
    for wanted, button in ((f"{name}-b", "Rename"), (f"{name}-c", "Duplicate")):
        # At once: the settings of another name are drawn anew.
        page.wait(f"""(() => {{
            const field = document.querySelector({field!r});
            if (!field || field.value === {wanted!r}) return false;
            field.value = {wanted!r};
            [...document.querySelectorAll('.settings button')]
                .find((button) => button.textContent === {button!r}).click();
            return true;
        }})()""")
        page.wait(f"location.hash.includes({wanted!r}) && "
                  f"document.querySelector({field!r})?.value === {wanted!r}")
    names = {row["name"] for row in service.get("/api/sessions").json}
    assert {f"{name}-b", f"{name}-c"} <= names and name not in names


def test_settings_that_were_not_saved_are_kept_and_asked_about(page: Page, service: Service,
                                                               name: str) -> None:
    service.create(name)
    template = "textarea[placeholder*='{prompt}']"
    open_screen(page, service, name, "settings")
    page.fill(template, "echo {prompt} not saved")
    page.see("Not saved yet", ".settings")
    page.click(".tabs a")
    page.see("AGENT mode needs a command")
    page.click(".tabs a[href$=settings]")
    page.wait(
        f"document.querySelector({json.dumps(template)})?.value === 'echo {{prompt}} not saved'")
    page.see("Not saved yet", ".settings")
    page.dialog_answer = False
    page.call("Page.reload")
    wait_for(lambda: page.eval("true") and page.dialogs)
    assert page.dialogs == ["beforeunload"]
    typed = page.eval(f"document.querySelector({json.dumps(template)}).value")
    assert typed == "echo {prompt} not saved"
    page.click(".settings .sticky .quiet")
    page.wait(f"document.querySelector({json.dumps(template)}).value === ''")
    page.call("Page.reload")  # without a question
    page.wait("document.readyState === 'complete' && document.querySelector('.settings')")
    assert page.dialogs == ["beforeunload"]
    settings = service.get(f"/api/sessions/{name}/settings").json["settings"]
    assert settings["agentPromptCommand"] is None


def test_what_was_typed_is_still_there_after_a_look_elsewhere(page: Page, service: Service,
                                                              name: str) -> None:
    service.create(name, agentPromptCommand="echo {prompt}")
    open_screen(page, service, name, "agent")
    page.click(BOX)
    page.type("a long thought")
    page.click(".tabs a[href$=command]")
    page.wait("document.querySelector('[aria-label=Command]')")
    assert page.eval("document.querySelector('[aria-label=Command]').value") == ""
    page.click(".tabs a[href$=agent]")
    page.wait("document.querySelector('[aria-label=Prompt]')?.value === 'a long thought'")
    page.click(BOX)
    page.press("Enter")
    page.see("done", ".job-foot")
    page.click(".tabs a[href$=command]")
    page.wait("document.querySelector('[aria-label=Command]')")
    page.click(".tabs a[href$=agent]")
    page.see("a long thought", ".raw")
    assert page.eval("document.querySelector('[aria-label=Prompt]').value") == ""


def test_a_click_is_not_lost_when_something_changes_amid_it(page: Page, service: Service,
                                                            name: str) -> None:
    service.create(name)
    open_terminal(page, service, name)
    enter(page, "until [ -e /tmp/go ]; do sleep 0.1; done; printf '\\033]0;a title\\007'")
    page.click(".term-tools button")
    page.see("Shell 2", ".term-tabs")

    def title() -> None:
        service.job(name, "touch /tmp/go")
        page.see("a title", ".term-tabs")

    page.click(".term-tab", amid=title)
    page.wait("document.querySelector('.term-tab').ariaSelected === 'true'")

    def look_elsewhere() -> None:
        page.eval(f"void (location.hash = '#/s/{name}/command')")
        page.wait("document.querySelector('[aria-label=Command]')")

    page.click(".tabs a[href$=settings]", amid=look_elsewhere)
    page.wait("document.querySelector('.settings')")

    def stop() -> None:
        assert service.post(f"/api/sessions/{name}/stop").status == 200
        page.wait("document.querySelector('.acts [aria-label^=Start]')?.checkVisibility()")

    page.click(".acts [aria-label^=Remove]", amid=stop)
    page.see(f"Remove {name}?", "dialog")


def test_a_network_is_chosen_and_the_container_created_again(page: Page, service: Service,
                                                             name: str) -> None:
    service.create(name)
    service.ended(service.job(name, "touch /tmp/mark; echo kept >~/file; echo before"))
    service.job(name, "sleep 87653")
    users = f"/api/sessions/{name}/users"
    wait_for(lambda: service.get(users).json["users"] == ["sleep 87653"])  # no longer its shell
    open_screen(page, service, name, "settings")
    choices = "[...document.querySelectorAll('.choices input')].map((e) => e.value).join()"
    assert page.eval(choices) == ",open,none,list"
    assert not page.eval("document.querySelector('.hosts').checkVisibility()")
    page.click("input[value=list]")
    page.fill("[aria-label='Allowed hosts']", "api.example.com\n*.example.org:443")
    page.see("Not saved yet", ".settings")
    page.click("input[value=none]")
    page.click(".settings button[type=submit]")
    page.see("network: it has open, asked for is none", ".callout")
    page.click(".callout button")
    page.see("The agent's conversations, settings and history stay. "
             "It is in use, and this ends: sleep 87653", "dialog")
    page.click("dialog .danger")
    page.wait("document.querySelector('.settings') && !document.querySelector('.callout')", 60)
    page.see("no network", ".session-head")
    open_screen(page, service, name, "command")
    page.see("before", ".output")
    submit(page, "cat ~/file; ls /sys/class/net /tmp/mark 2>&1")  # two streams have no order
    page.see("kept", ".job:last-child .output")
    page.see("exit 1", ".job:last-child .job-foot")
    output = page.eval("document.querySelector('.job:last-child .output').textContent")
    assert output.startswith("kept\n") and output.count("lo\n") == 1


def test_an_allow_list_is_edited(page: Page, service: Service, name: str) -> None:
    service.create(name, network={"allow": ["one.example"]})
    open_screen(page, service, name, "settings")
    page.see("As configured (1 allowed host)", ".settings")
    page.click("input[value=list]")
    allowed = page.eval("document.querySelector('[aria-label=\"Allowed hosts\"]').value")
    assert allowed == "one.example"
    page.fill("[aria-label='Allowed hosts']", "one.example\n*.two.example:443")
    page.fill("[aria-label='Denied hosts']", "bad.two.example")
    page.click(".settings button[type=submit]")
    page.see("2 allowed hosts", ".session-head")
    assert not page.eval("document.querySelector('.callout')")  # no new container
    wanted = {"allow": ["one.example", "*.two.example:443"], "deny": ["bad.two.example"]}
    assert service.get(f"/api/sessions/{name}/settings").json["settings"]["network"] == wanted
    assert service.get(f"/api/sessions/{name}/network").json == wanted
    page.fill("[aria-label='Allowed hosts']", "no host/at all")
    page.click(".settings button[type=submit]")
    page.see("host/at", ".problem")
    page.errors.clear()  # the 400 that was asked for
    page.see("Not saved yet", ".settings")


def test_what_a_changed_network_has_cut_is_sent_again(page: Page, service: Service,
                                                      name: str) -> None:
    service.create(name)
    open_screen(page, service, name, "settings")
    page.fill("textarea.mono:not(.secret)", "echo later")
    page.eval("""(() => {
        const fetch = window.fetch;
        window.fetch = (address, options) => {
            if (options.method !== "PUT") return fetch(address, options);
            window.fetch = fetch;
            return Promise.reject(new TypeError("Failed to fetch"));
        };
    })()""")
    page.click(".settings button[type=submit]")
    page.told("Settings saved")
    settings = service.get(f"/api/sessions/{name}/settings").json["settings"]
    assert settings["autostart"] == "echo later"


def test_settings_say_where_the_output_of_autostart_is(
    page: Page, service: Service, name: str
) -> None:
    service.create(name, autostart="echo output of autostart")
    open_screen(page, service, name, "command")
    page.see("output of autostart", ".output")
    assert service.post(f"/api/sessions/{name}/stop").status == 200
    run = service.engine.sandbox("run", "-n", name, "-x", "true")
    assert run.returncode == 0, run.stderr
    open_screen(page, service, name, "settings")
    page.see("in Command mode where these pages started the container", ".settings")
    log = page.eval("/\\S+[.]log/.exec(document.querySelector('.settings').innerText)[0]")
    job = service.ended(service.job(name, f"until [ -s {log} ]; do sleep 0.1; done; cat {log}"))
    output = service.get(f"/api/sessions/{name}/jobs/{job['id']}/output").body
    assert output == b"output of autostart\n"
    kinds = [job["kind"] for job in service.get(f"/api/sessions/{name}/jobs").json]
    assert kinds == ["command", "autostart"]  # of the start by the command line there is none


# --- Network ---

OUTSIDE = "127.0.0.1:8099"  # a server in the network of a session's proxy


@pytest.fixture
def outside(service: Service, name: str) -> Iterator[str]:
    """A session that may reach nothing, and something to reach for; the name of its proxy.

    Ask for it before the page, which then is gone when the session goes.
    """
    service.create(name, network={"allow": []})
    engine = service.engine
    id = engine.run("inspect", "-f", '{{index .Config.Labels "sandbox.session"}}',
                    name).stdout.strip()
    proxy = f"sandbox-proxy-{id}"
    host, _, port = OUTSIDE.partition(":")
    server = engine.run("run", "-d", "--network", f"container:{proxy}", IMAGE, "python3", "-m",
                        "http.server",
                        "--bind", host, port)
    assert server.returncode == 0, server.stderr
    there = ["exec", server.stdout.strip(), "wget", "-qO-", f"http://{OUTSIDE}/etc/passwd"]
    wait_for(lambda: engine.run(*there).returncode == 0)
    yield proxy
    engine.remove({server.stdout.strip()})
    service.request("DELETE", f"/api/sessions/{name}")


def reaches(service: Service, name: str, address: str = OUTSIDE) -> bool:
    """Whether a program in the session gets through its proxy to an address."""
    job = service.ended(service.job(name, f"wget -qO- http://{address}/etc/passwd"))
    output = service.get(f"/api/sessions/{name}/jobs/{job['id']}/output").body
    assert job["exit"] == 0 or b"403 Forbidden" in output, (job, output)
    return b"root:" in output


def rules(service: Service, name: str) -> object:
    return service.get(f"/api/sessions/{name}/network").json


def test_a_refused_host_is_allowed_and_denied_at_one_click(outside: str, page: Page,
                                                           service: Service,
                                                           name: str) -> None:
    open_screen(page, service, name, "network")
    page.see("Nothing was asked for yet", ".network")
    page.see("No host yet: everything is refused", ".rules")
    assert not reaches(service, name)
    page.see("no rule allows it", ".decision.denied")
    page.see(f"{OUTSIDE} was refused", "#said")
    page.click(".decision button")
    page.see("Allowed from the next connection on", ".decision:not(.denied)")
    page.see(OUTSIDE, ".rules .allow")
    assert reaches(service, name)
    page.see("2 times, refused 1", ".decision")
    page.see(f"by the rule {OUTSIDE}", ".decision")
    page.click(".decision button")
    page.see(OUTSIDE, ".rules .deny")
    assert not reaches(service, name)
    page.see(f"a rule denies it: {OUTSIDE}", ".decision.denied")
    page.click(".decision button")
    page.see("Allowed from the next connection on", ".decision")
    assert rules(service, name) == {"allow": [OUTSIDE]}
    assert reaches(service, name)
    page.see("4 times, refused 2", ".decision")
    assert page.eval("document.querySelectorAll('.decision').length") == 1
    open_screen(page, service, name, "network")
    page.see("4 times, refused 2", ".decision")  # what was before is there again
    service.restart_after_kill()
    assert reaches(service, name)
    page.see("5 times, refused 2", ".decision")
    page.errors[:] = [error for error in page.errors
                      if not any(word in error for word in WENT_AWAY)]


def test_what_lets_a_refused_host_through_is_read_from_fields(page: Page,
                                                              service: Service) -> None:
    """The words of a reason are for people: a sentence with an address in it means nothing here."""
    reason = "it is at 10.0.0.1, which is no public address and has no rule of its own"
    base = {"port": 443, "verdict": "deny", "rule": "", "reason": reason,
            "time": "2026-11-21T00:00:00Z"}
    decisions = [
        {**base, "host": "old.example"},  # of a proxy that says no kind
        {**base, "host": "new.example", "kind": "address-private", "address": "10.0.0.2"},
        {**base, "host": "no.example", "kind": "tls"},
        {**base, "host": "ruled.example", "kind": "denied", "rule": "ruled.example"}]
    show_decisions(page, service, decisions)
    page.wait(f"document.querySelectorAll('.decision').length === {len(decisions)}")
    shown = page.eval("""[...document.querySelectorAll(".decision")].map((row) => [
        row.querySelector("h3").textContent, row.querySelector(".why").textContent,
        row.querySelector("button").hidden ? "" : row.querySelector("button").title])""")
    assert shown == [
        ["ruled.example:443", f"{reason}: ruled.example", "Allow ruled.example"],
        ["no.example:443", reason, ""],
        ["new.example:443", reason, "Allow 10.0.0.2"],
        ["old.example:443", reason, "Allow old.example"]]


def test_rules_are_written_and_removed(outside: str, page: Page, service: Service,
                                       name: str) -> None:
    open_screen(page, service, name, "network")
    page.fill("[aria-label='Host to allow']", "http://no/rule")
    page.press("Enter")
    page.see("no http://, no path", ".problem")
    page.errors.clear()  # the 400 that was asked for
    page.fill("[aria-label='Host to allow']", "localhost:8099")
    page.press("Enter")
    page.see("localhost:8099", ".rules .allow")
    assert not reaches(service, name, "localhost:8099")
    page.see("it is at 127.0.0.1, which is no public address", ".decision.denied")
    page.eval("document.querySelector('.decision button').focus()")
    page.press("Enter")  # allows the address
    page.see(OUTSIDE, ".rules .allow")
    page.wait("document.activeElement.ariaLabel === 'Deny localhost:8099'")
    assert reaches(service, name, "localhost:8099")
    page.click(f"[aria-label='Remove {OUTSIDE}']")
    page.wait("document.querySelectorAll('.rules li').length === 1")
    assert rules(service, name) == {"allow": ["localhost:8099"]}
    assert not reaches(service, name, "localhost:8099")
    page.click("[aria-label='Remove localhost:8099']")
    page.see("No host yet", ".rules")
    page.wait("document.activeElement.ariaLabel === 'Host to allow'")


def test_many_decisions_stay_few_rows_and_nothing_moves_under_the_pointer(outside: str, page: Page,
                                                                          service: Service,
                                                                          name: str) -> None:
    open_screen(page, service, name, "network")
    service.ended(service.job(name, "for i in $(seq 250); do wget -q http://h$i.example/; done"))
    page.see("h250.example:80", ".decision:first-child")
    assert page.eval("document.querySelectorAll('.decision').length") == 200
    page.eval("document.querySelector('.decision button').focus()")
    page.press("Tab")
    page.wait("document.activeElement.ariaLabel === 'Allow h249.example:80'")
    service.ended(service.job(name, "wget -q http://late.example/"))
    page.see("late.example:80", ".decision:last-child")
    assert page.eval("document.activeElement.ariaLabel") == "Allow h249.example:80"
    page.click("#side .brand")
    page.see("Choose a session", "main")
    page.click(f".sessions [href*='{name}']")
    page.wait("document.querySelector('.screen[data-screen=agent]')")
    page.click(".tabs [href$=network]")
    page.see("late.example:80", ".decision:first-child")
    page.see("h249.example:80", ".decisions")


def test_hosts_that_the_log_has_lost_are_shown(outside: str, page: Page, service: Service,
                                               name: str) -> None:
    assert not reaches(service, name) and not reaches(service, name, "other.example")
    log = service.engine.run("inspect", "-f", "{{.LogPath}}", outside).stdout.strip()
    os.truncate(log, 0)  # as it is when the engine begins it anew
    assert not reaches(service, name)
    open_screen(page, service, name, "network")
    page.see("2 times, last", ".decision:first-child")
    page.see("other.example:80", ".decision:last-child")
    page.see("once", ".decision:last-child")
    page.click(".decision:first-child button")
    page.see(OUTSIDE, ".rules .allow")
    assert reaches(service, name)
    page.see("3 times, refused 2", ".decision:first-child")


def test_a_cut_network_is_seen_everywhere_and_comes_back(outside: str, page: Page, service: Service,
                                                         name: str) -> None:
    open_screen(page, service, name, "network")
    page.see("allowlist", ".sessions [aria-current]")
    assert not reaches(service, name)
    page.see(OUTSIDE, ".decision")
    service.engine.run("kill", outside)
    page.see("The network is cut", ".callout")
    page.see("network cut", ".session-head")
    page.see("network cut", ".sessions [aria-current]")
    page.see(OUTSIDE, ".decision")
    page.goto(f"http://{service.address}/preview")
    page.click(f".tile:has([href*='{name}']) .cut")
    page.wait(f"location.hash === '#/s/{name}/network'")
    page.click(".callout button")
    page.wait(
        "!document.querySelector('.callout') && !document.querySelector('.session-head .chip')")
    assert rules(service, name) == {"allow": []}
    assert not reaches(service, name)  # with a 403 of the proxy
    page.see("2 times", ".decision")


def test_other_networks_are_explained(page: Page, service: Service, name: str) -> None:
    service.create(name, network="none")
    open_screen(page, service, name, "network")
    page.see("This session has no network: it reaches nothing but itself.", ".network")
    page.click(".network a")
    page.wait("document.querySelector('.settings')")


# --- Mission control ---


def test_mission_control(page: Page, service: Service, name: str) -> None:
    template = "echo working on {prompt}; sleep ${SECONDS_TO_WORK:-0}; test {prompt} != fail"
    service.create(name, agentPromptCommand=template)
    page.eval("fetch('/auth/logout', { method: 'POST' }).then(() => true)")
    log_in(page, service, "/preview/auth/login")
    assert page.eval("location.pathname") == "/preview"
    tile = f".tile:has([aria-label='Prompt for {name}'])"
    page.see("Idle", tile)
    for prompt, state in (("hello", "Waiting for you"), ("fail", "Failed")):
        page.click(f"{tile} textarea")
        page.type(prompt)
        page.press("Enter")
        page.see(f"working on {prompt}", tile)
        page.see(state, f"{tile} .state")
    page.click(f"{tile} button[title^=Nothing]")
    page.see("Idle", f"{tile} .state")
    service.post(f"/api/sessions/{name}/settings", {"env": {"SECONDS_TO_WORK": "60"}}, method="PUT")
    page.click(f"{tile} textarea")
    page.type("long")
    page.press("Enter")
    page.see("Working", f"{tile} .state")
    page.click("#counts [data-state=working]")
    page.see("working on long", tile)
    page.click(f"{tile} form button:not([hidden]):not(.primary)")
    page.wait(f"document.querySelector({json.dumps(tile)}).dataset.state === 'idle'")


MARKDOWN = r"""# The *result* #

Some **bold with `code`**, *soft*, __strong__, ~~gone~~ and `**kept**`: [link](http://192.0.2.1/x).

| file | `lines` |
|:---|---:|
| **sandbox.py** | 3621 |
| a \| b | 2 |

- first
  * [x] done
1. third

> quoted, \*bare\*

***
2 * 3, 2**8, 2**9, snake_case_name, *.py and *.js, a | b

```sh
# | wc -l | **x**
---
```
"""
PLAIN = """The result

Some bold with code, soft, strong, gone and **kept**: link.

file · lines
sandbox.py · 3621
a | b · 2

• first
  ☑ done
1. third

quoted, *bare*

2 * 3, 2**8, 2**9, snake_case_name, *.py and *.js, a | b

# | wc -l | **x**
---"""


def test_a_tile_shows_markdown_without_its_marks(page: Page, service: Service, name: str) -> None:
    text = "not shown any more\n" * 40 + MARKDOWN + "x" * 1000
    message = {"id": "m", "content": [{"type": "text", "text": text}]}
    event = json.dumps({"type": "assistant", "session_id": "s", "message": message})
    (service.engine.project / "out").write_text(event + "\n")
    service.create(name, agentPromptCommand="cat out; : {prompt}")
    service.ended(service.post(f"/api/sessions/{name}/prompt", {"prompt": "go"}).json)
    page.goto(f"http://{service.address}/preview")
    tail = f"document.querySelector(\".tile:has([aria-label='Prompt for {name}']) .tail\")"
    page.wait(f"{tail}?.textContent.includes('• first')")
    lines = page.eval(f"[...{tail}.children].map((line) => line.textContent)")
    assert len(lines) == 40 and "\n".join([*PLAIN.split("\n"), "x" * 400]) in "\n".join(lines)


def test_mission_control_says_what_cannot_be_prompted(page: Page, service: Service,
                                                      name: str) -> None:
    service.create(name)
    page.goto(f"http://{service.address}/preview")
    tile = f".tile:has([href*='{name}'])"
    page.see("It cannot be prompted: it has no agent prompt command.", tile)
    field = f"document.querySelector({json.dumps(tile)}).querySelector('textarea')"
    assert not page.eval(f"{field}.checkVisibility()")
    page.click(f"{tile} .set-up a")
    page.wait(f"location.hash === '#/s/{name}/settings' && document.querySelector('.settings')")
    service.post(f"/api/sessions/{name}/settings", {"agentPromptCommand": "echo {prompt}"},
                 method="PUT")
    page.click(".tabs a")
    page.wait(f"document.querySelector({json.dumps(BOX)})")
    page.goto(f"http://{service.address}/preview")
    page.wait(
        f"document.querySelector({json.dumps(tile)})?.querySelector('textarea').checkVisibility()")


# --- Everywhere ---

LATE = """{
    const real = fetch, gate = new Promise((open) => (window.release = open));
    Object.assign(window, { asked: false, pending: 0 });
    window.fetch = async (url, options) => {
        if (String(url).includes(PART)) {
            window.asked = true;
            await gate;
            return real(url, options);
        }
        pending++;
        try {
            const answer = await real(url, options);
            if (answer.headers.get("Content-Type") !== "application/json") return answer;
            return new Response(await answer.text(), answer); // all of it is there
        } finally {
            pending--;
        }
    };
    const frame = () => new Promise(requestAnimationFrame);
    const controls = () => [...document.querySelectorAll("main :is(a, button, input, textarea)")]
        .filter((e) => e.checkVisibility());
    const place = (e) => {
        const { x, y } = e.getBoundingClientRect();
        return `${Math.round(x)},${Math.round(y)}`;
    };
    window.look = async () => {
        do {
            await frame();
            await frame();
        } while (pending); // an answer may lead to another question
        return (window.places = controls().map((e) => [e, place(e)])).length;
    };
    window.moved = async () => {
        await frame();
        await frame();
        return places.filter(([e, was]) => e.checkVisibility() && place(e) !== was)
            .map(([e, was]) => `${e.outerHTML.slice(0, 80)}: ${was} -> ${place(e)}`);
    };
}"""


def moved_by_what_is_late(page: Page, service: Service, path: str, part: str,
                          there: str) -> list[str]:
    """The controls of a page that move when the answers of some addresses come after all else."""
    script = page.call("Page.addScriptToEvaluateOnNewDocument",
                       source=LATE.replace("PART", json.dumps(part)))
    page.call("Page.navigate", url="about:blank")
    page.goto(f"http://{service.address}/#/{path}")
    page.wait("asked && !pending")
    page.eval("look()")
    page.eval("release()")
    page.wait(f"document.querySelector({json.dumps(there)})")
    moved: list[str] = page.eval("moved()")
    page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])
    return moved


def test_what_comes_late_moves_nothing(page: Page, service: Service, name: str) -> None:
    service.create(name)
    for path, part, there in ((f"s/{name}/settings", f"/api/sessions/{name}", ".settings"),
                              (f"s/{name}/terminal", "/terminals", ".term-tab"),
                              ("new", "/api/profiles", "input[value=claude]")):
        assert moved_by_what_is_late(page, service, path, part, there) == [], path


@pytest.mark.parametrize("screen, row, asked", [("command", ".job", ".line"),
                                                ("agent", ".turn", ".ask")])
def test_what_is_asked_before_the_list_has_come_is_shown_once(
    page: Page, service: Service, name: str, screen: str, row: str, asked: str
) -> None:
    service.create(name, agentPromptCommand="{prompt}")
    what = {"command": "command", "agent": "prompt"}[screen]
    service.ended(service.post(f"/api/sessions/{name}/{what}", {what: "true"}).json)
    page.call("Page.addScriptToEvaluateOnNewDocument",
              source=LATE.replace("PART", json.dumps("/jobs?")))
    open_screen(page, service, name, screen)
    submit(page, "false")
    page.see("exit 1", f"{row} .job-foot")
    page.eval("release()")
    page.wait(f"document.querySelector('{row} {asked}').innerText.endsWith('true')")
    shown = page.eval(f"[...document.querySelectorAll('{row} {asked}')].map((e) => e.innerText)")
    assert [text.removeprefix("$ ") for text in shown] == ["true", "false"]


def test_a_press_that_comes_late_on_stop_starts_nothing(page: Page, service: Service,
                                                        name: str) -> None:
    """Where it was there is no other button once the job has ended."""
    wait = "until [ -e go ]; do sleep 0.1; done; rm go"
    service.create(name, agentPromptCommand=f"{wait}; : {{prompt}}")
    go = service.engine.project / "go"
    tile = f".tile:has([aria-label='Prompt for {name}'])"

    def there(stop: str, end: Callable[[], None]) -> str | None:
        """The control that has come to the place of a button."""
        found = json.dumps(stop)
        page.wait(f"document.querySelector({found})?.checkVisibility()")
        at = page.eval(f"((box) => [box.x + box.width / 2, box.y + box.height / 2])"
                       f"(document.querySelector({found}).getBoundingClientRect())")
        go.touch()
        end()
        control: str | None = page.eval("((e) => e.closest('a, button')?.outerHTML)"
                                        f"(document.elementFromPoint({at[0]}, {at[1]}))")
        return control

    open_screen(page, service, name, "agent")
    submit(page, "go on")
    page.see("running", ".turn .job-foot")
    assert there(".job-foot button", lambda: page.see("Ask again", ".job-foot")) is None
    open_screen(page, service, name, "command")
    submit(page, wait)
    page.see("running", ".job .job-foot")
    assert there(".job-foot button", lambda: page.see("Run again", ".job-foot")) is None
    page.goto(f"http://{service.address}/preview")
    service.post(f"/api/sessions/{name}/prompt", {"prompt": "once more"})
    page.see("Working", f"{tile} .state")
    stop = f"{tile} form button:not([hidden]):not(.primary)"
    assert there(stop, lambda: page.see("Waiting for you", f"{tile} .state")) is None


def test_no_tile_moves_under_the_mouse(page: Page, service: Service, name: str) -> None:
    other, own = f"{name}-a", f"{name}-b"
    service.create(own)
    service.ended(service.job(own, "false"))
    page.goto(f"http://{service.address}/preview")
    tile = ".tile:has([href*='{}'])"
    page.see("Failed", tile.format(own))
    button = f"document.querySelector(\"{tile.format(own)} button[title^=Nothing]\")"
    box = f"(({{ x, y }}) => [x + 5, y + 5])({button}.getBoundingClientRect())"

    def is_held() -> bool:  # tiles of other sessions may come and go before
        page.mouse("mouseMoved", page.eval(box))
        return bool(page.eval(f"{button}.matches(':hover')"))

    wait_for(is_held)
    before = page.eval(box)
    service.create(other)
    service.ended(service.job(other, "true"))
    page.see(other)
    assert page.eval(box) == before
    assert service.request("DELETE", f"/api/sessions/{other}").status == 200
    page.wait(f"document.querySelector(\"{tile.format(other)}\").inert")
    assert page.eval(box) == before
    page.mouse("mouseMoved", [0, 0])
    page.wait(f"!document.querySelector(\"{tile.format(other)}\")")


def test_a_link_is_followed_while_the_answer_goes_on(page: Page, service: Service,
                                                     name: str) -> None:
    """A press on what stays is not lost when text comes after it."""
    def event(**what: object) -> str:
        return json.dumps({"type": "stream_event", "session_id": "s", "parent_tool_use_id": None,
                           "event": what}) + "\n"

    def delta(text: str) -> str:
        return event(type="content_block_delta", delta={"type": "text_delta", "text": text})

    begins = event(type="message_start", message={"id": "m"})
    link = delta("See [this](http://192.0.2.1/).\n\n")
    (service.engine.project / "first").write_text(begins + link)
    (service.engine.project / "second").write_text(delta("And **more**."))
    service.create(name, agent="claude", agentPromptCommand="cat first; "
                   "until [ -e go ]; do sleep 0.1; done; cat second; : {prompt}")
    open_screen(page, service, name, "agent")
    page.eval("""document.addEventListener("click", (event) => {
        event.preventDefault();
        window.clicked = event.target.href;
    })""")
    submit(page, "say it")

    def go_on() -> None:
        (service.engine.project / "go").touch()
        page.see("more", ".md strong")

    page.click(".md a", amid=go_on)
    page.wait("window.clicked === 'http://192.0.2.1/'")


def test_a_phone(page: Page, service: Service, name: str) -> None:
    service.create(name, agentPromptCommand="echo answer to {prompt}")
    page.resize(PHONE)
    for screen in ("agent", "command", "network", "settings", "terminal"):
        open_screen(page, service, name, screen)
        time.sleep(0.2)
        width = page.eval("Math.max(document.documentElement.scrollWidth, innerWidth)")
        assert width == PHONE[0], screen
    see_in_terminal(page, "# ")
    # A prompt so short that nothing wraps. No prompt comes before the next line is typed: busybox
    # asks the terminal where the cursor is then, and loses what is typed before the answer.
    enter(page, "clear; PS1='> '; echo sta${x}rted; sleep 100")
    see_in_terminal(page, "started")
    page.click("[data-key=Ctrl]")
    page.type("c")
    see_in_terminal(page, "^C")
    page.type("echo up")
    page.press("Enter")
    see_in_terminal(page, "up")
    page.eval("document.querySelector('.xterm-rows').dataset.before = 1")
    page.click("[data-key=Up]")
    page.click("[data-key='-']")
    see_in_terminal(page, "echo up-")
    page.click(".back")
    page.see("Choose a session", "main")
    page.see(name, ".sessions")
    assert page.eval("document.documentElement.scrollWidth <= innerWidth")
    page.goto(f"http://{service.address}/preview")
    page.see(name)
    assert page.eval("document.documentElement.scrollWidth <= innerWidth")
    page.resize(DESKTOP)


@pytest.mark.parametrize("screen", [*SCREENS, "new", "preview"])
def test_every_control_has_a_name_and_is_reached_by_keyboard(page: Page, service: Service,
                                                             name: str,
                                                             screen: str) -> None:
    service.create(name, agentPromptCommand="echo answer to {prompt}", env={"A": "1"})
    if screen in ("new", "preview"):
        page.goto(f"http://{service.address}{'/preview' if screen == 'preview' else '/#/new'}")
        page.see(name)
    else:
        open_screen(page, service, name, screen)
    if screen == "terminal":
        see_in_terminal(page, "# ")  # in a rootless container too one is root
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "link", "textbox", "searchbox", "combobox", "radio", "checkbox", "tab"}
    controls = [node for node in nodes
                if not node.get("ignored") and node.get("role", {}).get("value") in roles]
    assert len(controls) > 5
    assert [node for node in controls if not node.get("name", {}).get("value")] == []
    page.eval("document.activeElement.blur()")
    if screen == "terminal":
        page.wait("document.querySelector('.xterm-helper-textarea').focus() ?? true")
        page.press("l", modifiers=CONTROL | SHIFT)  # the way out
    reached = set()
    for _ in range(60):
        page.press("Tab")
        reached.add(page.eval(
            "document.activeElement.ariaLabel + document.activeElement.textContent.slice(0, 20)"))
    assert len(reached) > 4


def roles(page: Page, role: str) -> list[Any]:
    """The nodes of a role that a screen reader finds."""
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    return [node for node in nodes if not node["ignored"] and node["role"]["value"] == role]


def is_top(heading: Any) -> bool:
    return {"name": "level", "value": {"type": "integer", "value": 1}} in heading["properties"]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_view_has_one_main_part_one_title_and_only_tabs_among_tabs(
    page: Page, service: Service, name: str, size: tuple[int, int]
) -> None:
    service.create(name)
    page.resize(size)
    page.call("Accessibility.enable")
    views = ["/", "/#/new", *(f"/#/s/{name}/{screen}" for screen in SCREENS),
             "/preview", "/auth/login", "/preview/auth/login"]
    for view in views:
        page.call("Page.navigate", url="about:blank")
        page.goto(f"http://{service.address}{view}")
        page.wait("document.querySelector('h1')")
        if view.endswith("terminal"):
            see_in_terminal(page, "# ")
            tabs = "[...document.querySelectorAll('[role=tablist] *')].map((e) => e.role)"
            assert page.eval(tabs) == ["tab"]
        assert len(roles(page, "main")) == 1, view
        assert len([node for node in roles(page, "heading") if is_top(node)]) == 1, view
    page.resize(DESKTOP)


DEV_SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print("asked", self.path, "with", self.headers["Cookie"], flush=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")
server = http.server.HTTPServer(("", 8000), Handler)
print("listening", flush=True)
server.serve_forever()
"""


@pytest.mark.parametrize(
    "host, other", [("sandbox.localhost", "127.0.0.1"), ("127.0.0.1", "localhost")]
)
def test_what_a_session_publishes_does_not_get_the_login(
    browser: Browser, service: Service, name: str, host: str, other: str
) -> None:
    """Opened by the page's link; typed with the page's name it shows what would go."""
    port = free_port()
    write_config(service.engine.home, ports=[f"{port}:8000"])
    service.create(name)
    job = service.job(name, f"python3 -c '{DEV_SERVER}'")
    page = browser.page()
    page.call("Network.clearBrowserCookies")
    page.goto(f"http://{host}:{service.port}/auth/login")
    fill_login(page)
    page.goto(f"http://{host}:{service.port}/#/s/{name}/command")
    page.wait("document.querySelector('.session-head a.port')")
    link = page.eval("document.querySelector('.session-head a.port').href")
    assert link == f"http://{other}:{port}/"
    events = service.events(job)
    next(text for kind, text, _ in events if kind == "stdout" and "listening" in text)
    typed = f"http://{host}:{port}/"
    for url, path, cookie in ((link, "link", "None"), (typed, "typed", f"sandbox_{service.port}=")):
        page.goto(url + path)
        asked = next(text for kind, text, _ in events if kind == "stdout" and f"/{path} " in text)
        assert f"/{path} with {cookie}" in asked
    page.close()
