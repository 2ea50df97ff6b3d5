"""The driver for Kubernetes: a session is a pod, and `kubectl` does all that is done with it.

Imported only for a host whose runtime is kubectl. What outlives a pod is what a session is made of:

- a ConfigMap with the pod as it is to be created. It has the session's name, of which there is one;
- a claim for each of its volumes: its home, its copy of the directory and its snapshots.

The proxy of an allowlist, or broker, is a second pod with a record and a claim of its own. It is on
the session's node, so that the gate of static/image/proxy.py reaches it by a socket in the claim:
the session needs no network at all, and nobody else reaches the proxy. No network is what a first
container with NET_ADMIN leaves of it, whatever the cluster's network is.

`stop` deletes the pod and `start` creates it again. All carry the label sandbox.session; what other
engines have in labels is in annotations, which may hold anything. The id of a session is pod/NAME,
where NAME is given once and never again.

A call that takes several of kubectl's is one of this module, see carry_out(): so it is still one
argv to be printed or started. Commands in a pod are run by static/session/kube.py.
"""

from __future__ import annotations

import os
import sys
import time

import sandbox
from sandbox import LONG_SECONDS, NET_VOLUME, Config, Engine, Output, SandboxError, to_json

TYPE_CHECKING = False  # as in sandbox.py, whose import budget holds here, too
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import suppress
    from typing import Any
else:
    import _signal as signal

    suppress = sandbox.suppress

GRACE_SECONDS = 5
WATCH_SECONDS = 2  # after which we look why a pod is not ready
PLACED_SECONDS = 60  # after which what the cluster warns of is taken for the reason
STORAGE = "10Gi"
HELPER_SECONDS = sandbox.HOME_SECONDS  # a pod of one step ends by then, whoever was killed

# What the kubelet says of a container that will not start as it is.
NO_IMAGE = ("ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName")
NO_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError",
            "CrashLoopBackOff")


@sandbox.once
def exec_source() -> str:
    """The program of an exec, without its docstring: it goes into each call."""
    return sandbox.asset("session/kube.py").decode().split('"""', 2)[2]


