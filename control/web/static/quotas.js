// Quotas: what was used of those with the largest used parts.

import { sortableTable } from './table.js';
import { count, duration, el, percent, plural, setAttr, setText, show, size } from './text.js';

const byId = (id) => document.getElementById(id);

const amount = (q, n) => q.unit === 'bytes' ? size(n) : count(n) + ' ' + q.unit;
const part = (q) => q.used / q.amount;

// quotas returns a function of the quotas of a live event, which may be missing.
export function quotas() {
  const table = sortableTable(byId('quota-table'), (q) => `${q.limit} ${q.key}`, [
    { name: 'Limit', words: true, text: (q) => q.limit },
    { name: 'Key', words: true, text: (q) => q.key || 'all' },
    {
      name: 'Used', title: 'Part of the quota that was used in the present period',
      draw(cell, q) {
        if (!cell.firstChild) cell.append(el('span'));
        setText(cell.firstChild, percent(part(q)));
        setAttr(cell.firstChild, 'data-tone', part(q) >= 1 ? 'bad' : '');
      },
    },
    { name: 'Amount', wide: true, text: (q) => amount(q, q.used) },
    { name: 'Of', text: (q) => amount(q, q.amount) },
    { name: 'Period', words: true, wide: true, text: (q) => q.period },
    { name: 'Ends in', title: 'Of a rolling period, its present 24th', text: (q) => duration(q.ends_seconds) },
  ]);
  return (all) => {
    show(byId('quotas'), Boolean(all));
    if (!all) return;
    table(all.quotas);
    const more = all.total - all.quotas.length;
    show(byId('quotas-note'), all.total === 0 || more > 0 || all.used_up > 0);
    setText(byId('quotas-note'), all.total === 0 ? 'Nothing was used of a quota.'
      : [more > 0 ? `And ${plural(more, 'key')} with smaller parts.` : '', all.used_up > 0 ? `${plural(all.used_up, 'key')} used up.` : ''].filter(Boolean).join(' '));
  };
}
