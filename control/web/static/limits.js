// The limits: a table of all, and a card with charts for each of them.

import { Chart, sparkline } from './chart.js';
import { part } from './shared.js';
import { sortableTable } from './table.js';
import {
  bits, bytesRate, count, el, facts, formatOverrides, keyed, overrideEnd, percent, perSecond, plural, seconds, setAttr, setText, show, size, sum, timeLeft,
} from './text.js';

// The states, the worst last: [tone, text].
const states = [
  ['idle', 'idle'], ['good', 'passing'], ['info', 'observing'], ['info', 'would throttle'],
  ['warn', 'throttling'], ['warn', 'shedding'], ['refused', 'refusing'], ['bad', 'violated'],
];
const [idle, passing, observing, wouldThrottle, throttling, shedding, refusing, violated] = states.keys();

// refusedRate returns the number of datagrams and connections that l refuses per second.
export const refusedRate = (l) => sum(l.refused_rate);

function stateOf(l) {
  if (!l.conformance.conformant) return violated;
  if (l.mode === 'observe') return l.throttling || l.shed?.share > 0 || refusedRate(l) > 0 ? wouldThrottle : observing;
  if (refusedRate(l) > 0) return refusing;
  if (l.shed?.share > 0) return shedding;
  if (l.throttling) return throttling;
  const passes = [l.bytes_rate, l.packets_rate, l.admitted_rate].some((r) => r['10s'] > 0);
  return passes || l.in_flight > 0 ? passing : idle;
}

export const isViolated = (l) => stateOf(l) === violated;
export const isThrottling = (l) => stateOf(l) >= throttling && !isViolated(l);
export const wouldBeThrottling = (l) => stateOf(l) === wouldThrottle;
export const anchor = (name) => `#limit-${encodeURIComponent(name)}`;

// badge creates the label of a state, which has its own shape besides its color.
function badge() {
  return el('span', { class: 'badge' });
}

function setBadge(e, l) {
  const [tone, text] = states[stateOf(l)];
  setAttr(e, 'data-tone', tone);
  setText(e, text);
}

// maxConnections returns how many connections in flight l allows at this host.
const maxConnections = (l) => l.shared ? l.shared.connections : adapts(l) ? l.adaptive.most : l.max_connections;

const adapts = (l) => l.adaptive && !l.adaptive.observed;

// primary returns the main quantity that l limits, and its series. ceiling is that of this host; whole is that of all
// hosts that share l, as what each had of it in the past is not recorded.
function primary(l) {
  if (l.rate > 0) return { series: 'rate', whole: l.rate, ceiling: part(l, l.rate), now: l.bytes_rate['1s'], format: bits };
  if (l.packets > 0) return { series: 'packets', whole: l.packets, ceiling: part(l, l.packets), now: l.packets_rate['1s'], format: perSecond };
  if (l.max_connections > 0) return { series: 'in_flight', whole: l.max_connections, ceiling: maxConnections(l), now: l.in_flight, format: count };
  if (l.new_connections > 0) return { series: 'admitted', whole: l.new_connections, ceiling: part(l, l.new_connections), now: l.admitted_rate['1s'], format: perSecond };
  return { series: 'rate', whole: 0, ceiling: 0, now: l.bytes_rate['1s'], format: bits };
}

// ofCeiling formats a value with its ceiling, if the limit has one bucket.
function ofCeiling(l, now, ceiling, format) {
  return l.single && ceiling > 0 ? `${format(now)} of ${format(ceiling)}` : format(now);
}

// inFlight formats the connections in flight, which a limit counts if it bounds them or their
// rate, and those that wait.
function inFlight(l) {
  const parts = [];
  if (l.max_connections > 0 || (l.new_connections > 0 && l.plane === 'proxy')) parts.push(ofCeiling(l, l.in_flight, maxConnections(l), count));
  if (l.waiting > 0) parts.push(`${count(l.waiting)} waiting`);
  return parts.join(', ') || '–';
}

