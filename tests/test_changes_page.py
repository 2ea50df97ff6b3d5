"""What turns have changed, in a real Chromium: their log, patches, undo and redo.

The directory, the jobs and the snapshots are real; what the pages see is the same on all engines.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DESKTOP, PHONE, Browser, Page
from conftest import write_config
from fuzz import NASTY, written
from service import Service
from test_agents import IMAGE
from test_browser import test_every_control_has_a_name_and_is_reached_by_keyboard as every_control
from test_browser import watched

pytestmark = pytest.mark.parametrize("engine", ["docker"], indirect=True, scope="session")

LINES = 5000
BODY = "document.querySelector('.change .files')"
ACT = ".change-head button:last-child"


@pytest.fixture
def page(browser: Browser, service: Service, session: str) -> Iterator[Page]:
    with watched(browser, service) as page:
        yield page
        page.resize(DESKTOP)


@pytest.fixture
def session(service: Service, name: str) -> str:
    """A session of an image with git, whose prompts are scripts."""
    write_config(service.engine.home, imageName=IMAGE.partition(":")[0], checkpoint=True,
                 agentPromptCommand="sh -c {prompt}")
    service.create(name)
    return name


def turn(service: Service, session: str, script: str) -> str:
    """Have a script run as a turn, whose title is its first line; its id."""
    job = service.ended(service.post(f"/api/sessions/{session}/prompt", {"prompt": script}).json)
    assert job["exit"] == 0 and job["changes"]["turn"] == job["id"], job
    return str(job["id"])


def open_changes(page: Page, service: Service, session: str, turn: str = "") -> None:
    page.call("Page.navigate", url="about:blank")
    page.goto(f"http://{service.address}/#/s/{session}/changes" + (turn and f"/{turn}"))
    page.wait("document.querySelector('.change .files:not([hidden])')?.children.length || "
              "document.querySelector('.blank')")


def rows(page: Page, turn: str) -> list[str]:
    """The files of a turn as they can be read."""
    found: list[str] = page.eval(
        f"[...document.querySelectorAll('.change[data-turn=\"{turn}\"] .files > ul > li')]"
        ".map((row) => row.innerText.replace(/\\s*\\n\\s*/g, ' '))")
    return found


def labelled(label: str) -> str:
    return f"[aria-label={json.dumps(label)}]"


def confirm(page: Page, *named: str) -> None:
    """Say yes to a question that names what will change."""
    for text in named:
        page.see(text, "dialog")
    page.click("dialog .danger")
    page.wait("!document.querySelector('dialog')")


def test_a_turn_is_shown_undone_and_done_again(page: Page, service: Service, session: str) -> None:
    top = service.engine.project
    (top / "shop.py").write_text("def total(prices):\n    return sum(prices)\n")
    (top / "gone.txt").write_text("gone\n")
    open_changes(page, service, session)
    page.see("No turn yet", ".blank")
    first = turn(service, session, """# The tests fail.
        sed -i 's/sum(prices)/round(sum(prices), 2)/' shop.py; rm gone.txt; mkdir -p .git/hooks
        echo true >.git/hooks/pre-commit; chmod +x .git/hooks/pre-commit""")
    after = (top / "shop.py").read_text()
    page.see("# The tests fail.", ".change .what")  # told by the job
    page.see("3 files · +2 −2", ".change .facts")
    page.see("1 warning", ".change .facts")
    page.wait(f"{BODY}.querySelector('li')")
    assert rows(page, first) == [
        "new .git/hooks/pre-commit +1 −0 Undo Look at it: git runs it at a commit, merge or "
        "checkout; it can be executed, which is new",
        "deleted gone.txt +0 −1 Undo", "changed shop.py +1 −1 Undo"]
    page.click(".files li:last-child .file")
    lines = page.eval("[...document.querySelectorAll('.patch .slice > div')].map((line) => "
                      "[line.className, line.dataset.number, line.textContent])")
    assert lines == [["hunk", "", "@@ -1,2 +1,2 @@"], ["", "1", " def total(prices):"],
                     ["minus", "2", "-    return sum(prices)"],
                     ["plus", "2", "+    return round(sum(prices), 2)"]]
    page.click(".files li:last-child .file")
    assert not page.eval("document.querySelector('.patch').checkVisibility()")

    page.click(ACT)
    page.see("gone.txt", "dialog")
    page.click("dialog .quiet")
    page.wait("!document.querySelector('dialog')")
    assert (top / "shop.py").read_text() == after and not (top / "gone.txt").exists()
    page.click(ACT)
    confirm(page, "Undo “# The tests fail.”?", f"In {top.name} this changes 5 paths:",
            "new gone.txt", "changed shop.py", "deleted .git/hooks/pre-commit")
    page.see("Undone: 5 paths:", ".change [role=status]")
    page.see("undone", ".change.undone .facts")
    assert "round" not in (top / "shop.py").read_text()
    assert (top / "gone.txt").read_text() == "gone\n"
    assert not (top / ".git" / "hooks" / "pre-commit").exists()
    page.see("Redo", ".change.undone .change-head")
    page.click(".change.undone " + ACT)
    confirm(page, "Redo “# The tests fail.”?")
    page.wait("!document.querySelector('.change.undone')")
    assert (top / "shop.py").read_text() == after and not (top / "gone.txt").exists()

    page.click(".tabs a:first-child")
    page.see("3 files +2 −2, 1 warning", ".job-foot a")  # of the answer
    turn(service, session, "echo more >>shop.py")
    page.goto(f"http://{service.address}/preview")
    tile = f".tile:has([href*='{session}'])"
    page.see("1 file +1 −0", f"{tile} .changes")
    page.click(f"{tile} .changes")
    page.see("shop.py", ".change:first-child .files")
    page.goto(f"http://{service.address}/#/s/{session}/agent")
    page.see("3 files +2 −2, 1 warning", ".turn:first-child .job-foot a")
    page.click(".turn:first-child .job-foot a")
    page.see("gone.txt", f".change[data-turn='{first}'] .files")
    assert not page.eval("document.querySelector('.change:first-child .files').checkVisibility()")


def test_one_file_is_undone_with_the_keyboard_and_another_ones_edit_stays(
    page: Page, service: Service, session: str
) -> None:
    top = service.engine.project
    for file in ("a", "b", "c"):
        (top / file).write_text("one\ntwo\nthree\nfour\nfive\n")
    id = turn(service, session, "sed -i s/one/ONE/ a b c")
    (top / "b").write_text((top / "b").read_text().replace("five", "FIVE"))
    (top / "c").write_text((top / "c").read_text().replace("ONE", "eins"))
    open_changes(page, service, session, id)
    page.wait("document.querySelectorAll('.files li').length === 3")
    page.eval("document.querySelector('.turn-line').focus()")
    focused = "(({ ariaLabel, innerText }) => ariaLabel ?? innerText)(document.activeElement)"
    order = []
    for _ in range(7):
        page.press("Tab")
        order.append(page.eval(focused).split("\n"))
    assert order == [["Undo sed -i s/one/ONE/ a b c"],
        ["changed", "a", "+1 −1"], ["Undo a"], ["changed", "b", "+1 −1"], ["Undo b"],
        ["changed", "c", "+1 −1"], ["Undo c"]]
    page.eval("document.querySelector('[aria-label=\"Undo b\"]').focus()")
    page.press("Enter")
    page.see("changed b", "dialog")
    page.wait("document.activeElement.closest('dialog')")
    page.press("Tab")
    page.press("Enter")
    page.wait("document.activeElement.getAttribute('aria-label') === 'Redo b'")
    assert (top / "b").read_text() == "one\ntwo\nthree\nfour\nFIVE\n"
    assert (top / "a").read_text().startswith("ONE")
    page.press("Enter")
    page.wait("document.activeElement.closest('dialog')")
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")
    assert (top / "b").read_text() == "one\ntwo\nthree\nfour\nFIVE\n"
    page.click("[aria-label='Redo b']")
    confirm(page, "Redo b?")
    page.wait("document.querySelector('[aria-label=\"Undo b\"]')")
    assert (top / "b").read_text() == "ONE\ntwo\nthree\nfour\nFIVE\n"

    of = f".change[data-turn='{id}']"
    page.click("[aria-label='Undo c']")
    page.see("Nothing would change.", f"{of} [role=status]")
    page.see("c — both have changed it", f"{of} [role=status]")
    page.click(f"{of} {ACT}")
    confirm(page, "changes 2 paths:", "Left as before: 1 path", "c — both have changed it")
    page.see("Undone: 2 paths:", f"{of} [role=status]")
    page.see("c — both have changed it", f"{of} [role=status]")
    assert (top / "c").read_text().startswith("eins")
    assert (top / "a").read_text().startswith("one")


HOSTILE = """# \x1b]0;owned\x07 <b>bold</b> \u202egnp.
""" + r"""python3 -c '
import os
names = [b"<img src=x onerror=alert(1)>", b"line\nbreak", b"esc\x1b[31m", b"by\xfftes\x85",
         "evil\u202egnp.exe".encode(), b"\"quoted\"", b" space ", "tag\U000e0041".encode()]
