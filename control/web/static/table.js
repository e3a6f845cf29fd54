// Tables that are sorted by their headings, and reuse their rows between updates.

import { el, keyed, setAttr, setText, show } from './text.js';

// Rows that move each second are unreadable.
const resortEvery = 5000; // ms

// sortableTable creates the head of table, and returns a function that shows items in it.
// columns are {name, title, text(item), tip(item), order(item), draw(cell, item), wide,
// words}: text is the text of the cell unless draw fills it, and order is the sort key; numbers
// sort in descending order first. The first column is the header of the row. wide columns are
// omitted on a phone; words marks columns that are not numeric.
export function sortableTable(table, key, columns) {
  const body = el('tbody');
  const row = el('tr');
  table.append(el('thead', {}, row), body);

  let sorted = null; // column
  let descending = true;
  let positions = new Map(); // of keys, as last sorted
  let sortedAt = 0;
  let items = [];

  columns.forEach((c) => {
    const th = el('th', { scope: 'col', class: classes(c) });
    if (c.order) {
      const button = el('button', { type: 'button' }, c.name);
      if (c.title) button.title = c.title;
      button.addEventListener('click', () => {
        const first = !c.words;
        if (sorted !== c) [sorted, descending] = [c, first];
        else if (descending === first) descending = !first;
        else sorted = null; // back to the original order
        for (const other of row.children) other.removeAttribute('aria-sort');
        if (sorted) th.setAttribute('aria-sort', descending ? 'descending' : 'ascending');
        sortedAt = 0;
        render();
      });
      th.append(button);
    } else {
      th.append(c.name);
      if (c.title) th.title = c.title;
    }
    row.append(th);
  });

  const rows = keyed(body, key,
    () => el('tr', {}, ...columns.map((c, i) =>
      i === 0 ? el('th', { scope: 'row', class: classes(c) }) : el('td', { class: classes(c) }))),
    (tr, item) => columns.forEach((c, i) => {
      const cell = tr.children[i];
      if (c.draw) {
        c.draw(cell, item);
        return;
      }
      setText(cell, c.text(item));
      if (c.tip) setAttr(cell, 'title', c.tip(item));
    }));

  function render() {
    const now = performance.now();
    const inUse = body.matches(':hover') || body.contains(document.activeElement);
    if (sortedAt === 0 || (now - sortedAt > resortEvery && !inUse)) {
      const order = [...items];
      if (sorted) order.sort((a, b) => compare(sorted.order(a), sorted.order(b)) * (descending ? -1 : 1));
      positions = new Map(order.map((item, i) => [key(item), i]));
      sortedAt = now;
    }
    const position = (item) => positions.get(key(item)) ?? Infinity;
    rows([...items].sort((a, b) => compare(position(a), position(b))));
  }

  // replaced means that these are different items, to be sorted at once.
  return (next, replaced = false) => {
    items = next;
    if (replaced) sortedAt = 0;
    show(table, items.length > 0);
    render();
  };
}

function classes(c) {
  return [c.words ? 'words' : 'number', c.wide ? 'wide' : ''].join(' ').trim();
}

function compare(a, b) {
  if (typeof a === 'string') return a.localeCompare(b, 'en', { numeric: true });
  return a === b ? 0 : a < b ? -1 : 1;
}
