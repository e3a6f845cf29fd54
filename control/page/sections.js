// What is shown beside the limits: the headline, what else is in force, who, downstreams,
// events and the daemon itself. Each function here returns one that brings its part up
// to date.

import { anchor, holdsBack, isBroken, refusing, wouldHold } from './limits.js';
import { sortableTable } from './table.js';
import { bits, bytesRate, clock, count, el, facts, keyed, many, percent, perSecond, seconds, setAttr, setText, settings, show, size, span, sum, timeLeft, unsetBy } from './text.js';

const byId = (id) => document.getElementById(id);

// stateOf says in words, and as a tone, whether the promise is kept, and whom it costs.
function stateOf(status, limits) {
  const unserved = status.listeners.filter((l) => l.unserved);
  if (unserved.length > 0) {
    const at = unserved.slice(0, 3).map((l) => l.name).join(', ') + (unserved.length > 3 ? ` and ${unserved.length - 3} more` : '');
    return { tone: 'bad', short: 'NOT SERVED', words: `Nobody is served at ${at}.`, about: unserved[0].unserved, limits: [] };
  }
  const broken = limits.filter(isBroken);
  const holding = limits.filter(holdsBack);
  const would = limits.filter(wouldHold);
  const all = (n) => n === limits.length && n > 1 ? `All ${n} limits` : n === 1 ? '1 limit' : `${n} limits`;
  if (status.bypass) {
    return { tone: 'bad', short: 'BYPASS', words: 'Bypass is on. Nothing is held back.', about: would.length > 0 ? 'Would hold back' : '', limits: would };
  }
  if (status.promise === 'broken' || broken.length > 0) {
    return { tone: 'bad', short: 'broken', words: 'The promise is broken.', about: 'More than allowed left in the last minute', limits: broken };
  }
  if (limits.length === 0) {
    return { tone: 'info', short: 'no limits', words: 'There are no limits. Nothing is held back.', about: '', limits: [] };
  }
  if (limits.every((l) => l.mode === 'observe')) {
    return { tone: 'info', short: 'observing', words: 'Only observing. Nothing is held back.', about: would.length > 0 ? 'Would hold back' : '', limits: would };
  }
  if (holding.length > 0) {
    return {
      tone: 'held', short: `${holding.length} hold back`,
      words: `The promise is kept. ${all(holding.length)} ${holding.length === 1 ? 'holds' : 'hold'} traffic back.`,
      about: 'Holding back', limits: holding,
    };
  }
  return { tone: 'good', short: 'kept', words: 'The promise is kept. Nobody is being slowed.', about: '', limits: [] };
}

export function headline() {
  const detail = byId('headline-detail');
  const about = detail.appendChild(el('span'));
  const names = keyed(detail.appendChild(el('span', { class: 'names' })), (l) => l.name,
    (l) => el('a', { href: anchor(l.name) }, l.name), () => {});
  const more = detail.appendChild(el('span'));
  const vitals = facts(byId('vitals'));
  return (status, limits, sources) => {
    const s = stateOf(status, limits);
    setAttr(byId('headline'), 'data-tone', s.tone);
    setText(byId('headline-words'), s.words);
    document.title = `${s.short} · shaperd`;
    show(detail, s.about !== '');
    setText(about, s.limits.length > 0 ? `${s.about}: ` : `${s.about}.`);
    names(s.limits.slice(0, 6));
    setText(more, s.limits.length > 6 ? ` and ${s.limits.length - 6} more` : '');
    vitals(vitalsOf(status, limits, sources));
  };
}

// unknown is the headline of what is no longer known.
export function unknown() {
  setAttr(byId('headline'), 'data-tone', 'idle');
  setText(byId('headline-words'), 'Not known: the daemon does not answer.');
  show(byId('headline-detail'), false);
  document.title = 'no connection · shaperd';
}