for name in names:
    with open(name, "wb") as file:
        file.write(b"one\r\n\x1b[2J\xff" + name.replace(b"\n", b""))
        file.write("\u2066\u200b\u0085\u2028".encode())
os.symlink("/etc/passwd", "link")
open("bin", "wb").write(bytes(range(256)))
os.mkfifo("fifo")
'"""


def test_what_an_agent_has_written_is_seen_and_not_obeyed(page: Page, service: Service,
                                                          session: str) -> None:
    id = turn(service, session, HOSTILE)
    open_changes(page, service, session, id)
    page.see("fifo", ".files")
    what = page.eval("document.querySelector('.what').textContent")
    assert what == "# ?]0;owned? <b>bold</b> ?gnp."
    names = "[...document.querySelectorAll('.files .path')].map((path) => path.textContent)"
    assert sorted(page.eval(names)) == sorted([
        "<img src=x onerror=alert(1)>", "line\\x0abreak", "esc\\x1b[31m", "by\\xfftes\\x85",
        "evil\\u202egnp.exe", '"quoted"', " space ", "tag\\u{e0041}", "link", "bin", "fifo"])
    page.eval("document.querySelectorAll('.file').forEach((button) => button.click())")
    page.wait("document.querySelectorAll('.file-body > *').length === 11 && "
              "!document.querySelector('.files').textContent.includes('Loading')")
    text = page.eval("document.querySelector('.files').textContent")
    for seen in ("one\\x0d", "\\x1b[2J\\xff", "\\u2066\\u200b\\u0085\\u2028", "It is no text,",
                 "What it held was not kept: it is a fifo.",
                 "a link that leads out of the directory"):
        assert seen in text, seen
    assert not page.eval("document.querySelector('.changes :is(img, b, script)')")
    hidden = r"/(?![\n])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/u"
    assert not page.eval(f"{hidden}.test(document.querySelector('.changes').textContent)")
    labels = ("[...document.querySelectorAll('.changes [aria-label]')]"
              ".map((e) => e.ariaLabel).join('')")
    assert not page.eval(f"{hidden}.test({labels})")
    for name, button in ((b"by\xfftes\x85", "by\\xfftes\\x85"), (b'"quoted"', '"quoted"'),
                         (b"line\nbreak", "line\\x0abreak")):
        there = Path(os.fsdecode(os.path.join(os.fsencode(service.engine.project), name)))
        assert there.exists()
        page.click(labelled(f"Undo {button}"))
        confirm(page, "deleted", button)
        page.wait(f"document.querySelector({json.dumps(labelled(f'Redo {button}'))})")
        assert not there.exists()


