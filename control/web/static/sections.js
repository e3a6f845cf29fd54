// The sections besides the limits: headline, notices, talkers, downstreams, events and the
// daemon itself. Each exported function returns a function that updates its section.

import { anchor, isThrottling, isViolated, refusedRate, wouldBeThrottling } from './limits.js';
import { criticalOf } from './shared.js';
import { sortableTable } from './table.js';
import {
  bits, bytesRate, clock, count, duration, el, facts, formatOverrides, keyed, overrideEnd, percent, perSecond, plural, seconds, setAttr, setText,
  show, size, sum, timeLeft,
} from './text.js';

const byId = (id) => document.getElementById(id);

// stateOf returns the text and the tone of the headline, and the limits that it names.
function stateOf(status, limits) {
  const unavailable = status.listeners.filter((l) => l.unavailable);
  if (unavailable.length > 0) {
    const names = unavailable.slice(0, 3).map((l) => l.name).join(', ') + (unavailable.length > 3 ? ` and ${unavailable.length - 3} more` : '');
    return { tone: 'bad', short: 'NO DOWNSTREAM', text: `No downstream is up at ${names}.`, detail: unavailable[0].unavailable, limits: [] };
  }
  const violated = limits.filter(isViolated);
  const throttling = limits.filter(isThrottling);
  const would = limits.filter(wouldBeThrottling);
  const all = (n) => n === limits.length && n > 1 ? `All ${n} limits` : n === 1 ? '1 limit' : `${n} limits`;
  if (status.bypass) {
    return { tone: 'bad', short: 'BYPASS', text: 'Bypass is on. Limits only observe.', detail: would.length > 0 ? 'Would throttle' : '', limits: would };
  }
  if (status.conformance === 'violated' || violated.length > 0) {
    return { tone: 'bad', short: 'violated', text: 'Conformance is violated.', detail: 'More traffic than allowed left in the last minute', limits: violated };
  }
  const critical = criticalOf(status);
  if (critical) {
    return { tone: 'bad', short: critical.title, text: `${critical.title}.`, detail: sentence(critical.text), limits: [] };
  }
  if (limits.length === 0) {
    return { tone: 'info', short: 'no limits', text: 'No limits configured.', detail: '', limits: [] };
  }
  if (limits.every((l) => l.mode === 'observe')) {
    return { tone: 'info', short: 'observing', text: 'Observing only. No limit is enforced.', detail: would.length > 0 ? 'Would throttle' : '', limits: would };
  }
  if (throttling.length > 0) {
    return {
      tone: 'warn', short: `${throttling.length} throttling`,
      text: `Conformant. ${all(throttling.length)} ${throttling.length === 1 ? 'throttles' : 'throttle'} traffic.`,
      detail: 'Throttling', limits: throttling,
    };
  }
  return { tone: 'good', short: 'ok', text: 'Conformant. No traffic is throttled.', detail: '', limits: [] };
}

// sentence returns the text of a problem as a sentence without its full stop.
const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1).replace(/\.$/, '');

export function headline() {
  const detail = byId('headline-detail');
  const lead = detail.appendChild(el('span'));
  const names = keyed(detail.appendChild(el('span', { class: 'names' })), (l) => l.name,
    (l) => el('a', { href: anchor(l.name) }, l.name), () => {});
  const more = detail.appendChild(el('span'));
  const vitals = facts(byId('vitals'));
  return (status, limits, sources) => {
    const s = stateOf(status, limits);
    setAttr(byId('headline'), 'data-tone', s.tone);
    setText(byId('headline-text'), s.text);
    document.title = `${s.short} · shaperd`;
    show(detail, s.detail !== '');
    setText(lead, s.limits.length > 0 ? `${s.detail}: ` : `${s.detail}.`);
    names(s.limits.slice(0, 6));
    setText(more, s.limits.length > 6 ? ` and ${s.limits.length - 6} more` : '');
    vitals(vitalsOf(status, limits, sources));
  };
}

