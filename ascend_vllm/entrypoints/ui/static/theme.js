// Runs before the page is painted, so that a chosen theme does not flash: "auto" follows the system.
(() => {
  let theme = "auto";
  try {
    theme = localStorage.getItem("ascend-vllm-theme") || "auto";
  } catch {
    // storage is forbidden in this browser
  }
  document.documentElement.dataset.theme = theme;
})();
