"""What a cluster alone decides of sessions; what they do everywhere is tested on it, too, in the
files of that: see `everywhere` in conftest.py. It is a real one of two nodes.
"""

import concurrent.futures
import errno
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import RUN, Cluster
from conftest import ROOT, Engine, on, unique_name
from service import Service, wait_for
from test_agents import IMAGE as AGENTS_IMAGE
from test_agents import build, prompted, stub_config, texts
from test_network import decisions

import sandbox_kube

pytestmark = on("kubernetes")


@pytest.fixture
def cluster(engine: Engine, home: Path, project: Path) -> Cluster:
    assert isinstance(engine, Cluster)
    engine.remove(engine.session_ids())  # what could not be removed after a test before
    (project / "here").write_text("ours\n")
    return engine


@pytest.fixture
def name() -> str:
    """Without a host: that of the configuration is meant."""
    return unique_name()


# --- Life of a session ---


def test_a_session_keeps_what_it_has_and_leaves_nothing(cluster: Cluster, name: str) -> None:
    first = cluster.must("run", "-n", name, "-x", "pwd; cat here; echo kept | tee ~/state made")
    assert first.stdout == f"{cluster.project}\nours\nkept\n"
    data = os.urandom(10_000_000)
    (cluster.project / "big").write_bytes(data)
    cluster.must("cp", "big", f"{name}@k8s:copied")
    cluster.must("cp", f"{name}@k8s:copied", "back")
    assert (cluster.project / "back").read_bytes() == data
    cluster.must("stop", f"{name}@k8s")
    assert not cluster.pod(name)
    [row] = json.loads(cluster.must("ps", "--json", "--on", "k8s").stdout)
    assert (row["name"], row["state"], row["runtime"]) == (f"{name}@k8s", "exited", "kubectl")
    cluster.must("rename", f"{name}@k8s", "Anew_1")
    assert cluster.must("run", "-n", "Anew_1", "-x", "cat ~/state made").stdout == "kept\nkept\n"
    cluster.must("recreate", "-f", "Anew_1@k8s", "--memory", "256m")
    spec = json.loads(cluster.kubectl("get", cluster.pod("Anew_1"), "-o", "json"))["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"memory": "256Mi"}
    again = cluster.must("run", "-n", "Anew_1", "-x", "cat ~/state; ls copied")
    assert again.stdout == "kept\ncopied\n"
    copied = cluster.must("run", "--from", "Anew_1@k8s", "-n", f"{name}-2", "-x",
                          "cat ~/state made")
    assert copied.stdout == "kept\nkept\n"
    cluster.must("rm", "-f", f"{name}-2@k8s")
    cluster.must("merge", "Anew_1@k8s")
    assert (cluster.project / "made").read_text() == "kept\n"
    cluster.must("rm", "-f", "Anew_1@k8s")
    wait_for(lambda: not cluster.left())
    assert not cluster.must("prune", "--on", "k8s").stdout


def test_a_pod_is_contained_and_knows_no_secret(cluster: Cluster, name: str) -> None:
    shown = cluster.must("run", "-n", name, "-e", "TOKEN=s3cret", "-x",
                         'echo "$TOKEN"; cat /proc/*/cmdline; ! ls /var/run/secrets').stdout
    assert shown.startswith("s3cret\n") and shown.count("s3cret") == 1
    spec = json.loads(cluster.kubectl("get", cluster.pod(name), "-o", "json"))["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    status = cluster.must("run", "-n", name, "-x", "grep -E '^(CapBnd|Seccomp):' /proc/self/status")
    bits = sum(1 << number for number in (0, 1, 3, 5, 6, 7, 29))  # those of sandbox.CAPABILITIES
    assert status.stdout.split() == ["CapBnd:", f"{bits:016x}", "Seccomp:", "2"]
    # Another user than root, though its kubectl is root's here.
    engine = sandbox_kube.Kubectl("k8s", ["kubectl", "--context", "admin", "-n", "agents"])
    argv = engine.exec_argv(cluster.pod(name), ["id", "-u"], user="1234:1234", workdir="/tmp")
    assert cluster._run(argv, None, 60, {}).stdout == "1234\n"


def test_a_port_reaches_this_machine_until_a_signal_ends_the_run(cluster: Cluster,
                                                                 name: str) -> None:
    run = cluster.popen("run", "-n", name, "-p", "18080:8000", "-x",
                        "exec python3 -u -m http.server 8000")
    # A connection of before it listens hangs in the kubelet of 1.20, and those that follow, too.
    assert run.stdout and run.stdout.readline().startswith("Serving")
    ask = ["nsenter", "--net=/run/netns/sbxk-lan",  # where the bed's kubectl runs
           "curl", "-sf", "-m", "5", "http://127.0.0.1:18080/here"]
    wait_for(lambda: subprocess.run(ask, capture_output=True).stdout == b"ours\n")
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 143
    shown = cluster.kubectl("exec", cluster.pod(name), "-c", "session", "--", "ps")
    assert "http.server" not in shown and subprocess.run(ask, capture_output=True).returncode


def test_copies_are_spread_over_the_nodes(cluster: Cluster, name: str) -> None:
    begun = cluster.must("run", "--copies", "8", "-n", name, "-x", "cat here; sleep 600")
    names = {f"{name}-{number}@k8s" for number in range(1, 9)}
    assert {line.split()[0] for line in begun.stdout.splitlines()} == names, begun.stdout
    rows = json.loads(cluster.must("ps", "--json", "--on", "k8s").stdout)
    assert {row["name"] for row in rows if row["state"] == "running"} == names
    pods = json.loads(cluster.kubectl("get", "pods", "-o", "json"))["items"]
    nodes = [pod["spec"]["nodeName"] for pod in pods]
    assert sorted(set(nodes)) == ["one", "two"] and len(nodes) == 8, nodes
    service = Service(cluster)
    try:
        wait_for(lambda: names <= {row["name"] for row in service.get("/api/sessions").json})
    finally:
        service.end()
    wait_for(lambda: cluster.must("logs", f"{name}-8@k8s").stdout.startswith("ours"))


def test_agents_work_on_copies(cluster: Cluster, name: str) -> None:
    """The image is on one of the nodes."""
    build(Engine("docker", "docker", "root", cluster.area))
    cluster.bed("load", AGENTS_IMAGE, "one")
    cluster.kubectl("cordon", "two")
    cluster.configure(imageVersion="1.0-common", **stub_config(cluster, cluster.home))
    cluster.must("run", "--copies", "2", "-n", name, "-y", "c", "--", "-p", "hello", timeout=300)
    names = [f"{name}-1@k8s", f"{name}-2@k8s"]
    wait_for(lambda: all("pong hello" in cluster.must("logs", copy).stdout for copy in names), 120)
    service = Service(cluster)
    try:
        blocks = prompted(service, names[0], "please run: echo by-the-agent >made; cat here made")
        assert "ours\nby-the-agent" in texts(blocks)[0], blocks
    finally:
        service.end()
        cluster.kubectl("uncordon", "two")
    cluster.must("merge", names[0])
    assert (cluster.project / "made").read_text() == "by-the-agent\n"


def test_a_claim_is_what_the_host_says(cluster: Cluster, name: str) -> None:
    cluster.configure(hosts={"k8s": {"runtime": "kubectl", "context": "admin", "storage": "7Gi",
                                     "namespace": "agents", "storageClass": "other"}})
    cluster.must("run", "-n", name, "-x", "true")
    claims = json.loads(cluster.kubectl("get", "pvc", "-o", "json"))["items"]
    assert {(claim["spec"]["storageClassName"], claim["spec"]["resources"]["requests"]["storage"])
            for claim in claims} == {("other", "7Gi")}


# --- Network and keys ---

LAN = "10.217.77.1"  # this machine in the bed's network, where pods get by way of their nodes
KEY = f"sk-ant-api03-{secrets.token_hex(8)}"
MODEL = f"""
import http.server, sys
import model_stub

class Handler(model_stub.Handler):
    def do_POST(self):
        super().do_POST() if self.headers["x-api-key"] == KEY else self.send_error(401)

KEY = sys.stdin.readline().strip()
server = http.server.ThreadingHTTPServer(("{LAN}", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""

# What root tries to get out, of probe.py, and a prompt as an agent sends it, with its status.
TRY = (ROOT / "tests" / "probe.py").read_text().partition("\ndef main()")[0] + """
tries = [*direct(sys.argv[1], sys.argv[2:]), *network_administration(),
         *(row for row in shared_directory(True) if "listener" not in row[0])]
for change in ("set eth0 up", "delete eth0"):
    tries.append((change, "failed", lambda: shell(f"ip link {change}")))
for title, expected, action in tries:
    if title != "interfaces" and outcome(action) not in expected.split("|"):
        print(title, outcome(action))
print(len(tries) > 60)
"""
ASK = """
import os, urllib.error, urllib.request
def status(url, data=None, **headers):
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
prompt = b'{"model": "stub", "messages": [{"role": "user", "content": "say it"}]}'
print(status(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", prompt,
             **{"x-api-key": os.environ["ANTHROPIC_API_KEY"]}), status(os.environ["MODEL"]))
"""


@pytest.fixture
def model(cluster: Cluster) -> Iterator[str]:
    """Host and port of a model that wants KEY."""
    with subprocess.Popen(["nsenter", "--net=/run/netns/sbxk-lan", sys.executable, "-c", MODEL],
                          env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL) as stub:
        assert stub.stdin and stub.stdout
        stub.stdin.write(f"{KEY}\n")
        stub.stdin.flush()
        yield f"{LAN}:{stub.stdout.readline().strip()}"
        stub.kill()


def test_an_allowlist_holds_and_a_hidden_key_stays_hidden(cluster: Cluster, name: str,
                                                          model: str) -> None:
    (cluster.home / "keys.env").write_text(f"ANTHROPIC_API_KEY={KEY}\n"
                                           f"ANTHROPIC_BASE_URL=http://{model}\n")
    (cluster.project / "ask.py").write_text(ASK)
    (cluster.project / "try.py").write_text(TRY)
    run = ("run", "-n", name, "--ef", str(cluster.home / "keys.env"), "-e", f"MODEL=http://{model}")

    def ask() -> str:
        return cluster.must(*run, "-x", "python3 ask.py").stdout

    first = cluster.must(*run, "--allow", model, "--keys", "hidden", "-x", "python3 ask.py")
    assert first.stdout == "200 200\n"
    # Root reaches nothing: API server, nodes and kubelets, the proxy and other pods.
    beside = cluster.kubectl("get", "pods", "-l", "sandbox.proxy", "-o",
                             "jsonpath={.items[*].status.podIP}")
    tried = cluster.must(*run, "-x", "python3", "try.py", LAN, "10.217.77.11", "10.217.77.12",
                         "10.96.0.1", beside).stdout
    assert beside and tried == "True\n"
    # The key is in no object, and nowhere in the pod.
    seen = cluster.must(*run, "-x", "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; "
                        "find /home /run /tmp /etc -type f -exec cat {} +").stdout
    assert "ANTHROPIC_API_KEY=" in seen and KEY not in seen
    assert KEY not in cluster.kubectl("get", "pods,configmaps,pvc,events", "-o", "yaml")
    assert KEY not in cluster.kubectl("logs", "-l", "sandbox.proxy", "--tail=-1")
    # Rules change at once, and what was refused is told.
    service = Service(cluster)
    try:
        rules = f"/api/sessions/{name}@k8s/network"
        assert service.post(rules, {"deny": model}).json == {"allow": [], "deny": [model]}
        refused = cluster.must(*run, "-x", "python3 ask.py")
        assert refused.stdout == "200 403\n" and "sandbox net allow" in refused.stderr
        said = next(row for row in decisions(service, f"{name}@k8s") if row["verdict"] == "deny")
        assert said["host"] == LAN
        assert service.post(rules, {"allow": model}).json == {"allow": [model]}
    finally:
        service.end()
    assert '"verdict": "deny"' in cluster.must("net", "log", name).stdout
    # A budget holds, and what was used is known of a pod that is gone.
    cluster.must("budget", name, "1tokens")
    assert ask() == "402 200\n"
    cluster.must("budget", name, "")
    # The proxy comes back elsewhere, for whoever comes first.
    proxy = cluster.kubectl("get", "pods", "-l", "sandbox.proxy", "-o", "name").strip()
    cluster.kubectl("delete", proxy, "--force", "--grace-period=0")
    [row] = json.loads(cluster.must("ps", "--json", "--on", "k8s").stdout)
    assert row["network"] == "cut" and row["keys"] == "hidden"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        assert [*pool.map(lambda _: ask(), range(3))] == ["200 200\n"] * 3
    cluster.must("stop", name)
    assert '"verdict": "deny"' in cluster.must("net", "log", name).stdout
    cluster.must("start", name)
    assert ask() == "200 200\n"
    cluster.must("recreate", "-f", name, "--memory", "256m")
    assert ask() == "200 200\n"
    [used] = json.loads(cluster.must("usage", name, "--json").stdout)
    days = used["days"].values()  # two where midnight was between
    assert sum(day["models"]["stub"]["requests"] for day in days) == 7
    cluster.must("rm", "-f", name)
    wait_for(lambda: not cluster.left(), 180)  # a busy kubelet takes its time to end a proxy
    assert not cluster.must("prune", "--on", "k8s").stdout


STRICT = """
apiVersion: v1
kind: Namespace
metadata: {name: strict}
---
apiVersion: policy/v1beta1
kind: PodSecurityPolicy
metadata:
  name: strict
  annotations: {seccomp.security.alpha.kubernetes.io/allowedProfileNames: "*"}
spec:
  allowedCapabilities: [AUDIT_WRITE, CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID]
  volumes: ["*"]
  seLinux: {rule: RunAsAny}
  runAsUser: {rule: RunAsAny}
  supplementalGroups: {rule: RunAsAny}
  fsGroup: {rule: RunAsAny}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: strict, namespace: strict}
rules:
- {apiGroups: [policy], resources: [podsecuritypolicies], resourceNames: [strict], verbs: [use]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: strict, namespace: strict}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: strict}
subjects: [{kind: Group, apiGroup: rbac.authorization.k8s.io, name: "system:authenticated"}]
"""


def test_a_network_that_cannot_be_cut_off_is_refused(cluster: Cluster, name: str) -> None:
    """In a namespace that forbids NET_ADMIN, as the baseline of Pod Security does."""
    cluster.kubectl("apply", "--validate=false", "-f", "-", "-n", "strict", input=STRICT)
    role = cluster.must("doctor", "--role", "--on", "strict").stdout
    cluster.kubectl("apply", "-n", "strict", "-f", "-", input=role)
    cluster.kubectl("create", "rolebinding", "sandbox", "--role", "sandbox", "--user", "person",
                    "-n", "strict")
    here = ("run", "-n", name, "--on", "strict")
    refused = cluster.must(*here, "--allow", "a.example", "-x", "true", status=125)
    assert "an administrator allows it in the namespace" in refused.stderr, refused.stderr
    said = cluster.must(*here, "--keys", "hidden", "-x", "cat here")
    assert said.stdout == "ours\n"
    cluster.must("rm", "-f", f"{name}@strict")
    cluster.must("prune", "--on", "strict")
    there = ("get", "pods,configmaps,pvc", "-n", "strict")
    wait_for(lambda: "sandbox-" not in cluster.kubectl(*there), 60)


def test_no_network_is_none(cluster: Cluster, name: str) -> None:
    (cluster.project / "out.py").write_text(
        "import socket; print(socket.socket().connect_ex(('10.217.77.11', 6443)))")
    shown = cluster.must("run", "-n", name, "--net", "none", "-x", "python3 out.py; "
                         "ip route add default dev eth0 2>&1 || cat /proc/net/route")
    assert shown.stdout.startswith(f"{errno.ENETUNREACH}\nip: ") and "eth0" not in shown.stdout


# --- Faults ---


def test_a_rename_that_was_cut_goes_on(cluster: Cluster, name: str) -> None:
    """It has two names until then. The client is cut off before it removes the first one."""
    cluster.must("run", "-n", name, "-x", "echo kept >~/state")
    folder = cluster.directory()
    (folder / "kubectl").write_text('#!/bin/sh\ncase "$*" in *" delete configmap "*) echo cut >&2; '
                                    f'exit 1 ;; esac\nexec {RUN}/kubectl "$@"\n')
    (folder / "kubectl").chmod(0o755)
    env = {"PATH": f"{folder}:{cluster.environ()['PATH']}"}
    for other in (f"{name}-2", f"{name}-3"):
        assert "cut" in cluster.must("rename", name, other, status=1, env=env).stderr
    cluster.must("rename", name, f"{name}-3")
    assert cluster.must("ps", "-q", "--on", "k8s").stdout == f"{name}-3@k8s\n"
    assert cluster.must("run", "-n", f"{name}-3", "-x", "cat ~/state").stdout == "kept\n"
    assert "cut" in cluster.must("rename", f"{name}-3", name, status=1, env=env).stderr
    cluster.must("rm", "-f", f"{name}-3")
    wait_for(lambda: not cluster.left())


def test_a_full_volume_is_told_and_leaves_nothing(cluster: Cluster, name: str) -> None:
    (cluster.project / "big").write_bytes(os.urandom(20_000_000))
    cluster.bed("room", "10m")
    try:
        refused = cluster.must("run", "-n", name, "-x", "true", status=125)
    finally:
        cluster.bed("room")
    assert "there is no room for" in refused.stderr and '"storage"' in refused.stderr
    cluster.must("prune", "--on", "k8s")
    wait_for(lambda: not cluster.left())


def test_a_seed_and_a_merge_that_were_cut_go_on(cluster: Cluster, name: str) -> None:
    big = [cluster.project / f"big{number}" for number in range(20)]
    for path in big:
        path.write_bytes(os.urandom(10_000_000))
    with cluster.pty("run", "-n", name, "-x", "true") as terminal:
        terminal.expect("MB sent")
        with cluster.without_api():
            assert terminal.wait(120) == 125
            terminal.expect("start it again")
    script = "cat big* | sha256sum; for f in big*; do head -c 10000000 /dev/urandom >$f; done"
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(big))).hexdigest()
    assert cluster.must("run", "-n", name, "-x", script).stdout == f"{digest}  -\n"
    before = {path.name: path.read_bytes() for path in big}
    with cluster.pty("merge", f"{name}@k8s") as terminal:
        terminal.expect("MB received")
        with cluster.without_api():
            assert terminal.wait(120) == 1
            terminal.expect("start it again")
    there = cluster.must("run", "-n", name, "-x", "sha256sum big*").stdout.splitlines()
    after = {line.split()[1]: line.split()[0] for line in there}
    for path in big:  # whole, be it the old or the new one
        data = path.read_bytes()
        assert data == before[path.name] or hashlib.sha256(data).hexdigest() == after[path.name]
    cluster.must("merge", f"{name}@k8s")
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in big} == after
    cluster.must("rm", "-f", f"{name}@k8s")
    cluster.must("prune", "--on", "k8s")
    wait_for(lambda: not cluster.left())


def test_an_api_server_that_goes_away_is_no_end(cluster: Cluster, name: str) -> None:
    cluster.must("run", "-n", name, "-x", "true")
    run = cluster.popen("run", "-n", name, "-x",
                        "echo begun; until [ -e /tmp/go ]; do sleep 0.1; done; echo x >/tmp/ended")
    assert run.stdout and run.stderr and run.stdout.readline() == "begun\n"
    with cluster.without_api():
        assert run.wait(60) == 125
        assert "was cut" in run.stderr.read()
        unreachable = cluster.sandbox("run", "-n", name, "-x", "true")
        assert unreachable.returncode == 125 and "connection to the server" in unreachable.stderr
    cluster.must("run", "-n", name, "-x", "touch /tmp/go")
    ended = cluster.must("run", "-n", name, "-x",
                         "until grep x /tmp/ended 2>/dev/null; do sleep 0.1; done")
    assert ended.stdout == "x\n"


def test_a_turn_lasts_as_long_as_its_program_though_it_was_cut_off(cluster: Cluster,
                                                                   name: str) -> None:
    script = "touch begun; until [ -e /tmp/go ]; do sleep 0.1; done; touch made"
    cluster.must("run", "-n", name, "--checkpoint", "-d", "-x", script)
    wait_for(lambda: not cluster.run("exec", name, "ls", f"{cluster.project}/begun").returncode)
    with cluster.without_api():
        assert cluster.sandbox("log", name).returncode == 1
    wait_for(lambda: not cluster.run("exec", name, "touch", "/tmp/go").returncode)

    def ended() -> bool:
        log = cluster.sandbox("log", name, "--json")
        return not log.returncode and bool(json.loads(log.stdout)[0]["after"])

    wait_for(ended, 180)
    files = json.loads(cluster.must("diff", name, "--json").stdout)["files"]
    assert {row["path"] for row in files} == {"begun", "made"}


def test_what_a_person_may_is_what_the_role_grants(cluster: Cluster, name: str) -> None:
    refused = cluster.sandbox("run", "-n", name, "--on", "person", "-x", "true")
    assert refused.returncode == 125 and "sandbox doctor --on HOST --role" in refused.stderr
    for host, namespace in (("person", "agents"), ("closed", "closed")):
        role = cluster.must("doctor", "--role", "--on", host).stdout
        cluster.kubectl("apply", "-n", namespace, "-f", "-", input=role)
        cluster.kubectl("create", "rolebinding", "sandbox", "--role", "sandbox", "--user", "person",
                        f"--namespace={namespace}")
    closed = cluster.sandbox("run", "-n", name, "--on", "closed", "-x", "true")
    assert closed.returncode == 125 and "an administrator" in closed.stderr, closed.stderr
    assert cluster.must("run", "-n", name, "--on", "person", "-x", "cat here").stdout == "ours\n"
    cluster.must("stop", f"{name}@person")
    cluster.must("start", f"{name}@person")
    cluster.must("rename", f"{name}@person", "renamed")
    cluster.must("rm", "-f", "renamed@person")
    wait_for(lambda: not cluster.left())
    cluster.must("prune", "--on", "closed")
    there = ("get", "pods,configmaps,pvc", "-n", "closed")
    wait_for(lambda: "sandbox-" not in cluster.kubectl(*there))


def test_an_image_that_no_node_has(cluster: Cluster, name: str) -> None:
    refused = cluster.must("run", "-n", name, "--iv", "0.0-none", "-x", "true", status=125)
    assert "no node has the image" in refused.stderr and "build --push" in refused.stderr
    cluster.must("prune", "--on", "k8s")
    wait_for(lambda: not cluster.left())


def test_what_a_cluster_cannot_is_refused(cluster: Cluster, name: str) -> None:
    for asked in (["--net", "host"], ["--pids-limit", "9"]):
        refused = cluster.must("run", "-n", name, *asked, "-x", "true", status=125)
        assert "a cluster cannot give a session" in refused.stderr, refused.stderr
    refused = cluster.must("build", "--on", "k8s", "--iv", "1.0-common", status=1)
    assert "a cluster builds no images" in refused.stderr, refused.stderr
    (agents,) = [check for check in json.loads(cluster.must("doctor", "--json").stdout)
                 if check["check"] == "agents"]
    assert agents["remedy"].startswith("sandbox build --push --in REGISTRY/NAME"), agents
    assert not cluster.left()


def test_a_node_that_is_gone(cluster: Cluster, name: str) -> None:
    """The last test: the cluster has one node less."""
    cluster.must("run", "-n", name, "-x", "true")
    cluster.kubectl("cordon", "one")
    cluster.must("stop", f"{name}@k8s")
    cluster.must("start", f"{name}@k8s")
    cluster.kubectl("uncordon", "one")
    cluster.bed("node", "two")

    def state() -> str:
        return str(json.loads(cluster.must("ps", "--json", "--on", "k8s").stdout)[0]["state"])

    wait_for(lambda: state() == "lost", 60)
    assert "its node" in cluster.sandbox("start", f"{name}@k8s").stderr
    cluster.kubectl("delete", cluster.pod(name), "--force", "--grace-period=0")
    assert cluster.must("run", "-n", name, "-x", "cat here").stdout == "ours\n"
