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
let pointer = { x: -1, y: -1 };

function show(target) {
  tip.hidden = !target;
  if (!target) return;
  tip.textContent = target.dataset.tip;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(pointer.x + 12, document.documentElement.clientWidth - width - 8);
  const above = pointer.y - height - 12;
  tip.style.translate = `${Math.max(8, left)}px ${above < 8 ? pointer.y + 16 : above}px`;
}

// A touch screen has no hover: a tap is a pointerdown.
for (const type of ["pointermove", "pointerdown"]) {
  document.addEventListener(type, (event) => {
    pointer = { x: event.clientX, y: event.clientY };
    show(event.target.closest("[data-tip]"));
  });
}
document.addEventListener("pointerleave", () => { tip.hidden = true; });
// The event of a scroll comes a frame late, perhaps after the pointer has moved: ask what lies under the pointer now. In
// the capturing phase, since the scroll of a table does not bubble.
document.addEventListener("scroll", () => {
  if (!tip.hidden) show(document.elementFromPoint(pointer.x, pointer.y)?.closest("[data-tip]"));
}, { passive: true, capture: true });
