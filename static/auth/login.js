const form = document.getElementById("login");
const message = document.getElementById("message");
const button = form.querySelector("button");

/** A browser ends what is on its way when a network interface comes or goes, as with each container on its machine. */
async function send(options, tries = 3) {
  try {
    return await fetch("/auth/login", options);
  } catch (error) {
    if (tries > 1) return send(options, tries - 1);
    throw error;
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  message.textContent = "";
  button.disabled = true;
  const body = JSON.stringify(Object.fromEntries(new FormData(form)));
  try {
    const answer = await send({ method: "POST", headers: { "Content-Type": "application/json" }, body });
    if (answer.ok) {
      const page = location.pathname.startsWith("/preview/") ? "/preview" : "/";
      location.replace(page + location.hash); // the session that was asked for
      return;
    }
    const said = (await answer.json()).error.message;
    message.textContent = said[0].toUpperCase() + said.slice(1) + ".";
    form.password.select();
  } catch {
    message.textContent = "The server does not answer.";
  }
  button.disabled = false;
});