// setUnknown sets the headline for a lost connection.
export function setUnknown() {
  setAttr(byId('headline'), 'data-tone', 'idle');
  setText(byId('headline-text'), 'Unknown: the daemon does not respond.');
  show(byId('headline-detail'), false);
  document.title = 'no connection · shaperd';
}

function vitalsOf(status, limits, sources) {
  const to = sum(status.listeners.map((l) => l.to_downstream_rate));
  const from = sum(status.listeners.map((l) => l.from_downstream_rate));
  const enforced = limits.filter((l) => l.mode === 'enforce');
  const max = (value, list = enforced) => list.reduce((a, l) => value(l) > (a ? value(a) : 0) ? l : a, null);
  const mostDelay = max((l) => l.queue_delay.p99_seconds);
  const mostWaiting = max((l) => l.waiting);
  const mostRefused = max(refusedRate);
  const mostDelayed = max((t) => t.delayed.value, enforced.length > 0 ? sources.filter((t) => t.delayed.value >= minWeight) : []);
  const none = { value: 'none', note: '', tone: '' };
  const throttling = enforced.some((l) => l.throttling);
  const forwarded = status.listeners.length === 0 ? [] : [ // unknown for attachments
    { name: 'To downstreams', value: bits(to), note: bytesRate(to), title: 'All listeners, over 10 s' },
    { name: 'From downstreams', value: bits(from), note: bytesRate(from), title: 'All listeners, over 10 s' },
    { name: 'Connections', value: count(sum(status.listeners.map((l) => l.connections))), note: plural(sum(status.listeners.map((l) => l.flows)), 'UDP flow') },
  ];
  return [
    ...forwarded,
    {
      name: 'Most delayed', title: 'The source, and the seconds of delay of its traffic per second',
      ...mostDelayed ? { value: delayRate(mostDelayed.delayed.value), note: mostDelayed.name, tone: throttling ? 'warn' : '' } : none,
    },
    {
      name: 'Waiting for a slot', title: 'Connections of the limit with the most',
      ...mostWaiting ? { value: count(mostWaiting.waiting), note: mostWaiting.name, tone: 'warn' } : none,
    },
    {
      name: 'Longest queue, p99', title: '99th percentile of the delay of delayed units over the last minute',
      ...mostDelay ? { value: seconds(mostDelay.queue_delay.p99_seconds), note: mostDelay.name, tone: mostDelay.throttling ? 'warn' : '' } : none,
    },
    {
      name: 'Refused', title: 'Datagrams and connections, over 10 s; and the limit with the most',
      ...mostRefused ? { value: perSecond(sum(enforced.map(refusedRate))), note: mostRefused.name, tone: 'refused' } : none,
    },
  ];
}

// bypassAlarm is the banner while the kill switch is on.
export function bypassAlarm() {
  const alarm = byId('bypass');
  return (status) => {
    show(alarm, Boolean(status.bypass));
    document.documentElement.classList.toggle('bypassed', Boolean(status.bypass));
    if (status.bypass) {
      const { since: from, until } = status.bypass;
      setText(byId('bypass-since'), `Since ${clock(from)}, ${timeLeft(until, status.now, 'until it is turned off')}.`);
    }
  };
}

const maxBlocks = 10;