// limitTable returns a function of the limits; seriesOf(name) returns the history of a limit.
export function limitTable(table, seriesOf) {
  const sparks = new WeakMap();
  return sortableTable(table, (l) => l.name, [
    {
      name: 'Limit', words: true, order: (l) => l.name,
      draw(cell, l) {
        if (!cell.firstChild) cell.append(el('a', { href: anchor(l.name) }, l.name));
      },
    },
    {
      name: 'State', words: true, title: 'Current state; the worst first', order: (l) => -stateOf(l),
      draw(cell, l) {
        if (!cell.firstChild) cell.append(badge());
        setBadge(cell.firstChild, l);
      },
    },
    {
      name: 'Now', title: 'The main quantity that it limits: bits, packets or new connections per second, or connections in flight',
      order: (l) => l.single && primary(l).ceiling ? primary(l).now / primary(l).ceiling : 0,
      draw(cell, l) {
        const { now, ceiling, format } = primary(l);
        if (!cell.firstChild) cell.append(el('span'), el('small'), el('meter', { min: 0, max: 1, 'aria-hidden': 'true' }));
        const [value, of, meter] = cell.children;
        setText(value, format(now));
        setText(of, ceiling > 0 ? (l.single ? `of ${format(ceiling)}` : `each ${format(ceiling)}`) : '');
        meter.classList.toggle('off', !l.single || ceiling === 0); // keeps its space
        meter.value = ceiling > 0 ? Math.min(1, now / ceiling) : 0;
      },
    },
    {
      name: '5 minutes', wide: true,
      draw(cell, l) {
        if (!sparks.has(cell)) {
          const [svg, draw] = sparkline();
          cell.append(svg);
          sparks.set(cell, draw);
        }
        const { series, whole } = primary(l);
        sparks.get(cell)(seriesOf(l.name).of(series), l.single ? whole : 0);
      },
    },
    {
      name: 'Queue p99', title: '99th percentile of the delay of delayed units over the last minute', wide: true,
      order: (l) => l.queue_delay.p99_seconds, text: (l) => l.queue_delay.count ? seconds(l.queue_delay.p99_seconds) : '–',
    },
    {
      name: 'In flight', title: 'Connections in flight, and those that wait for a slot', wide: true, order: (l) => l.waiting * 1e9 + l.in_flight,
      text: inFlight,
    },
    {
      name: 'Refused', title: 'Datagrams and connections per second, over 10 s', wide: true, order: refusedRate,
      text: (l) => refusedRate(l) > 0 ? perSecond(refusedRate(l)) : '–',
    },
  ]);
}

// limitCards returns a function of the limits and the status.
export function limitCards(parent, seriesOf) {
  const cards = new WeakMap();
  let now = null;
  let overrides = [];
  const render = keyed(parent, (l) => l.name,
    (l) => {
      const c = new Card(l, seriesOf(l.name));
      cards.set(c.root, c);
      return c.root;
    },
    (root, l) => cards.get(root).update(l, overrides.filter((o) => o.limit === l.name), now),
    (root) => cards.get(root).remove());
  return (limits, status) => {
    ({ now, overrides } = status);
    render(limits);
  };
}

class Card {
  constructor(l, series) {
    this.series = series;
    this.charts = [];
    this.shape = '';
    this.badge = badge();
    this.key = el('p', { class: 'soft' });
    this.summary = el('p', { class: 'summary' });
    this.override = el('p', { class: 'override' });
    this.conformance = el('p', { class: 'conformance' });
    this.plots = el('div', { class: 'plots' });
    const list = el('dl', { class: 'figures' });
    this.facts = facts(list);
    this.root = el('article', { class: 'card', id: `limit-${l.name}`, tabindex: '-1', 'aria-label': `Limit ${l.name}` },
      el('header', {}, el('h3', {}, l.name), this.badge),
      this.key, this.summary, this.override, this.conformance, this.plots, list);
  }

  update(l, overrides, now) {
    setBadge(this.badge, l);
    setAttr(this.root, 'data-tone', this.badge.dataset.tone);
    setText(this.key, `${l.plane} plane · ${directions[l.direction] ?? l.direction} · ${l.mode === 'observe' ? 'observes: not enforced' : 'enforced'}`);
    setText(this.summary, summaryOf(l));
    show(this.override, overrides.length > 0);
    setText(this.override, `Override: ${overrides.map((o) => `${formatOverrides(o.set)} (${timeLeft(o.until, now, overrideEnd(o))})`).join(', ')}`);

    const [tone, text] = conformanceOf(l);
    setAttr(this.conformance, 'data-tone', tone);
    setText(this.conformance, text);
    setAttr(this.conformance, 'title', l.conformance.unmonitored ? '' : `Sigma, the largest excess over rate × time in any interval; ${excess(l.conformance)(l.conformance.sigma_max)} since the start`);

    // The limited quantities decide which charts there are, and change with a reload.
    const specs = chartsOf(l);
    const shape = [l.single, ...specs.map((s) => s.name)].join();
    if (shape !== this.shape) {
      this.remove();
      this.charts = specs.map((s, i) => new Chart({ ...s, main: i === 0 }, this.series, l.name));
      this.plots.replaceChildren(...this.charts.map((c) => c.root));
      this.shape = shape;
    }
    this.charts.forEach((c, i) => c.show(specs[i].now, l.single ? specs[i].ceiling * (specs[i].series[0].scale ?? 1) : 0));
    this.facts(figures(l));
  }