function vitalsOf(status, limits, sources) {
  const to = sum(status.listeners.map((l) => l.to_downstream_rate));
  const from = sum(status.listeners.map((l) => l.from_downstream_rate));
  const enforced = limits.filter((l) => l.mode === 'enforce');
  const most = (value, of = enforced) => of.reduce((a, l) => value(l) > (a ? value(a) : 0) ? l : a, null);
  const slowest = most((l) => l.queue_delay.p99);
  const fullest = most((l) => l.waiting);
  const refuser = most(refusing);
  const waiter = most((w) => w.delayed.value, enforced.length > 0 ? sources.filter((w) => w.delayed.value >= least) : []);
  const none = { value: 'none', note: '', tone: '' };
  const slows = enforced.some((l) => l.slows);
  const moved = status.listeners.length === 0 ? [] : [ // what passes attachments alone is not known
    { name: 'To downstreams', value: bits(to), note: bytesRate(to), title: 'All listeners, over 10 s' },
    { name: 'From downstreams', value: bits(from), note: bytesRate(from), title: 'All listeners, over 10 s' },
    { name: 'Connections', value: count(sum(status.listeners.map((l) => l.open))), note: many(sum(status.listeners.map((l) => l.flows)), 'UDP flow') },
  ];
  return [
    ...moved,
    {
      name: 'Waits most', title: 'The source, and how many seconds its traffic waited, each second',
      ...waiter ? { value: waited(waiter.delayed.value), note: waiter.name, tone: slows ? 'held' : '' } : none,
    },
    {
      name: 'Wait for a slot', title: 'Connections, under the limit with the most',
      ...fullest ? { value: count(fullest.waiting), note: fullest.name, tone: 'held' } : none,
    },
    {
      name: 'Longest queue, p99', title: '99 of 100 units that the limit delayed in the last minute waited no longer',
      ...slowest ? { value: seconds(slowest.queue_delay.p99), note: slowest.name, tone: slowest.slows ? 'held' : '' } : none,
    },
    {
      name: 'Refused', title: 'Datagrams and connections, over 10 s; and the limit that refuses most',
      ...refuser ? { value: perSecond(sum(enforced.map(refusing))), note: refuser.name, tone: 'refused' } : none,
    },
  ];
}

// bypassAlarm is over everything while the kill switch is on.
export function bypassAlarm() {
  const alarm = byId('bypass');
  return (status) => {
    show(alarm, Boolean(status.bypass));
    document.documentElement.classList.toggle('bypassed', Boolean(status.bypass));
    if (status.bypass) {
      const { since: from, until } = status.bypass;
      setText(byId('bypass-since'), `Since ${clock(from)}, ${timeLeft(until, status.now, 'until somebody turns it off')}.`);
    }
  };
}

const mostBlocks = 10;