// notices are the conditions that an operator must know to read the rest.
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
    if (status.state === 'stopping') {
      const open = sum(status.listeners.map((l) => l.connections + l.flows));
      add('stopping', 'warn', 'Stopping', `New connections are refused, and the daemon exits when the open ones have ended. Connections and flows left: ${count(open)}.`);
    }
    if (!status.reload.ok) {
      add('reload', 'bad', 'Reload failed', `At ${clock(status.reload.at)}. The configuration loaded at ${clock(status.reload.loaded)} stays effective.`, status.reload.errors);
    }
    if (status.rolled_back) {
      add('rolled back', 'warn', 'Rolled back', `Revision ${status.rolled_back.revision} of ${clock(status.rolled_back.at)} is effective, which differs from the configuration files. "shaperd reload" or a restart applies the files.`);
    }
    if (status.source_errors) add('sources', 'bad', 'Old sources', 'They are in use, because a file has an error.', status.source_errors);
    if (status.schedule_error) add('schedule', 'bad', 'Old values', `They are in use, because those of a schedule could not be applied: ${status.schedule_error}.`);
    if (status.state_error) add('state', 'bad', 'Not saved', `A restart loses the latest overrides: ${status.state_error}.`);
    if (status.endpoint_errors) add('endpoints', 'warn', 'Not available', '', status.endpoint_errors);
    if (status.quota_error) add('quota', 'bad', 'Quotas wait', `Their file cannot be written: ${status.quota_error}. Traffic that was claimed already passes; other traffic waits.`);
    (status.shared?.problems ?? []).forEach((p, i) => {
      if (p !== criticalOf(status)) add(`shared ${p.title} ${i}`, p.severity === 'critical' ? 'bad' : 'warn', p.title, p.text);
    });
    if (status.mode === 'observe' && !status.bypass) {
      add('observe', 'info', 'Observe', 'The configuration only observes: limits count what they would do, and enforce nothing.');
    }
    for (const l of status.listeners.filter((l) => l.hold)) {
      add(`hold ${l.name} ${l.hold.state}`, l.hold.state === 'ramp' ? 'info' : 'warn', holdTitles[l.hold.state], holdText(l));
    }
    for (const d of status.listeners.flatMap((l) => l.downstreams)) {
      const key = `${d.state} ${d.listener} ${d.downstream}`;
      const which = `Downstream ${d.downstream} of listener ${d.listener}`;
      if (d.state === 'down') add(key, 'bad', 'Down', `${which}: health checks fail${d.error ? ` (${d.error})` : ''}.`);
      if (d.state === 'failing') add(key, 'bad', 'Failing', `${which}${d.error ? `: ${d.error}` : ''}.`);
      if (d.state === 'open') {
        const next = d.retry_in_seconds ? `the next connection may try in ${seconds(d.retry_in_seconds)}` : 'a connection may try it';
        add(key, 'bad', 'Breaker open', `${which}: ${d.error}; ${next}.`);
      }
      if (d.state === 'drained') add(key, 'warn', 'Drained', `${which} gets no new connections.`);
    }
    for (const a of status.attachments.filter((a) => !a.up)) {
      add(`attachment ${a.name} ${a.interface} ${a.direction}`, 'bad', 'Not enforced', `${a.name}, ${a.interface || 'no interface'}: ${(a.error || 'down').replace(/^not enforced: /, '')}`);
    }
    for (const o of status.overrides) {
      add(`override ${o.limit} ${o.since}`, 'warn', 'Override', `${o.limit}: ${formatOverrides(o.set)}, since ${clock(o.since)}, ${timeLeft(o.until, status.now, overrideEnd(o))}.`);
    }
    for (const b of status.blocks.slice(0, maxBlocks)) {
      add(`block ${b.prefix}`, 'warn', 'Block', `${b.prefix} is blocked since ${clock(b.since)}, ${timeLeft(b.until, status.now, 'until it is removed')}.`);
    }
    if (status.blocks_total > maxBlocks) {
      add('blocks', 'warn', 'Blocks', `${count(status.blocks_total - maxBlocks)} more: see "shaperd blocks"`);
    }
    if (status.penalized > 0) add('penalties', 'warn', 'Penalties', `${plural(status.penalized, 'source')} blocked: see "shaperd penalties".`);
    if (status.would_be_penalized > 0) add('would penalize', 'info', 'Penalties', `${plural(status.would_be_penalized, 'source')} would be blocked: see "shaperd penalties".`);
    show(list, found.length > 0);
    update(found);
  };
}

