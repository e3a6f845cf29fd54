// The limits: a table of all, and a card with charts for each.

import { Chart, spark } from './chart.js';
import { sortableTable } from './table.js';
import {
  bits, bytesRate, count, el, facts, keyed, many, percent, perSecond, seconds, setAttr, setText, settings, show, size, sum, timeLeft, unsetBy,
} from './text.js';

// The states, the worst last: [tone, words].
const states = [
  ['idle', 'idle'], ['good', 'keeps up'], ['info', 'observes'], ['info', 'would hold back'],
  ['held', 'holds back'], ['refused', 'refuses'], ['bad', 'broken'],
];
const [idle, passing, observes, would, holds, refuses, broken] = states.keys();

// refusing is how many datagrams and connections a second l refuses now.
export const refusing = (l) => sum(l.refused_rate);

function stateOf(l) {
  if (!l.promise.kept) return broken;
  if (l.mode === 'observe') return l.slows || refusing(l) > 0 ? would : observes;
  if (refusing(l) > 0) return refuses;
  if (l.slows) return holds;
  const passes = [l.bytes_rate, l.packets_rate, l.admitted_rate].some((r) => r['10s'] > 0);
  return passes || l.in_flight > 0 ? passing : idle;
}

export const isBroken = (l) => stateOf(l) === broken;
export const holdsBack = (l) => stateOf(l) === holds || stateOf(l) === refuses;
export const wouldHold = (l) => stateOf(l) === would;
export const anchor = (name) => `#limit-${encodeURIComponent(name)}`;

// badge makes the word for a state, with a shape of its own beside the colour.
function badge() {
  return el('span', { class: 'badge' });
}

function setBadge(e, l) {
  const [tone, words] = states[stateOf(l)];
  setAttr(e, 'data-tone', tone);
  setText(e, words);
}

// what is the main thing that l limits, and the ring's series of it.
function what(l) {
  if (l.rate > 0) return { series: 'rate', ceiling: l.rate, now: l.bytes_rate['1s'], format: bits };
  if (l.packets > 0) return { series: 'packets', ceiling: l.packets, now: l.packets_rate['1s'], format: perSecond };
  if (l.connections > 0) return { series: 'in_flight', ceiling: l.connections, now: l.in_flight, format: count };
  if (l.new_connections > 0) return { series: 'admitted', ceiling: l.new_connections, now: l.admitted_rate['1s'], format: perSecond };
  return { series: 'rate', ceiling: 0, now: l.bytes_rate['1s'], format: bits };
}

// ofCeiling writes a value beside the ceiling it is held to, where one bucket has it all.
function ofCeiling(l, now, ceiling, format) {
  return l.single && ceiling > 0 ? `${format(now)} of ${format(ceiling)}` : format(now);
}

// inFlight tells of connections in flight, which a limit counts when it bounds them, or how
// many come, and of those that wait.
function inFlight(l) {
  const found = [];
  if (l.connections > 0 || (l.new_connections > 0 && l.plane === 'proxy')) found.push(ofCeiling(l, l.in_flight, l.connections, count));
  if (l.waiting > 0) found.push(`${count(l.waiting)} wait`);
  return found.join(', ') || '–';
}

// limitTable returns a function of the limits; ring(name) has what was.
export function limitTable(table, ring) {
  const sparks = new WeakMap();
  return sortableTable(table, (l) => l.name, [
    {
      name: 'Limit', words: true, order: (l) => l.name,
      draw(cell, l) {
        if (!cell.firstChild) cell.append(el('a', { href: anchor(l.name) }, l.name));
      },
    },
    {
      name: 'State', words: true, title: 'What it does now; the worst first', order: (l) => -stateOf(l),
      draw(cell, l) {
        if (!cell.firstChild) cell.append(badge());
        setBadge(cell.firstChild, l);
      },
    },
    {
      name: 'Now', title: 'What it limits first: bits, packets or new connections a second, or connections in flight',
      order: (l) => l.single && what(l).ceiling ? what(l).now / what(l).ceiling : 0,
      draw(cell, l) {
        const { now, ceiling, format } = what(l);
        if (!cell.firstChild) cell.append(el('span'), el('small'), el('meter', { min: 0, max: 1, 'aria-hidden': 'true' }));
        const [value, of, meter] = cell.children;
        setText(value, format(now));
        setText(of, ceiling > 0 ? (l.single ? `of ${format(ceiling)}` : `each ${format(ceiling)}`) : '');
        meter.classList.toggle('off', !l.single || ceiling === 0); // keeps its place
        meter.value = ceiling > 0 ? Math.min(1, now / ceiling) : 0;
      },
    },
    {
      name: '5 minutes', wide: true,
      draw(cell, l) {
        if (!sparks.has(cell)) {
          const [svg, draw] = spark();
          cell.append(svg);
          sparks.set(cell, draw);
        }
        const { series, ceiling } = what(l);
        sparks.get(cell)(ring(l.name).of(series), l.single ? ceiling : 0);
      },
    },
    {
      name: 'Queue p99', title: '99 of 100 units that were delayed in the last minute waited no longer', wide: true,
      order: (l) => l.queue_delay.p99, text: (l) => l.queue_delay.count ? seconds(l.queue_delay.p99) : '–',
    },
    {
      name: 'In flight', title: 'Connections in flight, and how many wait for a slot', wide: true, order: (l) => l.waiting * 1e9 + l.in_flight,
      text: inFlight,
    },
    {
      name: 'Refused', title: 'Datagrams and connections a second, over 10 s', wide: true, order: refusing,
      text: (l) => refusing(l) > 0 ? perSecond(refusing(l)) : '–',
    },
  ]);
}