// notices are what an operator should know before believing anything else.
export function notices() {
  const list = byId('notices');
  const update = keyed(list, (n) => n.key,
    () => el('li', {}, el('strong'), el('span'), el('ol')),
    (li, n) => {
      const [title, text, errors] = li.children;
      setAttr(li, 'data-tone', n.tone);
      setText(title, n.title);
      setText(text, n.text);
      show(errors, Boolean(n.errors));
      const lines = n.errors ?? [];
      if (errors.children.length !== lines.length || lines.some((e, i) => errors.children[i].textContent !== e)) {
        errors.replaceChildren(...lines.map((e) => el('li', {}, e)));
      }
    });
  return (status) => {
    const found = [];
    const add = (key, tone, title, text, errors) => found.push({ key, tone, title, text, errors });
    if (status.state === 'draining') {
      const open = sum(status.listeners.map((l) => l.open + l.flows));
      add('draining', 'held', 'Draining', `The daemon is stopping: it takes nothing new. Left are connections and flows: ${count(open)}.`);
    }
    if (!status.reload.ok) {
      add('reload', 'bad', 'Reload failed', `At ${clock(status.reload.at)}. What was loaded at ${clock(status.reload.loaded)} stays in force.`, status.reload.errors);
    }
    if (status.mode === 'observe' && !status.bypass) {
      add('observe', 'info', 'Observe', 'The configuration only observes: limits count what they would do, and hold nothing back.');
    }
    for (const d of status.listeners.flatMap((l) => l.downstreams)) {
      const key = `${d.state} ${d.listener} ${d.downstream}`;
      const which = `Downstream ${d.downstream} of listener ${d.listener}`;
      if (d.state === 'down') add(key, 'bad', 'Down', `${which}: its checks fail${d.error ? ` (${d.error})` : ''}.`);
      if (d.state === 'failing') add(key, 'bad', 'Failing', `${which}${d.error ? `: ${d.error}` : ''}.`);
      if (d.state === 'drained') add(key, 'held', 'Drained', `${which} gets nothing new.`);
    }
    for (const a of status.attachments.filter((a) => !a.up)) {
      add(`attachment ${a.name} ${a.interface} ${a.direction}`, 'bad', 'Not enforced', `${a.name}, ${a.interface || 'no interface'}: ${(a.error || 'down').replace(/^not enforced: /, '')}`);
    }
    for (const o of status.overrides) {
      add(`override ${o.limit} ${o.since}`, 'held', 'Override', `${o.limit}: ${settings(o.set)}, since ${clock(o.since)}, ${timeLeft(o.until, status.now, unsetBy(o))}.`);
    }
    for (const b of status.blocks.slice(0, mostBlocks)) {
      add(`block ${b.prefix}`, 'held', 'Block', `Nothing passes from ${b.prefix}, since ${clock(b.since)}, ${timeLeft(b.until, status.now, 'until it is taken away')}.`);
    }
    if (status.blocks_total > mostBlocks) {
      add('blocks', 'held', 'Blocks', `And ${count(status.blocks_total - mostBlocks)} more: shaperd blocks`);
    }
    show(list, found.length > 0);
    update(found);
  };
}

// waited writes seconds a second: many wait at a time.
const waited = (s) => `${s < 60 ? seconds(s) : `${count(s)} s`}/s`;

// least is what is left of a weight when it no longer counts: they fade, and never end.
const least = 0.001;

// weight is a column of heavy weights. The error is written where it may change what the
// reader makes of the value.
function weight(name, title, of, write, more = write) {
  return {
    name, title, order: (w) => of(w).value,
    draw(cell, w) {
      if (!cell.firstChild) cell.append(el('span'), el('small'));
      const { value, error } = of(w);
      const now = value >= least;
      setText(cell.firstChild, now ? write(value) : '–');
      setText(cell.lastChild, now && error > 0.05 * value ? `± ${write(error)}` : '');
      setAttr(cell, 'title', `${more(value)}, and at most ${more(error)} less`);
    },
  };
}

export function who() {
  const tabs = [...byId('who-tabs').children];
  const panel = byId('who-panel');
  const update = sortableTable(byId('who-table'), (w) => w.name, [
    {
      name: 'Name', words: true, order: (w) => w.name,
      draw(cell, w) {
        if (!cell.firstChild) cell.append(el('span'), el('small'));
        setText(cell.firstChild, w.name);
        setText(cell.lastChild, w.as_name ?? '');
      },
    },
    weight('Rate', '', (w) => w.rate, bits, bytesRate),
    weight('Waited', 'Seconds that its traffic waited, each second', (w) => w.delayed, waited),
    weight('Refused', 'Datagrams and connections a second', (w) => w.dropped, perSecond),
  ]);

  let by = 'source';
  let known = {};
  const render = (anew) => {
    const list = known[by] ?? [];
    update(list, anew);
    show(byId('who-none'), list.length === 0);
  };
  const select = (tab) => {
    for (const t of tabs) {
      t.setAttribute('aria-selected', String(t === tab));
      t.tabIndex = t === tab ? 0 : -1;
    }
    panel.setAttribute('aria-labelledby', tab.id);
    by = tab.dataset.who;
    render(true);
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener('click', () => select(tab));
    tab.addEventListener('keydown', (e) => {
      const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: -1 }[e.key];
      if (to === undefined) return;
      e.preventDefault();
      const next = tabs.at(to % tabs.length);
      next.focus();
      select(next);
    });
  });
  return (live) => {
    known = live;
    render();
  };
}

