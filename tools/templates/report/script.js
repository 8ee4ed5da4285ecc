"use strict";

// What a row is sorted by: the number behind the cell where there is one, else its text; an empty cell has nothing.
function key(row, column) {
  const cell = row.cells[column];
  if (cell.dataset.exact !== undefined) return Number(cell.dataset.exact);
  return cell.textContent.trim() || null;
}

function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

function sort(table, header) {
  const descending = header.getAttribute("aria-sort") === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const keyed = [...table.tBodies[0].rows].map((row) => [key(row, header.cellIndex), row]);
  keyed.sort(([a], [b]) => {
    // Cells without a value stay last in both directions.
    if (a === null || b === null) return (a === null) - (b === null);
    return descending ? compare(b, a) : compare(a, b);
  });
  table.tBodies[0].append(...keyed.map(([, row]) => row));
}

for (const table of document.querySelectorAll("table")) {
  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) sort(table, button.closest("th"));
  });
}

const tip = document.getElementById("tip");

function show(event) {
  const target = event.target.closest("[data-tip]");
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.dataset.tip;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 12, document.documentElement.clientWidth - width - 8);
  const above = event.clientY - height - 12;
  tip.style.translate = `${Math.max(8, left)}px ${above < 8 ? event.clientY + 16 : above}px`;
}

// A finger has no hover: it taps.
for (const type of ["pointermove", "pointerdown"]) document.addEventListener(type, show);
document.addEventListener("pointerleave", () => { tip.hidden = true; });
document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