  remove() {
    for (const c of this.charts) c.remove();
  }
}

const directions = { 'to-downstream': 'to the downstream', 'from-downstream': 'from the downstream', both: 'both directions' };

function summaryOf(l) {
  const observes = l.mode === 'observe';
  if (l.block) return observes ? 'Would block all traffic.' : 'Blocks all traffic.';
  if (l.single) return `${observes ? 'Would limit to' : 'Limits to'} ${l.summary}.`;
  return `Per bucket (${l.key.split(',').join(', ')}): ${l.summary}.`;
}

const excess = (p) => p.in_packets ? (n) => plural(n, 'packet') : size;

function conformanceOf(l) {
  const c = l.conformance;
  const format = excess(c);
  const violations = c.violations > 0 ? `, ${plural(c.violations, 'violation')} since the start` : '';
  const sampled = c.sampled ? ' One bucket at a time is monitored.' : '';
  if (!c.conformant) {
    return ['bad', `Conformance violated: largest excess ${format(c.sigma)} in the last minute, ${format(c.allowed)} allowed${violations}.${sampled}`];
  }
  if (c.unmonitored) {
    return ['idle', l.mode === 'observe' ? 'Conformance: not monitored, the limit only observes.' : 'Conformance: not monitored, the limit has no rate.'];
  }
  return [c.violations > 0 ? 'warn' : 'good',
    `Conformant: largest excess ${format(c.sigma)}, ${format(c.allowed)} allowed${violations}.${sampled}`];
}

const bitsTick = (v) => bits(v / 8);

// chartsOf returns the charts for the quantities that l limits; the first is the large one.
function chartsOf(l) {
  const list = [];
  const rate = (name) => ({
    name, series: [{ key: 'rate', color: 'blue', scale: 8 }], format: bitsTick, minHeight: 1000,
    now: ofCeiling(l, l.bytes_rate['1s'], part(l, l.rate), bits), ceiling: l.rate,
  });
  if (l.rate > 0) list.push(rate('Rate'));
  if (l.packets > 0) {
    list.push({
      name: 'Packets', series: [{ key: 'packets', color: 'blue' }], format: perSecond, integer: true, minHeight: 1,
      now: ofCeiling(l, l.packets_rate['1s'], part(l, l.packets), perSecond), ceiling: l.packets,
    });
  }
  if (l.max_connections > 0) {
    list.push({
      name: l.slot_for ? `Connections in a ${l.slot_for}` : 'Connections', format: count, integer: true, minHeight: 2, ceiling: l.max_connections,
      series: [{ key: 'in_flight', color: 'green', name: 'in flight' }, { key: 'waiting', color: 'amber', name: 'waiting', fill: false }],
      now: inFlight(l),
    });
  }
  if (l.new_connections > 0) {
    list.push({
      name: 'New connections', series: [{ key: 'admitted', color: 'green' }], format: perSecond, integer: true, minHeight: 1,
      now: ofCeiling(l, l.admitted_rate['1s'], part(l, l.new_connections), perSecond), ceiling: l.new_connections,
    });
  }
  if (list.length === 0) list.push(rate('Rate'));
  if (l.rate > 0 || l.packets > 0) {
    list.push({
      name: 'Queue delay, p99', series: [{ key: 'p99_seconds', color: 'amber' }], format: seconds, minHeight: 0.001,
      now: l.queue_delay.count ? seconds(l.queue_delay.p99_seconds) : 'none', ceiling: 0,
    });
  }
  list.push({
    name: 'Refused', series: [{ key: 'refused', color: 'red' }], format: perSecond, integer: true, minHeight: 1,
    now: refusedRate(l) > 0 ? perSecond(refusedRate(l)) : 'none', ceiling: 0,
  });
  if (!l.single) list[0].name += ', all buckets';
  if (l.mode === 'observe') list[0].name += ', if it were enforced';
  return list;
}