export function downstreams() {
  const downs = sortableTable(byId('downstream-table'), (d) => `${d.listener} ${d.downstream}`, [
    { name: 'Downstream', words: true, order: (d) => d.downstream, text: (d) => d.downstream },
    { name: 'Listener', words: true, order: (d) => d.listener, text: (d) => d.listener },
    {
      name: 'State', words: true, order: (d) => d.state,
      draw(cell, d) {
        if (!cell.firstChild) cell.append(el('span', { class: 'badge' }));
        setText(cell.firstChild, d.state);
        setAttr(cell.firstChild, 'data-tone', { up: 'good', down: 'bad', failing: 'bad' }[d.state] ?? 'held');
        setAttr(cell, 'title', d.error ?? '');
      },
    },
    { name: 'In flight', order: (d) => d.in_flight, text: (d) => d.most > 0 ? `${count(d.in_flight)} of ${count(d.most)}` : count(d.in_flight) },
  ]);
  const listeners = sortableTable(byId('listener-table'), (l) => l.name, [
    { name: 'Listener', words: true, order: (l) => l.name, text: (l) => l.name, tip: (l) => l.addresses.join(', ') },
    { name: 'Addresses', words: true, wide: true, text: (l) => l.addresses.join(', ') },
    { name: 'Open', title: 'TCP connections', order: (l) => l.open, text: (l) => count(l.open) },
    { name: 'Flows', title: 'Of UDP', order: (l) => l.flows, text: (l) => count(l.flows), wide: true },
    { name: 'To', title: 'To the downstream, over 10 s', order: (l) => l.to_downstream_rate, text: (l) => bits(l.to_downstream_rate), tip: (l) => `${bytesRate(l.to_downstream_rate)}; ${size(l.to_downstream_bytes)} in all` },
    { name: 'From', title: 'From the downstream, over 10 s', order: (l) => l.from_downstream_rate, text: (l) => bits(l.from_downstream_rate), tip: (l) => `${bytesRate(l.from_downstream_rate)}; ${size(l.from_downstream_bytes)} in all` },
    { name: 'Accepted', title: 'TCP connections since the start', order: (l) => l.accepted, text: (l) => count(l.accepted), tip: endings, wide: true },
    { name: 'Failed dials', title: 'Of downstreams, since the start', order: (l) => l.dial_errors, text: (l) => count(l.dial_errors), wide: true },
  ]);
  const attachments = sortableTable(byId('attachment-table'), (a) => `${a.name} ${a.interface} ${a.direction}`, [
    { name: 'Attachment', words: true, text: (a) => a.name },
    { name: 'At', words: true, text: (a) => `${a.interface || 'no interface'}, ${a.direction}, ${a.mode}` },
    {
      name: 'State', words: true,
      draw(cell, a) {
        if (!cell.firstChild) cell.append(el('span', { class: 'badge' }));
        setText(cell.firstChild, a.waits ? `waits for ${a.waits}` : a.up ? 'up' : 'down');
        setAttr(cell.firstChild, 'data-tone', a.waits ? 'info' : a.up ? 'good' : 'bad');
        setAttr(cell, 'title', a.error ?? '');
      },
    },
    { name: 'Queue', text: (a) => a.queue ? `${count(a.queue.packets)} packets` : '–', tip: (a) => a.queue ? size(a.queue.bytes) : 'It holds no packets' },
    { name: 'Drops', title: 'Of the queue', wide: true, text: (a) => a.queue ? count(a.queue.drops) : '–' },
  ]);
  return (status) => {
    downs(status.listeners.flatMap((l) => l.downstreams));
    listeners(status.listeners);
    show(byId('listeners-none'), status.listeners.length === 0);
    attachments(status.attachments);
    show(byId('attachments'), status.attachments.length > 0);
  };
}

