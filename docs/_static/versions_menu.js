// Adds a menu of versions to the sidebar. `make site` writes `versions.js` beside the versions; a single build has none.
document.addEventListener("DOMContentLoaded", () => {
  const versions = window.SITE_VERSIONS || [];
  const brand = document.querySelector(".sidebar-brand");
  if (versions.length < 2 || !brand) return;
  const root = document.documentElement.dataset.content_root || "./";
  const menu = document.createElement("div");
  menu.id = "versions-menu";
  const select = document.createElement("select");
  select.setAttribute("aria-label", "Version");
  for (const version of versions) {
    const option = new Option(version, version);
    option.selected = document.title.includes(version);
    select.add(option);
  }
  select.addEventListener("change", () => { location.href = `${root}../${select.value}/index.html`; });
  menu.append(select);
  brand.after(menu);
});
