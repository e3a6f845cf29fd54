// The limits that several hosts share: this host in its group, the hosts, and what each may use.

import { sortableTable } from './table.js';
import { bits, count, duration, el, facts, percent, perSecond, plural, seconds, setAttr, setText, show } from './text.js';

const byId = (id) => document.getElementById(id);

// part returns what this host may use of a value of l, a limit that may be shared. A part of nothing is not 0,
// which stands for no limit.
export const part = (l, value) => l.shared ? value * Math.max(l.shared.share, 1e-12) : value;

// criticalOf returns the first critical problem of the group, if there is one.
export const criticalOf = (status) => status.shared?.problems.find((p) => p.severity === 'critical');

const tones = { joined: 'good', static: 'good', joining: 'warn', leaving: 'warn', alone: 'bad', counted: 'good', absent: 'warn', gone: 'idle' };

// liveOf returns the number of hosts that others count on and that are not gone: with "fast", live has those, too.
const liveOf = (shared) => shared.failover === 'strict' ? shared.live : Math.max(0, shared.live - shared.gone);

// shareBar creates a bar for a table cell, and returns a function that draws shares, from 0 to 1: that of this host
// first.
function shareBar() {
  const ns = 'http://www.w3.org/2000/svg';
  const svg = document.createElementNS(ns, 'svg');
  for (const [k, v] of Object.entries({ class: 'shares', viewBox: '0 0 100 8', preserveAspectRatio: 'none', 'aria-hidden': 'true' })) svg.setAttribute(k, v);
  return [svg, (shares) => {
    while (svg.children.length > shares.length) svg.lastElementChild.remove();
    let x = 0;
    shares.forEach((share, i) => {
      const rect = svg.children[i] ?? svg.appendChild(document.createElementNS(ns, 'rect'));
      const width = Math.max(0, Math.min(100 - x, share * 100));
      for (const [k, v] of Object.entries({ class: i === 0 ? 'here' : i % 2 ? 'odd' : 'even', x, y: 0, width, height: 8 })) setAttr(rect, k, String(v));
      x += width;
    });
  }];
}

// ratesOf returns the rates of a limit, with their formats: those of bytes and packets, or that of new connections.
const ratesOf = (l, newConnections) => (newConnections ? [[l.new_connections, perSecond]] : [[l.rate, bits], [l.packets, (n) => `${perSecond(n)} packets`]])
  .filter(([rate]) => rate > 0);

// shareOf formats a share of the rates of a limit: "31 % of 80 Mbit/s = 24.8 Mbit/s".
function shareOf(l, share, newConnections) {
  const text = (scale) => ratesOf(l, newConnections).map(([rate, format]) => format(rate * scale)).join(', ');
  return `${percent(share)} of ${text(1)} = ${text(share)}${newConnections ? ' new connections' : ''}`;
}

// slotsOf formats a share of the connections in flight of a limit: "12 of 40 slots".
const slotsOf = (l, share) => `${count(Math.round(share * l.max_connections))} of ${count(l.max_connections)} slots`;

// rowsOf returns the rows of the table of limits.
function rowsOf(shared) {
  const rows = [];
  for (const l of shared.limits) {
    const add = (bucket, share, text, more) => rows.push({ key: `${rows.length} ${l.limit} ${bucket}`, limit: l.limit, bucket, share, text, others: [], want: '–', state: 'cold', ...more });
    if (l.max_connections > 0 && !(l.key === 'all' && l.buckets.some((b) => b.slots))) {
      add(l.key === 'all' ? 'connections' : 'each cold one', l.host_connections / l.max_connections, slotsOf(l, l.host_connections / l.max_connections));
    }
    for (const isNew of l.key === 'all' ? [] : [false, true]) {
      if (ratesOf(l, isNew).length > 0) add('each cold one', l.cold_share, shareOf(l, l.cold_share, isNew));
    }
    for (const b of l.buckets) {
      const part = b.slots ? (share) => count(Math.round(share * l.max_connections)) : percent;
      const hot = b.hot && { want: b.tickets ? '' : part(b.want), state: ['hot', b.short && 'short', b.tight && 'tight'].filter(Boolean).join(', ') };
      add(b.key, b.share, b.slots ? slotsOf(l, b.share) : shareOf(l, b.share, b.new_connections) + (b.tickets ? ', in turn' : ''), {
        others: b.holders.filter((h) => h.host !== shared.name).map((h) => ({ ...h, text: `${h.host} ${part(h.share)}` })), ...hot,
      });
    }
  }
  return rows;
}

