
for (const button of document.querySelectorAll("button[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.copy);
    try { await navigator.clipboard.writeText(source.textContent); }
    catch { getSelection().selectAllChildren(source); document.execCommand("copy"); }
    button.textContent = "Copied";
  });
}
for (const field of document.querySelectorAll("input[data-filter]")) {
  field.parentElement.hidden = false;
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase();
    for (const row of document.getElementById(field.dataset.filter).tBodies[0].rows) {
      row.hidden = !row.textContent.toLowerCase().includes(words);
    }
  });
}
// Paper cannot be clicked: what is folded is printed open, but for evidence, which can be longer than all the rest.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not(.screen):not([open])")];
  for (const part of closed) part.open = true;
});
addEventListener("afterprint", () => { for (const part of closed) part.open = false; });