const holdTitles = { held: 'Held', down: 'Waiting for a server', ramp: 'Ramp' };

// holdText says why connections of a listener wait, and for how long.
function holdText({ name, waiting, hold }) {
  const why = {
    held: () => `New connections of ${name} have been held for ${seconds(hold.for_seconds ?? 0)}, ${hold.left_seconds ? `for another ${seconds(hold.left_seconds)}` : `until "shaperd resume ${name}"`}`,
    down: () => `New connections of ${name} have waited for ${seconds(hold.for_seconds ?? 0)}, until a downstream can be reached`,
    ramp: () => `New connections of ${name} are admitted at ${count(Math.round(hold.rate))}/s, and the rate grows`,
  }[hold.state]();
  const last = hold.last_served_seconds && waiting ? `, the last of them for another ${seconds(hold.last_served_seconds)}` : '';
  return `${why}; ${count(waiting)} waiting${last}.`;
}

// delayRate formats seconds of delay per second: several units wait at a time.
const delayRate = (s) => `${s < 60 ? seconds(s) : `${count(s)} s`}/s`;

// minWeight is the weight below which a value counts as none: weights decay, but never to 0.
const minWeight = 0.001;

// estimateColumn is a column of estimates. The error is shown if it is significant.
function estimateColumn(name, title, of, format, formatTitle = format) {
  return {
    name, title, order: (t) => of(t).value,
    draw(cell, t) {
      if (!cell.firstChild) cell.append(el('span'), el('small'));
      const { value, error } = of(t);
      const visible = value >= minWeight;
      setText(cell.firstChild, visible ? format(value) : '–');
      setText(cell.lastChild, visible && error > 0.05 * value ? `± ${format(error)}` : '');
      setAttr(cell, 'title', `${formatTitle(value)}, or less by at most ${formatTitle(error)}`);
    },
  };
}

export function talkers() {
  const tabs = [...byId('talkers-tabs').children];
  const panel = byId('talkers-panel');
  const update = sortableTable(byId('talkers-table'), (t) => t.name, [
    {
      name: 'Name', words: true, order: (t) => t.name,
      draw(cell, t) {
        if (!cell.firstChild) cell.append(el('span'), el('small'));
        setText(cell.firstChild, t.name);
        setText(cell.lastChild, t.as_name ?? '');
      },
    },
    estimateColumn('Rate', '', (t) => t.rate, bits, bytesRate),
    estimateColumn('Delayed', 'Seconds of delay of its traffic per second', (t) => t.delayed, delayRate),
    estimateColumn('Refused', 'Datagrams and connections per second', (t) => t.dropped, perSecond),
  ]);

  let by = 'source';
  let current = {};
  const render = (replaced) => {
    const list = current[by] ?? [];
    update(list, replaced);
    show(byId('talkers-none'), list.length === 0);
  };
  const select = (tab) => {
    for (const t of tabs) {
      t.setAttribute('aria-selected', String(t === tab));
      t.tabIndex = t === tab ? 0 : -1;
    }
    panel.setAttribute('aria-labelledby', tab.id);
    by = tab.dataset.by;
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
    current = live;
    render();
  };
}

// measured formats a quantile of delays that were measured.
const measured = (delay, value) => delay.count > 0 ? seconds(value) : '–';

const failures = (d) => d.dials_refused + d.dials_timed_out + d.dials_failed + d.resets + d.icmp_errors;