class Kubectl(Engine):
    """A namespace of a cluster, through kubectl."""

    name = "kubectl"
    minimum = (1, 20)
    options = ("context", "namespace")
    more_options = ("storage", "storageClass")  # of each claim
    elsewhere_built = ("sandbox build --push --in REGISTRY/NAME, and --in with the run; or load it "
                       "on every node")
    symptoms = {
        "daemon": ("the connection to the server", "unable to connect to the server",
                   "couldn't get current server api"),
    }
    hints = {
        "net_admin": "an allowlist and --net none need NET_ADMIN for a container that ends before "
                     "the session begins: an administrator allows it in the namespace",
        'exec: "python3"': "an allowlist and --net none need an image with python3: sandbox build",
        "context was not found": "kubectl config get-contexts lists those that there are",
        '" does not exist': "kubectl config get-contexts lists those that there are",
        "no node has the image": elsewhere_built,
        "podsecurity": "sessions need root in a container and what the standard baseline allows; "
                       "an administrator allows it in the namespace",
        "exceeded quota": "remove a session, or ask for a larger quota",
        "is forbidden: user": "an administrator grants what sandbox doctor --on HOST --role prints",
        "insufficient": "give it less (--memory, --cpus), or remove a session",
        "persistentvolumeclaim": "kubectl get storageclasses lists those that there are: one must "
                                 "be the default, or named as storageClass in the key hosts",
        "quantities must match": "storage in the key hosts is such as 20Gi",
        "namespaces": "kubectl get namespaces lists those that there are",
        "no space left": 'give the host more "storage" in the key hosts: claims that are made '
                         "from then on have it",
    }

    def argv(self, call: str, *names: str) -> list[str]:
        if call in ("ping", "facts"):
            return [*self.client, "get", "--raw", "/version"]
        if call == "volumes":
            return [*self.client, "get", "pvc", "-l", "sandbox.volume", "-o",
                    "go-template={{range .items}}{{if not .metadata.deletionTimestamp}}"
                    '{{.metadata.name}}{{"\\n"}}{{end}}{{end}}']
        if call in ("commit", "pull", "import", "remove-image", "storage"):
            raise SandboxError(f"a cluster has no way to {call} an image",
                               "use a registry that it pulls from", 125)
        return self.program("stop-start" if call == "restart" else call, *names)

    def program(self, verb: str, *words: str) -> list[str]:
        """The call of one of the verbs of carry_out()."""
        client = to_json([self.host, self.client, self.more])
        return sandbox.own_argv("sandbox_kube", "carry_out", client, verb, *words)

    # -- facts --

    def read_facts(self, out: str) -> tuple[str, str]:
        return str(sandbox.parse_json(out)["gitVersion"]).removeprefix("v"), ""

    def is_rootless(self, fact: str) -> bool:
        return False

    def check_session(self, config: Config, spec: Mapping[str, Any]) -> None:
        if spec["network"] == "host":
            raise SandboxError("a cluster cannot give a session the host's network: it would be "
                               "that of a node", "use --net open or --allow", 125)
        if config.is_given("pidsLimit"):
            raise SandboxError("a cluster cannot give a session a limit of processes: only the "
                               "kubelet has one, for all pods", "leave pidsLimit out", 125)
        mounts_of(sandbox.binds_of(spec), ())

    # -- containers --

    def inspect_argv(self, name: str) -> list[str]:
        script = ('out=$("$@") || exit; case $out in *\'"items": []\'*) '
                  'echo "no such container" >&2; exit 1 ;; esac; printf "%s\\n" "$out"')
        return ["sh", "-c", script, "sandbox", *self.list_argv(selector_of(self, name), ())]

    def read_inspected(self, out: str) -> tuple[str, str, str, int, int, dict[str, str]]:
        row = self.read_list(out)[0]
        return row["id"], row["name"], row["state"], row["code"], 0, row["labels"]

    def is_absent(self, err: str) -> bool:
        return super().is_absent(err) or "(notfound)" in err.lower()

    def is_name_taken(self, err: str) -> bool:
        return "(AlreadyExists)" in err

    def list_argv(self, label: str, shown: Sequence[str]) -> list[str]:
        return [*self.client, "get", "configmaps,pods", "-l", label, "-o", "json"]

    def read_list(self, out: str) -> list[dict[str, Any]]:
        items = sandbox.parse_json(out)["items"]
        pods = {f"pod/{item['metadata']['name']}": item for item in items if item["kind"] == "Pod"}
        kept = {id_of(item): item for item in items if id_of(item)}
        return [row_of(item, pods.get(id)) for id, item in kept.items()] + [
            row_of(pod, pod) for id, pod in pods.items()
            if id not in kept and not pod["metadata"].get("deletionTimestamp")]

    def image_of_argv(self, name: str) -> list[str]:
        return [*self.client, "get", "configmaps", "-l", selector_of(self, name), "-o",
                r"jsonpath={.items[0].metadata.annotations.sandbox\.image}"]

    def create_argv(self, name: str, image: str, command: Sequence[str], *,
                    labels: Mapping[str, str], workdir: str, log_size: str, env: Sequence[str],
                    limits: Mapping[str, Any], capabilities: Sequence[str] = (),
                    network: str = "open", ports: Sequence[str] = (),
                    binds: Sequence[tuple[str, str, str]] = (), volumes: Sequence[str] = (),
                    service: bool = False, beside: Sequence[str] = ()) -> list[str]:
        session, name = labels["sandbox.session"], self.bare(name)
        pod = pod_of(name if service else f"{valid(name, 40)}-{session}", image, command,
                     mounts_of(binds, volumes), capabilities, limits, beside)
        container = pod["spec"]["containers"][0]
        pairs = (item.partition("=") for item in env)
        container |= {"workingDir": workdir,
                      "env": [{"name": key, "value": value} for key, _, value in pairs]}
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        marks = {"sandbox.session": session, "sandbox.name": label_of(name)}
        first = []
        if service:
            marks["sandbox.proxy"] = "yes"
            pod["spec"]["restartPolicy"] = "OnFailure"
            narrow(container)
            container["securityContext"]["readOnlyRootFilesystem"] = True
        elif network == "none" or sandbox.NET_DIRECTORY in mounts:
            first = [net_container(container, network == "none",
                                   mounts.get(sandbox.NET_DIRECTORY))]
        if sandbox.NET_DIRECTORY in mounts:
            pod["spec"]["affinity"] = {"podAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [{
                    "labelSelector": {"matchLabels": {"sandbox.session": session}},
                    "topologyKey": "kubernetes.io/hostname"}]}}
        if home := mounts.get(sandbox.CONTAINER_HOME):
            first.append(first_container(container, home))
        pod["spec"] |= {"hostname": valid(name, 63), "initContainers": first}
        pod["metadata"]["labels"] = marks
        record = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {
            "name": record_name(name), "labels": marks,
            "annotations": {**labels, "sandbox.name": name, "sandbox.image": image,
                            "sandbox.id": f"pod/{pod['metadata']['name']}"}},
            "data": {"pod": to_json(pod)}}
        return self.program("create", to_json(record))

    def closed_argv(self, name: str, image: str, command: Sequence[str], *,
                    labels: Mapping[str, str], limits: Mapping[str, Any],
                    capabilities: Sequence[str], binds: Sequence[tuple[str, str, str]],
                    volumes: Sequence[str] = (), user: str = "0:0") -> list[str]:
        pod = pod_of(name, image, ["sleep", str(HELPER_SECONDS)], mounts_of(binds, volumes),
                     [*capabilities, "SETUID", "SETGID"], limits)
        pod["metadata"]["labels"] = {key: label_of(value) for key, value in labels.items()}
        pod["spec"]["activeDeadlineSeconds"] = HELPER_SECONDS
        narrow(pod["spec"]["containers"][0])
        return self.program("run", to_json(pod), user, *command)

    def try_argv(self, image: str, command: Sequence[str], network: str = "open",
                 volumes: Sequence[str] = ()) -> list[str]:
        return self.closed_argv(sandbox.step_name(), image, command, labels={}, limits={},
                                capabilities=(), binds=(), volumes=volumes)

    def exec_argv(self, name: str, command: Sequence[str], *, user: str = "", workdir: str = "",
                  env: Sequence[str] = (), stdin: bool = False,
                  terminal: bool = False) -> list[str]:
        if terminal:
            raise SandboxError("a terminal on a cluster is held by a python3 in the session",
                               "use an image that has one", 125)
        return [sys.executable, "-I", "-S", "-c", exec_source(), "01"[stdin], user, workdir,
                "\n".join(env), "\n".join(self.client),
                # The pod of a proxy has its name, and that of a session is its id.
                f"pod/{name.removeprefix('pod/')}", *command]

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], *, own_group: bool) -> int:
        """A copy of this process runs the program of the call: another Python takes 5 ms."""
        sandbox.trace(argv)
        ends = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # the copy has our handlers at first
        try:
            pid = os.fork()
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return pid
        try:
            if own_group:
                os.setpgid(0, 0)
            os.closerange(3, 65536)
            for number in ends:
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.environ.update(env)
            sys.argv = ["-c", *argv[5:]]
            exec(argv[4], {"__name__": "__main__"})  # which ends it
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(125)

    def logs_argv(self, name: str, *, follow: bool = False, tail: int = 0,
                  since: float = 0) -> list[str]:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
        # That of a proxy whose pod is gone is empty: see kept_decisions().
        pod = [name] if name.startswith("pod/") else ["-l", f"sandbox.name={label_of(name)}"]
        return [*self.client, "logs", *(["-f"] if follow else []), f"--tail={tail or -1}",
                *([f"--since-time={when}"] if since else []), *pod, "-c", "session"]

    def copy_argv(self, name: str, path: str) -> list[str]:
        return self.program("read", name, path)

    def forward_argv(self, name: str, ports: Sequence[str]) -> list[str]:
        return [*self.client, "port-forward", "--address", "127.0.0.1", name,
                *(":".join(port.split(":")[-2:]) for port in ports)]

    # -- images --

    def image_argv(self, name: str) -> list[str]:
        return ["printf", "%s [] {}\\n", name]  # the nodes have images, and nobody may ask them

    def missing_helpers(self, err: str) -> list[str]:
        return []

    def build_argv(self, tag: str, folder: str, labels: Mapping[str, str], args: Sequence[str],
                   host_network: bool) -> list[str]:
        raise SandboxError("a cluster builds no images",
                           "sandbox build --push --in REGISTRY/NAME builds one here", 125)

    def packages(self) -> list[str]:
        return ["kubernetes-client" if sandbox.program("apt-get") else "kubectl"]

    def role(self) -> str:
        given = dict(zip(self.client, self.client[1:], strict=False)).get("--namespace", "default")
        return sandbox.asset("session/role.yaml").decode().replace("NAMESPACE", given)


