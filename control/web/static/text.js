// Formatting of numbers, and the helpers that change the document. Data of the daemon becomes
// text, never markup: attackers can choose much of it.

const decimal = ['', 'k', 'M', 'G', 'T', 'P'];
const binary = ['', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi'];

// round3 formats a number that is not negative with three significant digits.
function round3(v) {
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
  return `${round3(v)} ${prefixes[i]}`;
}

// bits formats bytes per second as bits per second.
export const bits = (bytes) => scaled(bytes * 8, 1000, decimal) + 'bit/s';

// bytesRate formats bytes per second.
export const bytesRate = (bytes) => scaled(bytes, 1000, decimal) + 'B/s';

export const size = (bytes) => scaled(bytes, 1024, binary) + 'B';

// count formats a count, which may be large: "12,345", "1.23 M".
export function count(n) {
  return n < 100000 ? Math.round(n).toLocaleString('en-US') : scaled(n, 1000, decimal).trim();
}

// plural formats a count with a noun: "1 packet", "2 packets".
export const plural = (n, thing) => `${count(n)} ${thing}${Math.round(n) === 1 ? '' : 's'}`;

// perSecond formats a rate per second, or per minute or hour if it is lower, so that 2/h does
// not show as 0/s.
export function perSecond(n) {
  if (n >= 1 || n === 0) return (n < 1000 ? round3(n) : count(n)) + '/s';
  return n * 60 >= 1 ? `${round3(n * 60)}/min` : `${round3(n * 3600)}/h`;
}

// seconds formats a delay.
export function seconds(s) {
  if (s === 0) return '0';
  if (s < 0.001) return `${round3(s * 1e6)} µs`;
  if (s < 1) return `${round3(s * 1000)} ms`;
  return s < 60 ? `${round3(s)} s` : duration(s);
}

export const percent = (share) => (share > 0 && share < 0.001 ? '< 0.1' : trim((share * 100).toFixed(1))) + ' %';

// duration formats a time of seconds to days by its two largest units.
export function duration(s) {
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

// clock formats a point in time in the local zone, with the date unless it is today.
export function clock(time) {
  const t = new Date(time);
  const two = (n) => String(n).padStart(2, '0');
  const hours = `${two(t.getHours())}:${two(t.getMinutes())}:${two(t.getSeconds())}`;
  const day = `${t.getFullYear()}-${two(t.getMonth() + 1)}-${two(t.getDate())}`;
  return t.toDateString() === new Date().toDateString() ? hours : `${day} ${hours}`;
}

// timeLeft formats the time until an end, from points in time of the API.
export function timeLeft(until, now, otherwise) {
  return until ? `${duration((Date.parse(until) - Date.parse(now)) / 1000)} left` : otherwise;
}

// overrideEnd formats the end of an override without a time.
export const overrideEnd = (o) => (o.until_reload ? 'until the next reload' : 'until it is unset');

// formatOverrides formats values by key: "rate = 20Mbit/s, connections = 50".
export const formatOverrides = (set) => Object.entries(set).map(([k, v]) => `${k} = ${v}`).join(', ');

export const sum = (numbers) => Object.values(numbers ?? {}).reduce((a, b) => a + b, 0);

// el creates an element; props are attributes, and children are elements or text.
export function el(tag, props = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(props)) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

// Writing an unchanged value would cost a layout, and disturb selections.
export function setText(e, text) {
  if (e.textContent !== text) e.textContent = text;
}

export function setAttr(e, name, value) {
  if (e.getAttribute(name) !== value) e.setAttribute(name, value);
}

export function show(e, visible) {
  if (e.hidden === visible) e.hidden = !visible;
}

// keyed returns a function of items that keeps one child of parent per item, in their order.
// make(item) creates the child of a new key, update(child, item) updates it, and drop(child)
// releases it when its key is gone.
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

// facts returns a function that fills a dl with {name, value, note, title, tone}; only name and
// value are required.
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