def test_a_patch_that_comes_into_view_moves_nothing(page: Page, service: Service,
                                                    session: str) -> None:
    id = turn(service, session, f"for name in $(seq 30); do seq 3 >$name; done; seq {LINES} >long")
    open_changes(page, service, session, id)
    page.see("long", ".files")
    page.eval("document.querySelectorAll('.file').forEach((button) => button.click())")
    page.wait(f"document.querySelectorAll('.slice > div').length === 31 + 90 + {LINES}")
    heights = page.eval("""(async () => {
        const page = document.querySelector(".scroll"), heights = [page.scrollHeight];
        for (const row of document.querySelectorAll(".files li")) {
            row.scrollIntoView();
            for (let frames = 0; frames < 4; frames++)
                await new Promise(requestAnimationFrame);
            heights.push(page.scrollHeight);
        }
        return heights;
    })()""")
    assert len(set(heights)) == 1, heights


def test_a_long_patch_comes_in_slices(page: Page, service: Service, session: str) -> None:
    """Five thousand lines are all there soon; of a longer one there is a way to more."""
    long = "yes '{}' | head -c 3000000 >{}"
    service.ended(service.job(session, long.format("old", "replaced")))
    id = turn(service, session, f"seq {LINES} >middle; seq 25000 >long; " + "; ".join([
        long.format("one of many", "many"), long.format("new", "replaced")]))
    open_changes(page, service, session, id)
    page.see("middle", ".files")
    lines = "document.querySelectorAll('.file-body:not([hidden]) .slice > div').length"
    page.click(".files li:nth-child(3) .file")
    page.wait(f"{lines} === {LINES} + 1")
    page.click(".files li:nth-child(3) .file")
    page.click(".files li:nth-child(1) .file")
    page.wait(f"{lines} === 10000")
    page.click(".file-body:not([hidden]) .patch > button")
    page.wait(f"{lines} === 20000")
    page.click(".files li:nth-child(1) .file")
    for number, told in ((2, "Show more lines"), (4, "The rest is too long to be shown.")):
        page.click(f".files li:nth-child({number}) .file")
        page.see(told, f".files li:nth-child({number})")
        page.wait(f"{lines} === 10000")
        page.click(f".files li:nth-child({number}) .file")


