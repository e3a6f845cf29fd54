// The page: asks the daemon for what was, listens to what is, and shows it.

import { span } from './chart.js';
import { limitCards, limitTable, refusing } from './limits.js';
import { bypassAlarm, daemon, downstreams, events, headline, notices, unknown, who } from './sections.js';
import { clock, setText, show, span as since } from './text.js';

const byId = (id) => document.getElementById(id);

// series are what is kept of each limit, named as in GET /v1/history.
const series = {
  rate: (l) => l.bytes_rate['1s'],
  packets: (l) => l.packets_rate['1s'],
  admitted: (l) => l.admitted_rate['1s'],
  p99: (l) => l.queue_delay.p99,
  in_flight: (l) => l.in_flight,
  waiting: (l) => l.waiting,
  refused: refusing,
};

// History is the samples of the last five minutes, by limit; null is where there is none.
class History {
  times = []; // seconds, the last one is the newest
  limits = new Map(); // by name: arrays as long as times, by series

  // ring returns what the charts of a limit are drawn from.
  ring(name) {
    const history = this;
    return {
      get times() { return history.times; },
      of: (k) => history.limits.get(name)?.[k] ?? history.none(),
    };
  }

  none() {
    return new Array(this.times.length).fill(null);
  }

  // load takes what GET /v1/history says.
  load({ times, limits }) {
    this.times = times.map((t) => Date.parse(t) / 1000).slice(-span);
    this.limits.clear();
    for (const [name, kept] of Object.entries(limits)) {
      this.limits.set(name, Object.fromEntries(Object.keys(series).map((k) => [k, kept[k]?.slice(-span) ?? this.none()])));
    }
  }

  // add takes what an event of GET /v1/live says.
  add({ status, limits }) {
    const now = Date.parse(status.now) / 1000;
    if (this.times.at(-1) - now > 10) { // the clock was set back
      this.times = [];
      this.limits.clear();
    } else if (now <= this.times.at(-1)) { // the history has it
      return;
    }
    for (const l of limits) {
      if (!this.limits.has(l.name)) this.limits.set(l.name, Object.fromEntries(Object.keys(series).map((k) => [k, this.none()])));
      const kept = this.limits.get(l.name);
      for (const [k, value] of Object.entries(series)) kept[k].push(value(l));
    }
    this.times.push(now);
    for (const [name, kept] of this.limits) {
      if (kept.rate.length < this.times.length) {
        this.limits.delete(name); // a reload took the limit away
      } else if (this.times.length > span) {
        for (const values of Object.values(kept)) values.shift();
      }
    }
    if (this.times.length > span) this.times.shift();
  }
}

const history = new History();
const ring = (name) => history.ring(name);
const filter = byId('filter');
const none = byId('limits-none');

const showHeadline = headline();
const showBypass = bypassAlarm();
const showNotices = notices();
const showTable = limitTable(byId('overview'), ring);
const showCards = limitCards(byId('cards'), ring);
const showWho = who();
const showDownstreams = downstreams();
const addEvents = events();
const showDaemon = daemon();

let live = null; // the last event
let landing = location.hash; // what it names may be there only when it is shown

function render() {
  showHeadline(live.status, live.limits, live.who.source); // and the title, which is seen of a page in the background
  if (!document.hidden) renderRest();
}

function renderRest() {
  if (!live) return;
  const { status, limits } = live;
  showBypass(status);
  showNotices(status);
  show(byId('filter-label'), limits.length > 8 || filter.value !== '');
  const wanted = filter.value.toLowerCase();
  const found = limits.filter((l) => l.name.toLowerCase().includes(wanted));
  show(none, found.length === 0);
  setText(none, limits.length === 0 ? 'There are no limits: nothing is held back.' : 'No limit has such a name.');
  showTable(found);
  showCards(found, status);
  showWho(live.who);
  showDownstreams(status);
  showDaemon(status);
  if (landing) location.replace(landing);
  landing = '';
}

filter.addEventListener('input', renderRest);
document.addEventListener('visibilitychange', renderRest);

// The connection. A stream that says nothing for a while is as good as ended, and the
// charts begin anew after each, so that they have no holes.

const silence = 4000; // ms
const retries = [500, 1000, 2000, 4000]; // ms

let stream = null;
let heard = 0; // when the last event came, by performance.now
let heardAt = null; // the same, as a Date
let attempt = 0;
let retry = null;

async function connect() {
  retry = null;
  try {
    const answer = await fetch('/v1/history', { signal: AbortSignal.timeout(silence) });
    if (!answer.ok) throw new Error(`GET /v1/history: ${answer.status}`);
    history.load(await answer.json());
  } catch (e) {
    console.info(e.message);
    if (e.name !== 'TimeoutError') {
      again();
      return;
    }
    history.load({ times: [], limits: {} }); // it is much for a slow line: charts begin now
  }
  heard = performance.now();
  stream = new EventSource('/v1/live');
  stream.addEventListener('live', (e) => take(JSON.parse(e.data)));
  stream.addEventListener('error', again);
}

// take shows an event. A page that is older than the daemon loads itself again, and one
// that cannot show what it is told does not go on as if it had.
function take(next) {
  if (live && live.status.version !== next.status.version) location.reload();
  live = next;
  heard = performance.now();
  heardAt = new Date();
  attempt = 0;
  try {
    history.add(live);
    addEvents(live.events, live.status);
    render();
  } catch (e) {
    stale(`This page cannot show what the daemon says: ${e.message}.`, ' Load it again, or ask "shaperd status".');
    throw e;
  }
  document.documentElement.classList.remove('stale');
  setText(byId('pulse'), `live · ${clock(live.status.now)}`);
  show(byId('lost'), false);
}

// again gives up what is left of the connection, and tries once more a little later.
function again() {
  stream?.close();
  stream = null;
  lost();
  if (retry !== null) return;
  retry = setTimeout(connect, retries[Math.min(attempt, retries.length - 1)]);
  attempt++;
}

setInterval(() => {
  if (stream && performance.now() - heard > silence) again();
  else if (!stream && heardAt) lost();
}, 1000);

function lost() {
  if (heardAt) {
    stale(`No connection to the daemon since ${clock(heardAt)}.`, ` What is shown is ${since((Date.now() - heardAt) / 1000)} old. Trying again.`);
  } else {
    stale('No connection to the daemon.', ' Trying again.');
  }
}

const [staleWhat, staleMore] = byId('lost').children;

// stale says, over everything, that what is shown is not what is.
function stale(what, more) {
  document.documentElement.classList.add('stale');
  setText(byId('pulse'), 'not connected');
  setText(staleWhat, what);
  setText(staleMore, more);
  show(byId('lost'), true);
  unknown();
}

connect();