// limitCards returns a function of the limits and the status.
export function limitCards(parent, ring) {
  const cards = new WeakMap();
  let now = null;
  let overrides = [];
  const shown = keyed(parent, (l) => l.name,
    (l) => {
      const c = new Card(l, ring(l.name));
      cards.set(c.root, c);
      return c.root;
    },
    (root, l) => cards.get(root).update(l, overrides.filter((o) => o.limit === l.name), now),
    (root) => cards.get(root).remove());
  return (limits, status) => {
    ({ now, overrides } = status);
    shown(limits);
  };
}

class Card {
  constructor(l, ring) {
    this.ring = ring;
    this.charts = [];
    this.shape = '';
    this.badge = badge();
    this.key = el('p', { class: 'soft' });
    this.held = el('p', { class: 'held' });
    this.override = el('p', { class: 'override' });
    this.promise = el('p', { class: 'promise' });
    this.plots = el('div', { class: 'plots' });
    const list = el('dl', { class: 'figures' });
    this.facts = facts(list);
    this.root = el('article', { class: 'card', id: `limit-${l.name}`, tabindex: '-1', 'aria-label': `Limit ${l.name}` },
      el('header', {}, el('h3', {}, l.name), this.badge),
      this.key, this.held, this.override, this.promise, this.plots, list);
  }