# --- Objects ---


def valid(name: str, most: int) -> str:
    """A name as Kubernetes has them: lower case, digits and dashes."""
    plain = "".join(c if sandbox.is_plain(c, "") else "-" for c in name.lower())
    return plain[:most].strip("-") or "session"


def digest(text: str) -> str:
    import hashlib  # what loads it takes longer than all else here

    return hashlib.sha256(text.encode()).hexdigest()[:10]


def record_name(name: str) -> str:
    """The name of a session's ConfigMap: each has one of its own."""
    same = valid(name, 60) == name
    return f"sandbox-{name if same else f'{valid(name, 40)}.{digest(name)}'}"


def label_of(value: str) -> str:
    """A value of a label that finds this one and no other."""
    fits = (0 < len(value) < 64 and sandbox.is_plain(value, "_.-")
            and value[0].isalnum() and value[-1].isalnum())
    return value if fits else f"{valid(value, 40)}.{digest(value)}"


def selector_of(engine: Engine, name: str) -> str:
    """What finds a session by its name, or by its id."""
    return (f"sandbox.session={name[-10:]},!sandbox.proxy" if name.startswith("pod/")
            else f"sandbox.name={label_of(engine.bare(name))}")


def id_of(record: Mapping[str, Any]) -> str:
    """The id of the session that a ConfigMap is of; '' for none, and for a pod."""
    return str((record["metadata"].get("annotations") or {}).get("sandbox.id", ""))