// sharedLimits returns a function of the status.
export function sharedLimits() {
  const vitals = facts(byId('shared-vitals'));
  const bars = new WeakMap();
  const limits = sortableTable(byId('shared-table'), (r) => r.key, [
    { name: 'Limit', words: true, text: (r) => r.limit },
    { name: 'Bucket', words: true, text: (r) => r.bucket },
    {
      name: 'This host', title: 'The part that this host may use', words: true,
      draw(cell, r) {
        if (!bars.has(cell)) {
          const [svg, draw] = shareBar();
          cell.append(el('span'), svg);
          bars.set(cell, draw);
        }
        setText(cell.firstChild, r.text);
        bars.get(cell)([r.share, ...r.others.map((h) => h.share)]);
      },
    },
    { name: 'Others', words: true, wide: true, text: (r) => r.others.map((h) => h.text).join(', ') || '–' },
    { name: 'Wants', title: 'The part that this host needs', wide: true, text: (r) => r.want },
    { name: 'State', title: 'Short: this host should get more of it. Tight: all hosts together need more than the limit.', words: true, wide: true, text: (r) => r.state },
  ]);
  const hosts = sortableTable(byId('host-table'), (h) => h.name, [
    { name: 'Host', words: true, text: (h) => h.here ? `${h.name} (this host)` : h.name },
    {
      name: 'State', words: true,
      draw(cell, h) {
        if (!cell.firstChild) cell.append(el('span', { class: 'badge' }));
        setText(cell.firstChild, h.state);
        setAttr(cell.firstChild, 'data-tone', tones[h.state] ?? 'info');
      },
    },
    { name: 'Last call', text: (h) => h.state === 'gone' ? '–' : `${h.age_seconds < 60 ? seconds(h.age_seconds) : duration(h.age_seconds)} ago` },
    { name: 'Lease left', wide: true, text: (h) => h.lease_left_seconds > 0 ? seconds(h.lease_left_seconds) : '–' },
    {
      name: 'Limits', words: true, wide: true, title: 'Whether they are the same as at this host',
      draw(cell, h) {
        if (!cell.firstChild) cell.append(el('span'));
        setText(cell.firstChild, h.state === 'gone' ? '–' : h.differs ? 'not the same' : 'the same');
        setAttr(cell.firstChild, 'data-tone', h.differs ? 'bad' : '');
      },
    },
    { name: 'Version', words: true, wide: true, text: (h) => h.version ?? '–' },
  ]);
  const unknown = byId('hosts-unknown');
  return ({ shared }) => {
    show(byId('shared'), Boolean(shared));
    show(byId('shared-link'), Boolean(shared));
    if (!shared) return;
    const joined = shared.state === 'joined';
    const withLedger = shared.state !== 'static';
    vitals([
      { name: 'State', value: shared.state, note: withLedger ? `for ${shared.for_seconds < 60 ? seconds(shared.for_seconds) : duration(shared.for_seconds)}` : 'no ledger', tone: tones[shared.state], title: shared.why },
      { name: 'Hosts', value: joined ? `${liveOf(shared)} of ${shared.hosts}` : `${shared.hosts}`, note: joined ? shared.gone > 0 ? `live, ${shared.gone} gone` : 'live' : 'may exist' },
      ...withLedger ? [
        { name: 'Lease', value: shared.lease_left_seconds > 0 ? seconds(shared.lease_left_seconds) : 'ended', note: shared.lease_left_seconds > 0 ? 'left' : `alone = "${shared.alone}"`, title: `Renewed ${seconds(shared.lease_age_seconds)} ago` },
        { name: 'Ledger', value: shared.store_error ? 'fails' : 'answers', note: shared.stores.join(', '), tone: shared.store_error ? 'bad' : '', title: shared.store_error ?? (shared.epoch ? `Epoch ${shared.epoch}${shared.server ? `, ${shared.server} answered last` : ''}` : '') },
        { name: 'Hot buckets', value: count(shared.hot_buckets) },
      ] : [],
    ]);
    limits(rowsOf(shared));
    hosts((shared.ledger?.hosts ?? []).map((h) => ({ ...h, here: h.name === shared.name })));
    const lines = [];
    if (shared.ledger?.unknown > 0) lines.push(`${plural(shared.ledger.unknown, 'more host')} unknown yet. 1/${shared.hosts} of each shared limit is kept for each.`);
    if (withLedger && !shared.ledger) lines.push(`The hosts are unknown: ${shared.ledger_error ?? 'the ledger was not queried'}.`);
    show(unknown, lines.length > 0);
    setText(unknown, lines.join(' '));
  };
}