// adapted says what an adaptive limit has found out.
function adapted(l) {
  const a = l.adaptive;
  const bounds = a.observed ? '' : ` (${count(a.min_connections)} to ${count(l.max_connections)})`;
  return {
    name: a.observed ? 'Would adapt to' : 'Adapted to', value: a.connections > 0 ? `${count(a.connections)} connections${bounds}` : 'unknown: too little load',
    title: a.changes.slice(-8).reverse().map((c) => `${new Date(c.at).toLocaleTimeString()}: ${c.from} to ${c.to}, ${c.reason}`).join('\n'),
  };
}

// shed says how much a limit sheds, and what it looks at.
function shed(l) {
  const s = l.shed;
  return {
    name: l.mode === 'observe' ? 'Would shed' : 'Sheds', value: `${percent(s.share)} of the new connections`,
    title: s.signals.map((x) => {
      const show = x.name === 'late' ? seconds : percent;
      const name = x.limit ? `limit ${x.limit}` : x.name;
      return x.error ? `${name}: ${x.error}` : `${name} ${show(x.value)}, sheds from ${show(x.above)}`;
    }).join('\n'),
  };
}

// penalized says how many sources a limit has refused so often that they are blocked.
function penalized({ penalty: p }) {
  return p.mode === 'observe'
    ? { name: 'Would penalize', value: `${plural(p.would_block, 'source')} (${count(p.would_impose_total)} times in total)` }
    : { name: 'Penalizes', value: `${plural(p.blocked, 'source')} (${count(p.imposed_total)} times in total)` };
}

function figures(l) {
  const rates = (r, format) => `${format(r['1s'])} · ${format(r['10s'])} · ${format(r['60s'])}`;
  const delay = (d) => d.count > 0 ? `${seconds(d.p50_seconds)} · ${seconds(d.p99_seconds)}` : 'none';
  const list = l.shared ? [{ name: 'Share of this host', value: percent(l.shared.share), title: 'Of the rates of all hosts together; with a key, of a bucket that no host needs more of' }] : [];
  list.push({
    name: 'Bytes, 1 · 10 · 60 s', value: rates(l.bytes_rate, bits),
    title: `${rates(l.bytes_rate, bytesRate)}; ${size(l.bytes_total)} in total`,
  });
  if (l.packets > 0 || l.plane === 'packet') {
    list.push({ name: 'Packets, 1 · 10 · 60 s', value: rates(l.packets_rate, perSecond), title: `${count(l.packets_total)} in total` });
  }
  if (l.rate > 0 || l.packets > 0) {
    list.push(
      { name: l.mode === 'observe' ? 'Would be delayed' : 'Delayed', value: `${percent(l.delayed_share)} of the bytes`, title: 'Over 10 s' },
      { name: 'Queue, p50 · p99', value: delay(l.queue_delay), title: `Of delayed units over the last minute; at most ${seconds(l.max_delay_seconds)}` });
  }
  if (l.max_connections > 0 || l.new_connections > 0) {
    list.push(
      { name: 'New, 1 · 10 · 60 s', value: rates(l.admitted_rate, perSecond), title: `${count(l.admitted_total)} ${l.slot_for ? `${l.slot_for}s` : 'connections'} in total` },
      { name: l.slot_for ? `In a ${l.slot_for}` : 'In flight', value: inFlight(l) },
      ...(l.adaptive ? [adapted(l)] : []),
      { name: 'Slot wait, p50 · p99', value: delay(l.connection_wait), title: `Of connections that got a slot over the last minute; at most ${seconds(l.queue_timeout_seconds)}` });
  }
  if (l.shed) list.push(shed(l));
  if (l.penalty) list.push(penalized(l));
  const reasons = Object.entries(l.refused ?? {}).filter(([, n]) => n > 0);
  list.push({
    name: 'Refused',
    value: reasons.map(([r, n]) => `${r} ${perSecond(l.refused_rate?.[r] ?? 0)} (${count(n)} in total)`).join(', ') || 'none',
  });
  return list;
}