def row_of(item: Mapping[str, Any], pod: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row of read_list(), with the id and the exit status, for a session or a pod of one step."""
    labels = {**item["metadata"].get("labels", {}), **item["metadata"].get("annotations", {})}
    state, code = state_of(pod)
    name = item["metadata"]["name"]
    return {"name": labels.pop("sandbox.name", name), "id": labels.pop("sandbox.id", f"pod/{name}"),
            "state": state, "code": code, "image": labels.pop("sandbox.image", ""),
            "created": item["metadata"]["creationTimestamp"].replace("Z", "+00:00"),
            "labels": labels}


def state_of(pod: Mapping[str, Any] | None) -> tuple[str, int]:
    """The state of a session in docker's words, and the status that it ended with."""
    if not pod:
        return "exited", 0
    status = pod.get("status", {})
    if status.get("phase") in ("Succeeded", "Failed"):
        ends = [container.get("state", {}).get("terminated", {}).get("exitCode", 0)
                for container in status.get("containerStatuses", ())]
        return "exited", max(ends, default=1)
    if pod["metadata"].get("deletionTimestamp"):
        return "removing", 0
    if status.get("phase") != "Running":
        return "created", 0
    # Who says whether it is ready is its node, and of a node that is not heard, the cluster.
    ready = [one["status"] for one in status.get("conditions", ()) if one["type"] == "Ready"]
    return "running" if ready == ["True"] else "lost", 0


def mounts_of(binds: Iterable[tuple[str, str, str]],
              volumes: Iterable[str]) -> list[tuple[str, str, bool]]:
    """Claim, place and whether it is only read, of what is mounted: a volume without a name is in
    the claim of the one before it. Raises SandboxError.
    """
    named: list[tuple[str, ...]] = []
    for volume in volumes:
        named.append((*(volume if ":" in volume else f"{named[-1][0]}:{volume}").split(":"), ""))
    mounts = [(item[0], item[1], "ro" in item[2].split(",")) for item in (*binds, *named)]
    for source, _, _ in mounts:
        if source.startswith("/"):
            raise SandboxError(f"a cluster cannot give a session the mount of {source}: its nodes "
                               "do not see this machine's files", 'leave directories in -v, and '
                               '"workspace": "mount", out; sandbox cp copies what is needed', 125)
    return mounts


def quantity(limit: str) -> str:
    """A size as Kubernetes writes it, of one as docker does."""
    number = limit.lower().rstrip("bkmg")
    return number + {"k": "Ki", "m": "Mi", "g": "Gi"}.get(limit.lower()[len(number):], "")


def pod_of(name: str, image: str, command: Sequence[str], mounts: Sequence[tuple[str, str, bool]],
           capabilities: Sequence[str], limits: Mapping[str, Any],
           beside: Sequence[str] = ()) -> dict[str, Any]:
    """A pod with one container of root's, contained as an engine on one machine would. The claims
    `beside` are not mounted: only its node must be one that has them.
    """
    given = {"cpu": limits.get("cpus"), "memory": limits.get("memory")}
    claims = dict.fromkeys([*(claim for claim, _, _ in mounts), *beside])
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "restartPolicy": "Never", "automountServiceAccountToken": False,
        "enableServiceLinks": False, "terminationGracePeriodSeconds": GRACE_SECONDS,
        # What ends is waited for by the pod's own first process, as by docker's --init.
        "shareProcessNamespace": True,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{
            "name": "session", "image": image, "imagePullPolicy": "IfNotPresent",
            "command": [*command],
            "resources": {"limits": {
                key: quantity(value) if key == "memory" else str(value)
                for key, value in given.items() if value}},
            "securityContext": {"runAsUser": 0, "runAsGroup": 0, "capabilities": {
                "drop": ["ALL"], "add": [*dict.fromkeys(capabilities)]}},
            "volumeMounts": [{"name": label_of(claim), "mountPath": place, "readOnly": reads,
                              # A proxy's has what it shares with the session, and its own.
                              **({"subPath": place[1:]} if claim.startswith(NET_VOLUME) else {})}
                             for claim, place, reads in mounts]}],
        "volumes": [{"name": label_of(claim), "persistentVolumeClaim": {"claimName": claim}}
                    for claim in claims]}}


