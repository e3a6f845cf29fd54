// Numbers as people write them, and the few ways in which this page changes its document.
// What the daemon says becomes text, never markup: much of it was chosen by strangers.

const decimal = ['', 'k', 'M', 'G', 'T', 'P'];
const binary = ['', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi'];

// digits writes a number that is not negative with three digits that mean something.
function digits(v) {
  if (v >= 100 || v === 0) return v.toFixed(0);
  return v >= 10 ? trim(v.toFixed(1)) : trim(v.toFixed(2));
}

function trim(s) {
  return s.replace(/\.?0+$/, '');
}

function scaled(v, base, prefixes) {
  let i = 0;
  while (v >= base * 0.9995 && i < prefixes.length - 1) {
    v /= base;
    i++;
  }
  return `${digits(v)} ${prefixes[i]}`;
}

// bits writes bytes a second in bits.
export const bits = (bytes) => scaled(bytes * 8, 1000, decimal) + 'bit/s';

// bytesRate writes bytes a second.
export const bytesRate = (bytes) => scaled(bytes, 1000, decimal) + 'B/s';

export const size = (bytes) => scaled(bytes, 1024, binary) + 'B';

// count writes a number that is large now and then: "12,345", "1.23 M".
export function count(n) {
  return n < 100000 ? Math.round(n).toLocaleString('en-US') : scaled(n, 1000, decimal).trim();
}

// many writes a number of things: "1 packet", "2 packets".
export const many = (n, thing) => `${count(n)} ${thing}${Math.round(n) === 1 ? '' : 's'}`;

// perSecond writes what happens a second, and what is rarer by the minute or hour, so that
// a limit of 2 an hour is not one of 0/s.
export function perSecond(n) {
  if (n >= 1 || n === 0) return (n < 1000 ? digits(n) : count(n)) + '/s';
  return n * 60 >= 1 ? `${digits(n * 60)}/min` : `${digits(n * 3600)}/h`;
}

// seconds writes how long something waited; 0 is that nothing did.
export function seconds(s) {
  if (s === 0) return '0';
  if (s < 0.001) return `${digits(s * 1e6)} µs`;
  if (s < 1) return `${digits(s * 1000)} ms`;
  return s < 60 ? `${digits(s)} s` : span(s);
}

export const percent = (share) => (share > 0 && share < 0.001 ? '< 0.1' : trim((share * 100).toFixed(1))) + ' %';

// span writes a time of seconds to days by its two largest units.
export function span(s) {
  s = Math.max(0, Math.floor(s));
  const units = [[86400, 'd'], [3600, 'h'], [60, 'min'], [1, 's']];
  const first = units.findIndex(([n]) => s >= n);
  if (first < 0) return '0 s';
  const parts = [];
  for (const [n, name] of units.slice(first, first + 2)) {
    if (Math.floor(s / n) > 0) parts.push(`${Math.floor(s / n)} ${name}`);
    s %= n;
  }
  return parts.join(' ');
}

// clock writes a point in time in the reader's own zone, with the day unless it is today.
export function clock(time) {
  const t = new Date(time);
  const two = (n) => String(n).padStart(2, '0');
  const hours = `${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
  const day = `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())}`;
  return t.toDateString() === new Date().toDateString() ? hours : `${day} ${hours}`;
}

// timeLeft writes how long something stays in force, from points in time as the API has them.
export function timeLeft(until, now, without) {
  return until ? `${span((Date.parse(until) - Date.parse(now)) / 1000)} left` : without;
}

// unsetBy writes what ends an override that has no time.
export const unsetBy = (o) => (o.until_reload ? 'until the next reload' : 'until it is unset');

// settings writes what is set by key: "rate = 20Mbit/s, connections = 50".
export const settings = (set) => Object.entries(set).map(([k, v]) => `${k} = ${v}`).join(', ');

export const sum = (numbers) => Object.values(numbers ?? {}).reduce((a, b) => a + b, 0);

// el makes an element; props are attributes, and children are elements or text.
export function el(tag, props = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(props)) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

// Writing what is there already would cost a layout, and disturb selections.
export function setText(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

export function setAttr(e, name, value) {
  if (e.getAttribute(name) !== value) e.setAttribute(name, value);
}

export function show(e, shown) {
  if (e.hidden === shown) e.hidden = !shown;
}

// keyed makes the children of parent those of items, in their order: what make(item) made
// stays as long as an item of its key is there, update(child, item) brings it up to date,
// and drop(child) gives back what it holds when it goes. It returns a function of items.
export function keyed(parent, key, make, update, drop = () => {}) {
  const children = new Map();
  return (items) => {
    const keys = items.map(key);
    const stay = new Set(keys);
    for (const [k, child] of children) {
      if (stay.has(k)) continue;
      drop(child);
      child.remove();
      children.delete(k);
    }
    let next = parent.firstElementChild;
    items.forEach((item, i) => {
      let child = children.get(keys[i]);
      if (!child) {
        child = make(item);
        children.set(keys[i], child);
      }
      update(child, item);
      if (child === next) next = child.nextElementSibling;
      else parent.insertBefore(child, next);
    });
  };
}

// facts fills a dl with {name, value, note, title, tone} in place; all but name and value
// may be left out.
export function facts(list) {
  return keyed(list, (f) => f.name,
    (f) => el('div', {}, el('dt', {}, f.name), el('dd', {}, el('span'), el('small'))),
    (div, f) => {
      const dd = div.lastElementChild;
      setText(dd.firstChild, f.value);
      setText(dd.lastChild, f.note ?? '');
      setAttr(dd, 'title', f.title ?? '');
      setAttr(dd, 'data-tone', f.tone ?? '');
    });
}