function endings(l) {
  const ended = Object.entries(l.ended ?? {}).filter(([, n]) => n > 0);
  return ended.length === 0 ? 'none has ended' : `ended: ${ended.map(([how, n]) => `${how} ${count(n)}`).join(', ')}`;
}

const mostEvents = 200;

// events returns a function of the new ones, oldest first. After a reconnect the stream
// begins with the last ones again; after a restart of the daemon their numbers do.
export function events() {
  const list = byId('event-list');
  let last = 0;
  let started = '';
  return (fresh, status) => {
    if (status.started !== started) {
      if (started) list.prepend(el('li', { class: 'restart' }, 'The daemon was started again.'));
      [started, last] = [status.started, 0];
    }
    for (const e of fresh) {
      if (e.id <= last) continue;
      if (last > 0 && e.id > last + 1) list.prepend(el('li', { class: 'restart' }, `Not shown: ${many(e.id - last - 1, 'line')} of the log.`));
      last = e.id;
      const attrs = Object.entries(e.attrs ?? {}).map(([k, v]) => el('div', {}, el('dt', {}, k), el('dd', {}, v)));
      list.prepend(el('li', { 'data-level': e.level },
        el('time', { datetime: e.time, title: e.time }, clock(e.time)),
        el('span', { class: 'level' }, e.level),
        el('span', { class: 'message' }, e.message),
        ...(attrs.length > 0 ? [el('dl', {}, ...attrs)] : [])));
    }
    while (list.children.length > mostEvents) list.lastElementChild.remove();
    show(list, list.children.length > 0);
    show(byId('events-none'), list.children.length === 0);
  };
}

export function daemon() {
  const process = facts(byId('process'));
  const buckets = sortableTable(byId('bucket-table'), (t) => t.plane, [
    { name: 'Buckets', words: true, text: (t) => `${t.plane} plane` },
    {
      name: 'In use',
      draw(cell, t) {
        if (!cell.firstChild) cell.append(el('span'), el('small'), el('meter', { min: 0, max: 1, low: 0.8, high: 0.9, optimum: 0, 'aria-hidden': 'true' }));
        setText(cell.children[0], `${count(t.entries)} of ${count(t.capacity)}`);
        setText(cell.children[1], percent(t.entries / t.capacity));
        cell.children[2].value = t.entries / t.capacity;
      },
    },
    { name: 'Made room', title: 'Buckets that had drained and were forgotten, which costs nobody anything', text: (t) => count(t.evicted_drained), wide: true },
    { name: 'Pushed out', title: 'Buckets that still owed; a key that comes back owes no less', text: (t) => count(t.evicted_indebted) },
  ]);
  return (status) => {
    const p = status.process;
    const files = p.descriptors / p.max_descriptors;
    process([
      { name: 'Processors', value: p.cpu.toFixed(2), note: `${span(p.cpu_seconds)} in all`, title: 'In use, over 10 s; and since the start' },
      { name: 'Memory', value: size(p.memory_bytes) },
      { name: 'Descriptors', value: count(p.descriptors), note: `of ${count(p.max_descriptors)}`, tone: files > 0.8 ? 'bad' : '' },
      { name: 'Pacing late, p99', value: seconds(p.late_p99), title: 'How late the pacing thread let units go, since the start', tone: p.late_p99 > 0.005 ? 'held' : '' },
      { name: 'Running', value: span((Date.parse(status.now) - Date.parse(status.started)) / 1000), note: `since ${clock(status.started)}`, title: `Process ${status.pid}` },
      { name: 'Loaded', value: clock(status.reload.loaded), note: `in ${seconds(status.reload.took)}` },
    ]);
    buckets(status.buckets);
    setText(byId('version'), status.version);
    setText(byId('about'), `Configuration ${status.config}. Times are those of this browser, ${zone()}.`);
  };
}

function zone() {
  const minutes = -new Date().getTimezoneOffset();
  const two = (n) => String(Math.floor(n)).padStart(2, '0');
  return `UTC${minutes < 0 ? '-' : '+'}${two(Math.abs(minutes) / 60)}:${two(Math.abs(minutes) % 60)}`;
}
