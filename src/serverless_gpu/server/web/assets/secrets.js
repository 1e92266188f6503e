// Reads the value of a secret from a file. Without this script, people paste the value.
"use strict";

const holder = document.querySelector("[data-secret-file]");
if (holder) {
  const input = holder.querySelector("input");
  const value = holder.closest("form").querySelector("textarea[name=value]");
  holder.hidden = false;
  input.addEventListener("change", async () => {
    const file = input.files[0];
    input.setCustomValidity("");
    if (!file) return;
    if (file.size > value.maxLength) {
      input.setCustomValidity(`The file has ${file.size} bytes, over the limit of ${value.maxLength}.`);
    } else {
      try {
        const text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
        value.value = text.replace(/\r\n/g, "\n") === text ? text : "";
        if (!value.value) input.setCustomValidity("The file has Windows line breaks, which a form would change. Use sgpu secret set --file.");
        else value.value += "\n"; // The server removes one line break from the end.
      } catch {
        input.setCustomValidity("The file is not UTF-8 text. Use sgpu secret set --file.");
      }
    }
    input.reportValidity();
  });
}