def test_no_request_for_a_tab_that_is_not_open(page: Page, service: Service, session: str) -> None:
    """Nor one more than the turn and its files as long as nothing happens."""
    id = turn(service, session, "echo a >a")
    open_changes(page, service, session, id)
    page.see("a", ".files")
    lists = "performance.getEntriesByName(location.origin + '/api/sessions').length"
    before = page.eval(lists)
    page.wait(f"{lists} > {before} + 2", 60)
    asked = [url for url in page.requests if "/changes" in url and "/ui/" not in url]
    assert len(asked) == 2, asked
    page.click(".tabs a:first-child")
    page.wait("document.querySelector('.screen[data-screen=agent]')")
    page.requests.clear()
    turn(service, session, "echo b >b")
    before = page.eval(lists)
    page.wait(f"{lists} > {before}", 60)
    assert not [url for url in page.requests if "/changes" in url]


# What contrast the text of each element has with what is behind it, as WCAG counts it.
CONTRAST = """[...document.querySelectorAll(".changes *")].filter((e) =>
    e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
.map((e) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const layers = [];
    for (let at = e; at; at = at.parentElement)
        layers.unshift(getComputedStyle(at).backgroundColor);
    const paint = (colour) => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); };
    const luminance = () => {
        const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((c) => c / 255)
            .map((c) => c <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const ratios = [null, "::before"].map((pseudo) => {
        layers.forEach(paint);
        const behind = luminance();
        paint(getComputedStyle(e, pseudo).color);
        const [low, high] = [behind, luminance()].sort((a, b) => a - b);
        return (high + .05) / (low + .05);
    });
    return [Math.min(...ratios), e.className + " " + e.textContent.slice(0, 30)];
}).filter(([ratio]) => ratio < 4.5)"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_can_be_read_everywhere(page: Page, service: Service, session: str,
                                   size: tuple[int, int], dark: bool) -> None:
    top = service.engine.project
    (top / "file").write_text("before\n")
    long = "x" * 300
    id = turn(service, session, f"# {'What is it? ' * 20}\necho {long} >file; chmod +x file\n"
              f"printf '\\33[31m' >{long[:200]}; mkdir .git; echo >.git/config")
    turn(service, session, f"# {long}\necho more >>file")
    page.resize(size, dark)
    open_changes(page, service, session, id)
    page.see("Look at it:", f".change[data-turn='{id}'] .files")
    page.eval("document.querySelectorAll('.file').forEach((button) => button.click())")
    page.wait("document.querySelector('.patch .minus')")
    assert page.eval("document.documentElement.scrollWidth <= innerWidth")
    assert page.eval("[...document.querySelectorAll('.scroll, .patch, .tabs')]"
                     ".every((e) => e.scrollWidth <= e.clientWidth)")
    page.click(f".change[data-turn='{id}'] {ACT}")
    page.wait("document.querySelector('dialog')")
    box = "document.querySelector('dialog').getBoundingClientRect()"
    assert page.eval(f"0 < {box}.left && {box}.right < innerWidth")
    shown = ".turn-line:has(+ .row button:first-child:not([hidden]))"
    assert page.eval(f"document.querySelector('{shown}').offsetWidth >= 240")
    page.press("Escape")
    page.wait("!document.querySelector('dialog')")
    assert page.eval(CONTRAST) == []


ODD: list[Any] = [*NASTY, 5, None, "text", ["a"], {"toString": 1, "toLocaleString": 1}, True]


def test_rows_of_odd_types_hide_no_others(page: Page, service: Service) -> None:
    """What a container answers in place of its shadow."""
    event = {"id": "t", "kind": "turn", "when": "2026-11-22T00:00:00Z", "what": "prompt",
             "command": "say", "after": "1", "files": 1, "added": 1, "deleted": 1, "risky": 1,
             "state": "", "turns": ["t"], "paths": [""]}
    file = {"path": "a", "status": "modified", "oldMode": "100644", "newMode": "100755", "size": 1,
            "binary": False, "added": 1, "deleted": 1, "risk": ["odd"], "kept": True, "why": "w",
            "patch": "@@ -1 +1 @@\n-a\n+b\n", "truncated": False}

    def variants(whole: dict[str, Any], key: str) -> list[Any]:
        found = [{**whole, key: f"{field}{index}", field: value}
                 for field in whole for index, value in enumerate(ODD)]
        return [*ODD, *found, {**whole, key: "the-last-one"}]

    log = {"turns": variants(event, "id"), "read": []}
    diff = {"files": variants(file, "path"), "more": "x"}
    page.goto(f"http://{service.address}/")
    page.eval(f"""(async () => {{
        const base = document.querySelector("script[type=module]").src.replace(/main.js$/, "");
        const {{ mount }} = await import(base + "changes.js");
        const real = fetch, log = {json.dumps(written(log))}, diff = {json.dumps(written(diff))};
        window.fetch = async (url, options) => !url.includes("/shown/") ? real(url, options)
            : new Response(url.includes("/diff") ? diff : log);
        const root = document.body.appendChild(document.createElement("div"));
        root.id = "shown";
        mount(root, {{ name: "shown", session: {{ name: "shown" }}, turn: "the-last-one" }});
    }})()""")
    page.wait("document.querySelector('#shown .files li')", 60)
    while page.eval("(() => { const more = document.querySelector('.files > button:not([hidden])');"
                    " more?.click(); return Boolean(more); })()"):
        pass
    page.eval("document.querySelectorAll('.file').forEach((button) => button.click())")
    assert page.eval("document.querySelectorAll('.files > ul > li').length") == len(diff["files"])
    assert page.eval("document.querySelectorAll('.change').length") > len(log["turns"]) / 2
    assert page.eval("document.querySelectorAll('.undrawn').length") == 0
    assert "could not be shown" not in page.text()


# --- Copies ---


def test_one_prompt_to_several_agents_and_the_merge_of_one(page: Page, service: Service,
                                                           session: str) -> None:
    top, engine = service.engine.project, service.engine
    (top / "file").write_text("one\ntwo\n")
    assert service.request("DELETE", f"/api/sessions/{session}").status == 200
    given = engine.home / "given.env"
    given.write_text("GIVEN=1\n")
    # A session's own isolation holds for what is made of it.
    made = engine.sandbox("run", "-n", session, "--net", "none", "--ef", str(given), "--memory",
                          "700m", "-v", f"{engine.home}:/given:ro", "-x", "true")
    assert made.returncode == 0, made.stderr
    open_changes(page, service, session)
    page.click(".scroll > div > .row button")
    page.see("One prompt to several agents", "dialog")
    chosen = "[...document.querySelectorAll('dialog select')].map((select) => select.value)"
    assert len({*page.eval(chosen)[:2]}) == 2 and page.eval(chosen)[2] == ""
    page.click("dialog textarea")
    page.type("sed -i s/one/ONE/ file; echo x >new; mkdir .git; echo >.git/config; date +%N >own")
    page.click("dialog .primary")
    page.wait("!document.querySelector('dialog')", 90)
    names = [f"{session}-2", f"{session}-3"]
    for number, name in enumerate(names, 1):
        card = f".copies .card:nth-child({number})"
        page.see(name, card)
        page.see("4 files +4 −1, 1 warning", card, 60)
    rows = {row["name"]: row for row in service.get("/api/sessions").json}
    assert [rows[name]["workspace"] for name in names] == ["copy"] * 2
    assert len({rows[name]["agent"] for name in names}) == 2
    assert [rows[name]["network"] for name in names] == ["none"] * 2
    for name in names:
        inside = engine.sandbox("run", "-n", name, "-x", "echo $GIVEN; ls -d /given")
        assert inside.stdout == "1\n/given\n", inside
        limit = engine.run("inspect", "--format", "{{.HostConfig.Memory}}", name)
        assert limit.stdout == f"{700 << 20}\n"
    assert (top / "file").read_text() == "one\ntwo\n" and not (top / "new").exists()
    (top / "file").write_text("one\ntwo\nthree\n")
    page.click(labelled(f"Merge {names[0]}"))
    confirm(page, f"Merge {names[0]}?", f"In {top.name} this changes 3 paths:", "changed file",
            "new new")
    page.see("Merged: 3 paths:", ".copies .card:nth-child(1)")
    assert (top / "file").read_text() == "ONE\ntwo\nthree\n"
    assert (top / "new").exists() and not (top / ".git").exists()
    page.click(labelled(f"Merge {names[1]}"))  # whose own differs, and stands in the way
    page.see("Nothing would change.", ".copies .card:nth-child(2)")
    page.see("own — both have changed it", ".copies .card:nth-child(2)")
    assert (top / "file").read_text() == "ONE\ntwo\nthree\n"
    open_changes(page, service, names[0])
    page.see("Merged", ".change:first-child .what")
    page.click(labelled("Undo Merged"))
    confirm(page, "deleted new")
    page.see("Undone: 3 paths:", ".change [role=status]")
    assert (top / "file").read_text() == "one\ntwo\nthree\n" and not (top / "new").exists()
    open_changes(page, service, session)
    page.see("Ask several agents")
    for name in names:
        assert service.request("DELETE", f"/api/sessions/{name}?force=1").status == 200
    page.wait("!document.querySelector('.card')")


def test_an_autostart_that_stays_is_no_work(page: Page, service: Service, session: str) -> None:
    name = f"{session}-2"
    service.create(name, workspace="copy", autostart="sleep 1000")
    turn(service, name, "echo x >made")
    (row,) = [row for row in service.get("/api/sessions").json if row["name"] == name]
    assert (row["jobs"], row["autostarts"]) == (1, 1)
    open_changes(page, service, name)
    page.see("idle", f".copies .card:has([href*='{name}']) .doing")
    page.see("idle", f".sessions a[href*='{name}'] .doing")
    page.goto(f"http://{service.address}/preview")
    page.see("Waiting for you", f".tile:has([href*='{name}']) .state")
    assert service.request("DELETE", f"/api/sessions/{name}?force=1").status == 200


def test_controls_have_names_and_are_reached(page: Page, service: Service, session: str) -> None:
    every_control(page, service, f"{session}-x", "changes")