  update(l, overrides, now) {
    setBadge(this.badge, l);
    setAttr(this.root, 'data-tone', this.badge.dataset.tone);
    setText(this.key, `${l.plane} plane · ${directions[l.direction] ?? l.direction} · ${l.mode === 'observe' ? 'observes: holds nothing back' : 'enforced'}`);
    setText(this.held, heldTo(l));
    show(this.override, overrides.length > 0);
    setText(this.override, `Override: ${overrides.map((o) => `${settings(o.set)} (${timeLeft(o.until, now, unsetBy(o))})`).join(', ')}`);

    const [tone, words] = promise(l);
    setAttr(this.promise, 'data-tone', tone);
    setText(this.promise, words);
    setAttr(this.promise, 'title', l.promise.unwatched ? '' : `Sigma, the largest excess over rate × time in any interval; ${excess(l.promise)(l.promise.sigma_most)} since the start`);

    // What is limited decides which charts there are, and changes by a reload.
    const specs = chartsOf(l);
    const shape = [l.single, ...specs.map((s) => s.name)].join();
    if (shape !== this.shape) {
      this.remove();
      this.charts = specs.map((s, i) => new Chart({ ...s, main: i === 0 }, this.ring, l.name));
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

function heldTo(l) {
  const observes = l.mode === 'observe';
  if (l.block) return observes ? 'Would block: nothing would pass.' : 'Blocks: nothing passes.';
  if (l.single) return `${observes ? 'Would be held' : 'Held'} to ${l.held_to}.`;
  return `Each bucket (${l.key.split(',').join(', ')}): ${l.held_to}.`;
}

const excess = (p) => p.in_packets ? (n) => many(n, 'packet') : size;

function promise(l) {
  const p = l.promise;
  const write = excess(p);
  const beyond = p.violations > 0 ? `, ${many(p.violations, 'unit')} beyond it since the start` : '';
  const of = p.sampled ? ' One bucket at a time is watched.' : '';
  if (!p.kept) {
    return ['bad', `Promise broken: ${write(p.sigma)} more than the rate in the last minute, ${write(p.allowed)} are allowed${beyond}.${of}`];
  }
  if (p.unwatched) {
    return ['idle', l.mode === 'observe' ? 'Promise: none is made, it only observes.' : 'Promise: unwatched, there is no rate to keep to.'];
  }
  return [p.violations > 0 ? 'held' : 'good',
    `Promise kept: at most ${write(p.sigma)} more than the rate, ${write(p.allowed)} are allowed${beyond}.${of}`];
}

const bitsTick = (v) => bits(v / 8);

// chartsOf chooses by what l limits; the first one is the large one.
function chartsOf(l) {
  const list = [];
  const rate = (name) => ({
    name, series: [{ key: 'rate', colour: 'blue', scale: 8 }], format: bitsTick, least: 1000,
    now: ofCeiling(l, l.bytes_rate['1s'], l.rate, bits), ceiling: l.rate,
  });
  if (l.rate > 0) list.push(rate('Rate'));
  if (l.packets > 0) {
    list.push({
      name: 'Packets', series: [{ key: 'packets', colour: 'blue' }], format: perSecond, whole: true, least: 1,
      now: ofCeiling(l, l.packets_rate['1s'], l.packets, perSecond), ceiling: l.packets,
    });
  }
  if (l.connections > 0) {
    list.push({
      name: 'Connections', format: count, whole: true, least: 2, ceiling: l.connections,
      series: [{ key: 'in_flight', colour: 'green', name: 'in flight' }, { key: 'waiting', colour: 'amber', name: 'wait', fill: false }],
      now: inFlight(l),
    });
  }
  if (l.new_connections > 0) {
    list.push({
      name: 'New connections', series: [{ key: 'admitted', colour: 'green' }], format: perSecond, whole: true, least: 1,
      now: ofCeiling(l, l.admitted_rate['1s'], l.new_connections, perSecond), ceiling: l.new_connections,
    });
  }
  if (list.length === 0) list.push(rate('Passes'));
  if (l.rate > 0 || l.packets > 0) {
    list.push({
      name: 'Queue delay, p99', series: [{ key: 'p99', colour: 'amber' }], format: seconds, least: 0.001,
      now: l.queue_delay.count ? seconds(l.queue_delay.p99) : 'none', ceiling: 0,
    });
  }
  list.push({
    name: 'Refused', series: [{ key: 'refused', colour: 'red' }], format: perSecond, whole: true, least: 1,
    now: refusing(l) > 0 ? perSecond(refusing(l)) : 'none', ceiling: 0,
  });
  if (!l.single) list[0].name += ', all buckets';
  if (l.mode === 'observe') list[0].name += ', were it enforced';
  return list;
}

function figures(l) {
  const rates = (r, write) => `${write(r['1s'])} · ${write(r['10s'])} · ${write(r['60s'])}`;
  const delay = (d) => d.count > 0 ? `${seconds(d.p50)} · ${seconds(d.p99)}` : 'no wait';
  const list = [{
    name: 'Bytes, 1 · 10 · 60 s', value: rates(l.bytes_rate, bits),
    title: `${rates(l.bytes_rate, bytesRate)}; ${size(l.bytes_total)} in all`,
  }];
  if (l.packets > 0 || l.plane === 'packet') {
    list.push({ name: 'Packets, 1 · 10 · 60 s', value: rates(l.packets_rate, perSecond), title: `${count(l.packets_total)} in all` });
  }
  if (l.rate > 0 || l.packets > 0) {
    list.push(
      { name: l.mode === 'observe' ? 'Would wait' : 'Had to wait', value: `${percent(l.delayed_share)} of the bytes`, title: 'Over 10 s' },
      { name: 'Queue, p50 · p99', value: delay(l.queue_delay), title: `Of what was delayed in the last minute; at most ${seconds(l.max_delay)}` });
  }
  if (l.connections > 0 || l.new_connections > 0) {
    list.push(
      { name: 'New, 1 · 10 · 60 s', value: rates(l.admitted_rate, perSecond), title: `${count(l.admitted_total)} connections in all` },
      { name: 'In flight', value: inFlight(l) },
      { name: 'Slot, p50 · p99', value: delay(l.connection_wait), title: `Of connections that got a slot in the last minute; at most ${seconds(l.max_wait)}` });
  }
  const reasons = Object.entries(l.refused ?? {}).filter(([, n]) => n > 0);
  list.push({
    name: 'Refused',
    value: reasons.map(([r, n]) => `${r} ${perSecond(l.refused_rate?.[r] ?? 0)} (${count(n)} in all)`).join(', ') || 'never',
  });
  return list;
}
