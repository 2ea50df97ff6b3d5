// A browser ends what is on its way when a network interface comes or goes, as with each container on its machine.
// A page that has lost a part of what it is made from asks for it again; one that never gets it stays as it is.
{
  let lost = false;
  addEventListener("error", ({ target }) => (lost ||= target !== window), true);
  addEventListener("load", () => {
    const times = lost ? Number(sessionStorage.getItem("reloads")) + 1 : 0;
    sessionStorage.setItem("reloads", times);
    if (times && times < 5) location.reload();
  });
}
