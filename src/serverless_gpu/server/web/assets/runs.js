// Selection in the list of runs: keeps checked boxes while rows change, and names the runs in the confirmation.
"use strict";

{
  const form = document.getElementById("selection");
  const chosen = new Set();
  const most = Number(form.dataset.most);
  const status = document.getElementById("selected");
  const boxes = () => [...form.querySelectorAll("input[name=runs]")];

  const show = () => {
    if (!status) return;
    const checked = boxes().filter(box => box.checked);
    const stoppable = checked.filter(box => "stoppable" in box.dataset);
    const gpus = stoppable.reduce((sum, box) => sum + Number(box.dataset.gpus), 0);
    const names = stoppable.slice(0, 5).map(box => box.dataset.name).join(", ");
    const more = stoppable.length > 5 ? ` and ${stoppable.length - 5} more` : "";
    const runs = stoppable.length === 1 ? "run" : "runs";
    status.textContent = checked.length ? `${checked.length} selected, ${stoppable.length} can be cancelled` : "";
    for (const button of form.querySelectorAll("button")) {
      if (button.value === "stop") {
        button.disabled = !stoppable.length || checked.length > most;
        button.dataset.confirm = `Cancel ${stoppable.length} ${runs} with ${gpus} GPUs: ${names}${more}? Their ranks get time to save their work.`;
      } else button.disabled = checked.length < 2 || checked.length > 8;
    }
  };

  form.addEventListener("change", event => {
    const box = event.target;
    if (box.name !== "runs") return;
    if (box.checked) chosen.add(box.value); else chosen.delete(box.value);
    show();
  });
  document.addEventListener("htmx:after:swap", () => {
    for (const box of boxes()) box.checked = chosen.has(box.value);
    show();
  });
  document.addEventListener("keydown", event => {
    if (event.key !== "x" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    form.querySelector("tr.selected input[name=runs]")?.click();
  });
  // The Back button restores checked boxes.
  for (const box of boxes()) if (box.checked) chosen.add(box.value);
  show();
}
