// Tables that are sorted by their headings, and keep their rows from one second to the next.

import { el, keyed, setAttr, setText, show } from './text.js';

// Rows that change places each second cannot be read.
const resortEvery = 5000; // ms

// sortableTable makes the head of table, and returns a function that shows items in it.
// columns are {name, title, text(item), tip(item), order(item), draw(cell, item), wide,
// words}: text is what the cell says unless draw fills it, order is what it is sorted by,
// numbers with the largest first. The first column names the row. wide columns are left
// out on a phone; words are not numbers.
export function sortableTable(table, key, columns) {
  const body = el('tbody');
  const row = el('tr');
  table.append(el('thead', {}, row), body);

  let sorted = null; // column
  let descending = true;
  let places = new Map(); // of keys, since they were last sorted
  let when = 0;
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
        else sorted = null; // back to the order they came in
        for (const other of row.children) other.removeAttribute('aria-sort');
        if (sorted) th.setAttribute('aria-sort', descending ? 'descending' : 'ascending');
        when = 0;
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
    const reads = body.matches(':hover') || body.contains(document.activeElement);
    if (when === 0 || (now - when > resortEvery && !reads)) {
      const order = [...items];
      if (sorted) order.sort((a, b) => compare(sorted.order(a), sorted.order(b)) * (descending ? -1 : 1));
      places = new Map(order.map((item, i) => [key(item), i]));
      when = now;
    }
    const place = (item) => places.get(key(item)) ?? Infinity;
    rows([...items].sort((a, b) => compare(place(a), place(b))));
  }

  // anew says that these are other items than before, to be sorted at once.
  return (next, anew = false) => {
    items = next;
    if (anew) when = 0;
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