def narrow(container: dict[str, Any]) -> None:
    """Have a container of ours gain no rights, and ask for no more memory than it needs."""
    container["securityContext"]["allowPrivilegeEscalation"] = False
    container["resources"]["requests"] = {"memory": "64Mi"}


def first_container(container: Mapping[str, Any], mount: Mapping[str, Any]) -> dict[str, Any]:
    """What fills a new home with what the image has there: a claim is empty where a volume of
    docker's would not be.
    """
    script = sandbox.asset("session/home.sh").decode()
    return {**container, "name": "home", "workingDir": "/", "command": [
        "sh", "-c", 'test "$(ls -A /run/sandbox-home | grep -vx lost+found)" || exec sh -c "$@"',
        "sandbox", script, "sandbox", "fill", sandbox.CONTAINER_HOME],
        "volumeMounts": [{**mount, "mountPath": "/run/sandbox-home"}]}


def net_container(container: Mapping[str, Any], closed: bool,
                  gate: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ends before the session begins: it takes all of the pod's network but the loopback away,
    where that is closed, and waits for the proxy, where there is one.
    """
    program = sandbox.asset("session/net.py").decode()
    words = ["closed" if closed else "open", f"{sandbox.NET_DIRECTORY}/proxy.sock" if gate else ""]
    return {**container, "name": "net", "workingDir": "/",
            "command": ["python3", "-I", "-S", "-c", program, *words],
            "securityContext": {"runAsUser": 0, "runAsGroup": 0, "capabilities": {
                "drop": ["ALL"], "add": ["NET_ADMIN"] if closed else []}},
            "volumeMounts": [gate] if gate else []}


def claim_of(engine: Engine, name: str) -> dict[str, Any]:
    size, kind = engine.more.get("storage", STORAGE), engine.more.get("storageClass")
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "labels": {"sandbox.volume": "yes"}},
            "spec": {"accessModes": ["ReadWriteOnce"],
                     "resources": {"requests": {"storage": size}},
                     **({"storageClassName": kind} if kind else {})}}


# --- Several calls of kubectl as one ---


def carry_out() -> int:
    """Do one of the things that take several calls of kubectl, see program(); the exit status."""
    client, verb, *words = sys.argv[2:]
    sandbox.end_on_signals()
    try:
        return VERBS[verb](Kubectl(*sandbox.parse_json(client)), *words) or 0
    except SandboxError as error:
        print(error.message, file=sys.stderr)
        return 125
    except KeyboardInterrupt:
        return 130


def kubectl(engine: Engine, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    return Output([*engine.client, *words], LONG_SECONDS, stdin=stdin).result()


def make(engine: Engine, *items: Mapping[str, Any], there: bool = False) -> None:
    """Create objects; `there` is whether some may be there already. Raises SandboxError."""
    listed = to_json({"apiVersion": "v1", "kind": "List", "items": items}).encode()
    status, _, err = kubectl(engine, "create", "-f", "-", stdin=listed)
    wrong = [line for line in err.strip().splitlines()
             if not (there and "(AlreadyExists)" in line)]
    if status and (wrong or not err.strip()):
        raise SandboxError("\n".join(wrong) or f"kubectl ended with status {status}")


def get(engine: Engine, *words: str) -> list[dict[str, Any]]:
    """The objects that kubectl gets. Raises SandboxError."""
    out = engine.ask([*engine.client, "get", *words, "-o", "json"])
    items: list[dict[str, Any]] = sandbox.parse_json(out)["items"]
    return items


def find(engine: Engine, name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The record and the pod of a session. Raises SandboxError where there is none."""
    items = get(engine, "configmaps,pods", "-l", selector_of(engine, name))
    record = next(filter(id_of, items), None)
    if not record:
        raise SandboxError(f"no such container: {name}")
    return record, next((item for item in items if item["kind"] == "Pod"
                         and id_of(record) == f"pod/{item['metadata']['name']}"), None)


def create(engine: Engine, given: str) -> None:
    record = sandbox.parse_json(given)
    make(engine, record)
    bring_up(engine, sandbox.parse_json(record["data"]["pod"]))
    print(id_of(record))


def bring_up(engine: Engine, pod: dict[str, Any]) -> None:
    """Create a pod and the claims that it needs, and wait until it runs. Raises SandboxError."""
    if claims := uses(pod):  # a scheduler that meets one without a volume pauses for a second
        make(engine, *(claim_of(engine, claim) for claim in claims), there=True)
    pods = get(engine, "pods")
    end_lost(engine, pods)
    if node := node_of(pods, claims):  # a claim may be for one node at a time
        place = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        pod["spec"].setdefault("affinity", {})["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [place]}}
    make(engine, pod, there=True)  # another client may start it, too
    wait_ready(engine, pod["metadata"]["name"])


def node_of(pods: list[dict[str, Any]], claims: set[str]) -> str:
    """The node of a pod that uses one of some claims."""
    # A pod of one step, which ends, is nothing to go after.
    pods.sort(key=lambda pod: "sandbox.session" not in pod["metadata"].get("labels", {}))
    return next((str(pod["spec"]["nodeName"]) for pod in pods
                 if state_of(pod)[0] in ("created", "running")
                 and pod["spec"].get("nodeName") and uses(pod) & claims), "")


def uses(pod: Mapping[str, Any]) -> set[str]:
    """The claims of a pod."""
    claims = (volume.get("persistentVolumeClaim") for volume in pod["spec"].get("volumes", ()))
    return {claim["claimName"] for claim in claims if claim}


def wait_ready(engine: Engine, name: str) -> None:
    """Wait until a pod runs. Raises SandboxError with the reason where it will not."""
    began = time.monotonic()
    while kubectl(engine, "wait", "--for=condition=Ready", f"pod/{name}",
                  f"--timeout={WATCH_SECONDS}s")[0]:
        pod = sandbox.parse_json(engine.ask([*engine.client, "get", "pod", name, "-o", "json"]))
        if problem := problem_of(pod):
            if pod["status"].get("phase") in ("Succeeded", "Failed"):
                problem += "\n" + kubectl(engine, "logs", f"pod/{name}", "-c", failed_in(pod),
                                          "--tail=3")[1]
            raise SandboxError(problem.strip())
        if time.monotonic() - began > PLACED_SECONDS and (said := kubectl(
                engine, "get", "events", "--field-selector",
                f"type=Warning,reason!=MissingClusterDNS,involvedObject.name={name}",
                "-o", "jsonpath={.items[-1:].message}")[1].strip()):
            raise SandboxError(f"the pod {name} does not come up: {said}")
        if time.monotonic() - began > LONG_SECONDS:
            raise SandboxError(f"the pod {name} is not ready after {LONG_SECONDS} seconds")


def failed_in(pod: Mapping[str, Any]) -> str:
    """The container that a pod has ended with."""
    return next((str(container["name"]) for container in pod["status"].get(
        "initContainerStatuses", ()) if container.get("state", {}).get("terminated", {}).get(
            "exitCode")), "session")


def problem_of(pod: Mapping[str, Any]) -> str:
    """Why a pod that is on a node will not run as it is, '' where it still may."""
    status = pod["status"]
    if status.get("phase") in ("Succeeded", "Failed"):
        return f"the pod has ended as soon as it was started {status.get('message', '')}"
    for container in (*status.get("initContainerStatuses", ()),
                      *status.get("containerStatuses", ())):
        waiting: dict[str, str] = container.get("state", {}).get("waiting", {})
        reason, message = waiting.get("reason"), waiting.get("message", "")
        if reason in NO_IMAGE:
            return f"no node has the image {container['image']}, nor can it be pulled: {message}"
        if reason in NO_START:
            return f"{reason}: {message}"
    return ""


def begin(engine: Engine, *names: str) -> None:
    for name in names:
        record, pod = find(engine, name)
        state = state_of(pod)[0] if pod else ""
        if pod and state == "lost":
            raise lost(engine, pod)
        if pod and state in ("running", "created"):  # another run may be starting it
            wait_ready(engine, pod["metadata"]["name"])
            continue
        if pod:
            end(engine, pod)
        bring_up(engine, sandbox.parse_json(record["data"]["pod"]))


def stop(engine: Engine, *names: str) -> None:
    for name in names:
        if pod := find(engine, name)[1]:
            end(engine, pod, not is_proxy(pod))


def restart(engine: Engine, *names: str) -> None:
    stop(engine, *names)
    begin(engine, *names)


def is_proxy(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is a proxy, for whose end nobody waits: it takes the kubelet half a minute."""
    return "sandbox.proxy" in pod["metadata"].get("labels", {})


def end(engine: Engine, pod: Mapping[str, Any], wait: bool = True) -> None:
    """Delete a pod and wait until it is gone, unless its node is. Raises SandboxError."""
    answers = state_of(pod)[0] != "lost"
    status, _, err = kubectl(engine, "delete", "pod", pod["metadata"]["name"], "--ignore-not-found",
                             f"--grace-period={GRACE_SECONDS}",
                             f"--wait={str(answers and wait).lower()}", "--timeout=120s")
    if not answers or "timed out" in err:
        raise lost(engine, pod)
    if status:
        raise SandboxError(err.strip())


def lost(engine: Engine, pod: Mapping[str, Any]) -> SandboxError:
    argv = [*engine.client, "delete", "pod", pod["metadata"]["name"], "--force"]
    return SandboxError(f"its node {pod['spec'].get('nodeName', '')} does not answer. If that is "
                        f"gone for good: {sandbox.quote_all(argv)}")


def remove(engine: Engine, *names: str) -> None:
    """Remove sessions, with or without their pods, and pods of a step by their names."""
    for name in names:
        try:
            record, pod = find(engine, name)
        except SandboxError as error:
            if not engine.is_absent(error.message):
                raise
            drop_pods(engine, name.removeprefix("pod/"))
            continue
        if pod:
            try:
                end(engine, pod, not is_proxy(pod))
            except SandboxError as error:  # Kubernetes removes it as soon as its node is back
                print(error.message, file=sys.stderr)
        # A session has two records where its rename was cut.
        which = ([record["metadata"]["name"]] if is_proxy(record) else
                 ["-l", selector_of(engine, id_of(record))])
        kubectl(engine, "delete", "configmap", *which, "--ignore-not-found")


def rename(engine: Engine, id: str, name: str) -> None:
    """Give a session another name. Its pod keeps that which it has. Where this was cut, it has both
    names until it is renamed to one of them.
    """
    records = {item["metadata"]["name"]: item for item in
               get(engine, "configmaps", "-l", selector_of(engine, id)) if id_of(item)}
    if not records:
        raise SandboxError(f"no such container: {id}")
    name, record = engine.bare(name), next(iter(records.values()))
    labels = {**record["metadata"]["labels"], "sandbox.name": label_of(name)}
    if not records.pop(record_name(name), None):
        notes = {**record["metadata"]["annotations"], "sandbox.name": name}
        made = sandbox.parse_json(record["data"]["pod"])
        made["metadata"]["labels"] = labels
        make(engine, {**record, "data": {"pod": to_json(made)}, "metadata": {
            "name": record_name(name), "labels": labels, "annotations": notes}})
    engine.ask([*engine.client, "label", "pods", "-l", selector_of(engine, id), "--overwrite",
                f"sandbox.name={labels['sandbox.name']}"])
    if records:
        engine.ask([*engine.client, "delete", "configmap", *records])


def remove_volumes(engine: Engine, *names: str) -> int:
    """Delete claims that no session has, running or stopped."""
    used: set[str] = set()
    for item in get(engine, "configmaps,pods"):
        if item["kind"] == "Pod":  # a claim of one that is going goes after it
            used |= set() if item["metadata"].get("deletionTimestamp") else uses(item)
        elif "sandbox.session" in item["metadata"].get("labels", {}):
            used |= uses(sandbox.parse_json(item["data"]["pod"]))
    free = [name for name in names if name not in used]
    if free:
        kubectl(engine, "delete", "pvc", "--ignore-not-found", "--wait=false", *free)
    return int(len(free) < len(names))


def run(engine: Engine, given: str, user: str, *command: str) -> int:
    """Run a command, with our stdin, in a pod of its own."""
    pod = sandbox.parse_json(given)
    name = pod["metadata"]["name"]
    client = f"{this_machine()} {sandbox.mark_of(os.getpid())}"
    pod["metadata"]["annotations"] = {"sandbox.client": client}
    try:
        bring_up(engine, pod)
        argv = engine.exec_argv(f"pod/{name}", command, user=user, stdin=True)
        return sandbox.wait_for(sandbox.spawn(argv))
    finally:
        drop_pods(engine, name)


def drop_pods(engine: Engine, *names: str) -> None:
    """Delete pods of one step, and wait for nothing."""
    kubectl(engine, "delete", "pod", *names, "--ignore-not-found", "--grace-period=0", "--force",
            "--wait=false")


def this_machine() -> str:
    """What tells those who see the processes that we see; '' where that is not known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as boot:
        return digest(f"{boot.read()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}")
    return ""


def end_lost(engine: Engine, pods: Iterable[Mapping[str, Any]]) -> None:
    """Delete the pods of one step whose client has ended without doing so: where it was cut off,
    the step waits for it, and others for the step.
    """
    lost, here = [], this_machine()
    for meta in (pod["metadata"] for pod in pods):
        machine, _, mark = meta.get("annotations", {}).get("sandbox.client", "").partition(" ")
        pid = mark.partition(" ")[0]
        if here and machine == here and pid.isdigit() and sandbox.mark_of(pid) != mark:
            lost.append(meta["name"])
    if lost:
        drop_pods(engine, *lost)


def read(engine: Engine, name: str, path: str) -> int:
    """Print a file of a session as a tar archive. Of a pod that is gone nothing is left but what
    is in a claim: no command has begun in the one that comes next.
    """
    folder, file = os.path.split(path)
    command = ["tar", "-C", folder, "-cf", "-", file]
    argv = engine.exec_argv(name, command)
    with suppress(SandboxError):
        record, pod = find(engine, name)
        made = sandbox.parse_json(record["data"]["pod"])["spec"]["containers"][0]
        mounts = [f"{mount['name']}:{folder}:ro" for mount in made["volumeMounts"]
                  if mount["mountPath"] == folder]
        if mounts and state_of(pod)[0] != "running":
            argv = engine.try_argv(made["image"], command, volumes=mounts)
        elif not pod:
            print("\0sandbox")
            return 0
    return sandbox.call(argv, output=1)


def copy(engine: Engine, source: str, target: str) -> int:
    """Copy as `docker cp` does: into a folder that is there, else to that name."""
    outward = ":" in source and not os.path.isabs(source)
    name, _, inner = (source if outward else target).partition(":")
    source, target = (inner, target) if outward else (source, inner)
    folder, file = os.path.split(source.rstrip("/"))  # "." is what is in the folder
    send = ["tar", "-C", folder or "/", "-cf", "-", "--", file]
    receive = ["sh", "-c", sandbox.asset("session/unpack.sh").decode(), "sandbox", target,
               "" if file == "." else file]
    if outward:
        send = engine.exec_argv(name, send)
    else:
        receive = engine.exec_argv(name, receive, stdin=True)
    out, end = os.pipe()
    sender = sandbox.spawn(send, fds={1: end})
    receiver = sandbox.spawn(receive, fds={0: out})
    os.close(out)
    os.close(end)
    return max(sandbox.wait_for(receiver), sandbox.wait_for(sender))


VERBS: dict[str, Any] = {
    "create": create, "start": begin, "stop": stop, "stop-start": restart, "remove": remove,
    "rename": rename, "remove-volume": remove_volumes, "run": run, "read": read, "cp": copy,
}
