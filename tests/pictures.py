#!/usr/bin/env python3
"""Make the pictures of README.md: real pages, engine and agents, and a model with a script.

    python tests/pictures.py    as root, in the environment of the tests, with docker and the image
                                localhost/sandbox:1.0-common; tests/pictures/*.png are what it makes
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import Browser, Page, chromium
from conftest import ROOT, Engine, copy_code, write_config
from service import PASSWORD, Service
from test_agents import ENV_FILE, PORT, STUB_ANSWERS

PICTURES = ROOT / "tests" / "pictures"
TOP = Path("/srv")  # whose paths can be seen
DESKTOP, PHONE = (1080, 610), (390, 660)

# The model of a session: it says the next line of the script whenever an agent with a shell asks.
SCRIPTED = """\
import json
import model_stub
steps = iter(json.load(open("/script.json")))
def reply(prompts, output, tools):
    tool = next((name for name in tools if name in model_stub.SHELL_TOOLS), "")
    step = next(steps, "") if tool else "A shop"
    if not step.startswith("$ "):
        return model_stub.Reply(step)
    return model_stub.Reply(tool=tool, arguments=model_stub.SHELL_TOOLS[tool](step[2:]))
model_stub.reply = reply
model_stub.main()
"""

START = f"""setsid -f python3 /scripted.py {PORT} >/dev/null 2>&1 </dev/null
{STUB_ANSWERS}"""

FILES = {
    "shop": {
        "shop.py": "def total(prices):\n    return sum(prices)\n",
        "test_shop.py": "from unittest import TestCase\nfrom shop import total\n\n\n"
                        "class Total(TestCase):\n"
                        "    def test_nothing(self):\n"
                        "        self.assertEqual(total([]), 0)\n\n"
                        "    def test_cents(self):\n"
                        "        self.assertEqual(total([0.1, 0.2]), 0.3)\n",
    },
    "site": {"index.html": "<a href=prices.html>\n", "prices.html": "<a href=index.html>\n"},
    "wiki": {"monday.md": "call the printer\n", "tuesday.md": "paper is back\n"},
    "tools": {"backup.sh": "#!/bin/sh\ntar czf /backup/$(date +%F).tgz /srv\n"},
}
TURNS = {
    "shop": ("claude", "The tests fail. Find out why, and mend it.", [
        "$ python3 -m unittest -q 2>&1 | grep -A8 ^FAIL",
        "$ sed -i 's/sum(prices)/round(sum(prices), 2)/' shop.py && python3 -m unittest",
        "**Both tests pass now.** `total` added binary fractions; I round the sum to cents.\n\n"
        "| prices | before | now |\n|---|---|---|\n| 0.10 + 0.20 | 0.30000000000000004 | 0.3 |\n\n"
        "Shall I count in whole cents instead?"]),
    "site": ("gemini", "Does every link lead somewhere?", [
        "$ grep -ho 'href=[a-z.]*' *.html",
        "Both links do: `index.html` and `prices.html` name each other."]),
    "wiki": ("codex", "Sum my notes up in one line.", [
        "$ cat *.md", "The printer was called on Monday, and on Tuesday there is paper again."]),
    "tools": ("opencode", "Is backup.sh safe to run twice a day?", [
        "$ cat backup.sh",
        "No: the second run of a day writes over the first. Put the time into the name."]),
}


@contextmanager
def service() -> Iterator[Service]:
    """A service with the sessions of TURNS, each of which has had its turn; all goes again."""
    with tempfile.TemporaryDirectory(prefix="sandbox-pictures-") as area:
        Path(area).chmod(0o755)
        copy_code(Path(area) / "app")
        engine = Engine("docker", "docker", "root", Path(area))
        shutil.copy(ROOT / "tests" / "model_stub.py", area)
        Path(area, "scripted.py").write_text(SCRIPTED)
        Path(area, "stub.env").write_text(ENV_FILE)
        there = [str(TOP / name) for name in TURNS if (TOP / name).exists()]
        assert not there, f"remove these first: {there}"
        served = Service(engine)
        try:
            for name, (agent, prompt, steps) in TURNS.items():
                (TOP / name).mkdir()
                for file, text in FILES[name].items():
                    (TOP / name / file).write_text(text)
                Path(area, f"{name}.json").write_text(json.dumps(steps))
                volumes = [f"{area}/{file}:/{file}:ro" for file in ("model_stub.py", "scripted.py")]
                write_config(engine.home, imageName="localhost/sandbox",
                             envFile=[f"{area}/stub.env"], network={"allow": ["pypi.org"]},
                             volumes=[*volumes, f"{area}/{name}.json:/script.json:ro"])
                served.create(name, agent=agent, directory=str(TOP / name))
                served.ended(served.job(name, START))
                ask(served, name, prompt)
            yield served
        finally:
            for name in TURNS:
                served.request("DELETE", f"/api/sessions/{name}")
                shutil.rmtree(TOP / name, ignore_errors=True)
            served.end()


def ask(served: Service, name: str, prompt: str) -> None:
    job = served.post(f"/api/sessions/{name}/prompt", {"prompt": prompt}).json
    *output, (_, ended, _) = served.events(job)  # which ends with it
    assert ended["exit"] == 0, output


def only_ours(page: Page) -> None:
    """Hide other sessions of this machine's engine from the pages."""
    page.call("Page.addScriptToEvaluateOnNewDocument", source=f"""{{
        const names = {json.dumps(list(TURNS))};
        const real = Response.prototype.json;
        Response.prototype.json = async function () {{
            const data = await real.call(this);
            if (!Array.isArray(data) || !data[0]?.runtime) return data;
            return data.filter((session) => names.includes(session.name));
        }};
    }}""")


def opened(browser: Browser, served: Service, path: str, size: tuple[int, int], dark: bool) -> Page:
    """A page of ours, behind the login, in a window of this size."""
    page = browser.page()
    page.resize(size, dark)
    phone = size[0] < 500  # whose own two pixels for each would make a large file
    page.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1],
              deviceScaleFactor=1.25 if phone else 1, mobile=phone)
    only_ours(page)
    page.call("Network.clearBrowserCookies")
    page.goto(f"http://{served.address}/auth/login")
    page.fill("#username", "admin")
    page.fill("#password", PASSWORD)
    page.press("Enter")
    page.wait("!location.pathname.includes('login') && document.readyState === 'complete'")
    page.goto(f"http://{served.address}{path}")
    return page


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with service() as served, chromium() as browser:
        page = opened(browser, served, "/#/s/shop/agent", DESKTOP, False)
        page.see("Both tests pass now", ".md")
        page.screenshot(PICTURES / "agent.png")
        page = opened(browser, served, "/preview", PHONE, True)
        page.see("Both tests pass now")
        page.wait(f"document.querySelectorAll('.tile[data-state=waiting]').length === {len(TURNS)}")
        page.screenshot(PICTURES / "phone.png")
    for picture in PICTURES.iterdir():
        print(picture.relative_to(ROOT), picture.stat().st_size)


if __name__ == "__main__":
    main()