export function downstreams() {
  const downs = sortableTable(byId('downstream-table'), (d) => `${d.listener} ${d.downstream}`, [
    { name: 'Downstream', words: true, order: (d) => d.downstream, text: (d) => d.downstream },
    { name: 'Listener', words: true, order: (d) => d.listener, text: (d) => d.listener },
    {
      name: 'State', words: true, order: (d) => d.state,
      draw(cell, d) {
        if (!cell.firstChild) cell.append(el('span', { class: 'badge' }));
        setText(cell.firstChild, d.state);
        setAttr(cell.firstChild, 'data-tone', { up: 'good', down: 'bad', failing: 'bad', open: 'bad' }[d.state] ?? 'warn');
        setAttr(cell, 'title', d.error ?? '');
      },
    },
    { name: 'In flight', order: (d) => d.in_flight, text: (d) => d.max_connections > 0 ? `${count(d.in_flight)} of ${count(d.max_connections)}` : count(d.in_flight) },
    { name: 'Answers', title: 'Requests answered, over 10 s', order: (d) => d.turns_rate, text: (d) => perSecond(d.turns_rate), tip: (d) => `${count(d.turns)} in total` },
    {
      name: 'Answer p50', title: 'From the last byte of a request to the first byte of its answer, over the last minute. No wait for a limit is in it', order: (d) => d.answer.p50_seconds, text: (d) => measured(d.answer, d.answer.p50_seconds),
      tip: (d) => `connect ${measured(d.connect, d.connect.p50_seconds)}, first byte ${measured(d.first_byte, d.first_byte.p50_seconds)}, round trip ${measured(d.rtt, d.rtt.p50_seconds)} (medians)`,
    },
    { name: 'p99', title: 'Of the same', order: (d) => d.answer.p99_seconds, text: (d) => measured(d.answer, d.answer.p99_seconds) },
    {
      name: 'Failures', title: 'Failed dials, resets and ICMP errors, since the start', wide: true, order: failures, text: (d) => count(failures(d)),
      tip: (d) => `${count(d.dials_refused)} dials refused, ${count(d.dials_timed_out)} timed out, ${count(d.dials_failed)} failed; ${plural(d.resets, 'reset')}; ${plural(d.icmp_errors, 'ICMP error')}; ${plural(d.retransmits, 'segment')} sent again`,
    },
  ]);
  const listeners = sortableTable(byId('listener-table'), (l) => l.name, [
    { name: 'Listener', words: true, order: (l) => l.name, text: (l) => l.name, tip: (l) => l.addresses.join(', ') },
    { name: 'Addresses', words: true, wide: true, text: (l) => l.addresses.join(', ') },
    { name: 'Open', title: 'Open TCP connections', order: (l) => l.connections, text: (l) => count(l.connections) },
    { name: 'Flows', title: 'Open UDP flows', order: (l) => l.flows, text: (l) => count(l.flows), wide: true },
    { name: 'To', title: 'To the downstream, over 10 s', order: (l) => l.to_downstream_rate, text: (l) => bits(l.to_downstream_rate), tip: (l) => `${bytesRate(l.to_downstream_rate)}; ${size(l.to_downstream_bytes)} in total` },
    { name: 'From', title: 'From the downstream, over 10 s', order: (l) => l.from_downstream_rate, text: (l) => bits(l.from_downstream_rate), tip: (l) => `${bytesRate(l.from_downstream_rate)}; ${size(l.from_downstream_bytes)} in total` },
    { name: 'Accepted', title: 'TCP connections since the start', order: (l) => l.accepted, text: (l) => count(l.accepted), tip: endings, wide: true },
    { name: 'Failed dials', title: 'To downstreams, since the start', order: (l) => l.dial_errors, text: (l) => count(l.dial_errors), wide: true },
  ]);
  const attachments = sortableTable(byId('attachment-table'), (a) => `${a.name} ${a.interface} ${a.direction}`, [
    { name: 'Attachment', words: true, text: (a) => a.name },
    { name: 'At', words: true, text: (a) => `${a.interface || 'no interface'}, ${a.direction}, ${a.mode}` },
    {
      name: 'State', words: true,
      draw(cell, a) {
        if (!cell.firstChild) cell.append(el('span', { class: 'badge' }));
        setText(cell.firstChild, a.unmatched_patterns ? `waiting for ${a.unmatched_patterns}` : a.up ? 'up' : 'down');
        setAttr(cell.firstChild, 'data-tone', a.unmatched_patterns ? 'info' : a.up ? 'good' : 'bad');
        setAttr(cell, 'title', a.error ?? '');
      },
    },
    { name: 'Queue', text: (a) => a.queue ? `${count(a.queue.packets)} packets` : '–', tip: (a) => a.queue ? size(a.queue.bytes) : 'This attachment does not shape' },
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
  return ended.length === 0 ? 'none ended' : `ended: ${ended.map(([how, n]) => `${how} ${count(n)}`).join(', ')}`;
}

const maxEvents = 200;

// events returns a function of the new events, oldest first. After a reconnect the stream
// repeats the last ones; after a restart of the daemon the IDs start again.
export function events() {
  const list = byId('event-list');
  let last = 0;
  let started = '';
  return (fresh, status) => {
    if (status.started !== started) {
      if (started) list.prepend(el('li', { class: 'restart' }, 'The daemon was restarted.'));
      [started, last] = [status.started, 0];
    }
    for (const e of fresh) {
      if (e.id <= last) continue;
      if (last > 0 && e.id > last + 1) list.prepend(el('li', { class: 'restart' }, `${plural(e.id - last - 1, 'event')} not shown.`));
      last = e.id;
      const attrs = Object.entries(e.attrs ?? {}).map(([k, v]) => el('div', {}, el('dt', {}, k), el('dd', {}, v)));
      list.prepend(el('li', { 'data-level': e.level },
        el('time', { datetime: e.time, title: e.time }, clock(e.time)),
        el('span', { class: 'level' }, e.level),
        el('span', { class: 'message' }, e.message),
        ...(attrs.length > 0 ? [el('dl', {}, ...attrs)] : [])));
    }
    while (list.children.length > maxEvents) list.lastElementChild.remove();
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
    { name: 'Evicted drained', title: 'Evicted buckets that had drained, which loses nothing', text: (t) => count(t.evicted_drained), wide: true },
    { name: 'Evicted backlogged', title: 'Evicted buckets with a backlog, which the new bucket inherits', text: (t) => count(t.evicted_backlogged) },
  ]);
  return (status) => {
    const p = status.process;
    const files = p.descriptors / p.max_descriptors;
    process([
      { name: 'CPUs', value: p.cpu_cores.toFixed(2), note: `${duration(p.cpu_seconds)} in total`, title: 'In use, over 10 s; and since the start' },
      { name: 'Memory', value: size(p.memory_bytes) },
      { name: 'Descriptors', value: count(p.descriptors), note: `of ${count(p.max_descriptors)}`, tone: files > 0.8 ? 'bad' : '' },
      { name: 'Pacing latency, p99', value: seconds(p.wakeup_latency_p99_seconds), title: 'Wake-up latency of the pacing thread, since the start', tone: p.wakeup_latency_p99_seconds > 0.005 ? 'warn' : '' },
      { name: 'Uptime', value: duration((Date.parse(status.now) - Date.parse(status.started)) / 1000), note: `since ${clock(status.started)}`, title: `Process ${status.pid}` },
      { name: 'Loaded', value: clock(status.reload.loaded), note: `in ${seconds(status.reload.duration_seconds)}` },
    ]);
    buckets(status.buckets);
    setText(byId('version'), status.version);
    setText(byId('about'), `Configuration ${status.config}. Times are in the time zone of this browser, ${zone()}.`);
  };
}

function zone() {
  const minutes = -new Date().getTimezoneOffset();
  const two = (n) => String(Math.floor(n)).padStart(2, '0');
  return `UTC${minutes < 0 ? '-' : '+'}${two(Math.abs(minutes) / 60)}:${two(Math.abs(minutes) % 60)}`;
}
