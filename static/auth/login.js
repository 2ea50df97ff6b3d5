const form = document.getElementById("login");
const message = document.getElementById("message");
const button = form.querySelector("button");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  message.textContent = "";
  button.disabled = true;
  const body = JSON.stringify(Object.fromEntries(new FormData(form)));
  try {
    const answer = await fetch("/auth/login", { method: "POST", headers: { "Content-Type": "application/json" }, body });
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
