// The dashboard: loads the history from the daemon, then follows its live events.

import { span } from './chart.js';
import { limitCards, limitTable, refusedRate } from './limits.js';
import { bypassAlarm, daemon, downstreams, events, headline, notices, setUnknown, talkers } from './sections.js';
import { quotas } from './quotas.js';
import { sharedLimits } from './shared.js';
import { clock, duration, setText, show } from './text.js';

const byId = (id) => document.getElementById(id);

// series are the recorded values of each limit, named as in GET /v1/history.
const series = {
  rate: (l) => l.bytes_rate['1s'],
  packets: (l) => l.packets_rate['1s'],
  admitted: (l) => l.admitted_rate['1s'],
  p99_seconds: (l) => l.queue_delay.p99_seconds,
  in_flight: (l) => l.in_flight,
  waiting: (l) => l.waiting,
  refused: refusedRate,
};

// History is the samples of the last five minutes, by limit; null is a missing sample.
class History {
  times = []; // seconds, the newest last
  limits = new Map(); // by name, then by series: arrays as long as times

  // view returns the data source of the charts of a limit.
  view(name) {
    const history = this;
    return {
      get times() { return history.times; },
      of: (k) => history.limits.get(name)?.[k] ?? history.empty(),
    };
  }

  empty() {
    return new Array(this.times.length).fill(null);
  }

  // load replaces the samples by those of GET /v1/history.
  load({ times, limits }) {
    this.times = times.map((t) => Date.parse(t) / 1000).slice(-span);
    this.limits.clear();
    for (const [name, values] of Object.entries(limits)) {
      this.limits.set(name, Object.fromEntries(Object.keys(series).map((k) => [k, values[k]?.slice(-span) ?? this.empty()])));
    }
  }

  // add appends the sample of an event of GET /v1/live.
  add({ status, limits }) {
    const now = Date.parse(status.now) / 1000;
    if (this.times.at(-1) - now > 10) { // the clock was set back
      this.times = [];
      this.limits.clear();
    } else if (now <= this.times.at(-1)) { // already in the history
      return;
    }
    for (const l of limits) {
      if (!this.limits.has(l.name)) this.limits.set(l.name, Object.fromEntries(Object.keys(series).map((k) => [k, this.empty()])));
      const values = this.limits.get(l.name);
      for (const [k, value] of Object.entries(series)) values[k].push(value(l));
    }
    this.times.push(now);
    for (const [name, values] of this.limits) {
      if (values.rate.length < this.times.length) {
        this.limits.delete(name); // a reload removed the limit
      } else if (this.times.length > span) {
        for (const list of Object.values(values)) list.shift();
      }
    }
    if (this.times.length > span) this.times.shift();
  }
}

const history = new History();
const seriesOf = (name) => history.view(name);
const filter = byId('filter');
const noLimits = byId('limits-none');

const showHeadline = headline();
const showBypass = bypassAlarm();
const showNotices = notices();
const showTable = limitTable(byId('overview'), seriesOf);
const showCards = limitCards(byId('cards'), seriesOf);
const showShared = sharedLimits();
const showQuotas = quotas();
const showTalkers = talkers();
const showDownstreams = downstreams();
const addEvents = events();
const showDaemon = daemon();

let live = null; // the last event
let target = location.hash; // its element may not exist before the first render

function render() {
  showHeadline(live.status, live.limits, live.talkers.source); // with the title, which is visible in a background tab
  if (!document.hidden) renderRest();
}

function renderRest() {
  if (!live) return;
  const { status, limits } = live;
  showBypass(status);
  showNotices(status);
  show(byId('filter-label'), limits.length > 8 || filter.value !== '');
  const pattern = filter.value.toLowerCase();
  const found = limits.filter((l) => l.name.toLowerCase().includes(pattern));
  show(noLimits, found.length === 0);
  setText(noLimits, limits.length === 0 ? 'No limits configured.' : 'No limit matches.');
  showTable(found);
  showCards(found, status);
  showShared(status);
  showQuotas(live.quotas);
  showTalkers(live.talkers);
  showDownstreams(status);
  showDaemon(status);
  if (target) location.replace(target);
  target = '';
}

filter.addEventListener('input', renderRest);
document.addEventListener('visibilitychange', renderRest);

// The connection. A stream that is silent for a while counts as ended. The history is loaded
// again with each connection, so that the charts have no gaps.

const streamTimeout = 4000; // ms
const retryDelays = [500, 1000, 2000, 4000]; // ms

let stream = null;
let lastEvent = 0; // time of the last event, by performance.now
let lastEventAt = null; // the same as a Date
let attempt = 0;
let retry = null;

async function connect() {
  retry = null;
  try {
    const answer = await fetch('/v1/history', { signal: AbortSignal.timeout(streamTimeout) });
    if (!answer.ok) throw new Error(`GET /v1/history: ${answer.status}`);
    history.load(await answer.json());
  } catch (e) {
    console.info(e.message);
    if (e.name !== 'TimeoutError') {
      reconnect();
      return;
    }
    history.load({ times: [], limits: {} }); // too large for a slow link: the charts start empty
  }
  lastEvent = performance.now();
  stream = new EventSource('/v1/live');
  stream.addEventListener('live', (e) => onLive(JSON.parse(e.data)));
  stream.addEventListener('error', reconnect);
}

// onLive renders an event. It reloads the page if the version of the daemon changed, and marks
// the page as stale if rendering fails.
function onLive(next) {
  if (live && live.status.version !== next.status.version) location.reload();
  live = next;
  lastEvent = performance.now();
  lastEventAt = new Date();
  attempt = 0;
  try {
    history.add(live);
    addEvents(live.events, live.status);
    render();
  } catch (e) {
    setStale(`Cannot render the data of the daemon: ${e.message}.`, ' Reload the page, or run "shaperd status".');
    throw e;
  }
  document.documentElement.classList.remove('stale');
  setText(byId('pulse'), `live · ${clock(live.status.now)}`);
  show(byId('disconnected'), false);
}

// reconnect closes the stream and connects again after a delay.
function reconnect() {
  stream?.close();
  stream = null;
  showDisconnected();
  if (retry !== null) return;
  retry = setTimeout(connect, retryDelays[Math.min(attempt, retryDelays.length - 1)]);
  attempt++;
}

setInterval(() => {
  if (stream && performance.now() - lastEvent > streamTimeout) reconnect();
  else if (!stream && lastEventAt) showDisconnected();
}, 1000);

function showDisconnected() {
  if (lastEventAt) {
    setStale(`No connection to the daemon since ${clock(lastEventAt)}.`, ` The data is ${duration((Date.now() - lastEventAt) / 1000)} old. Reconnecting.`);
  } else {
    setStale('No connection to the daemon.', ' Reconnecting.');
  }
}

const [staleText, staleDetail] = byId('disconnected').children;

// setStale shows the banner that the data is out of date.
function setStale(text, detail) {
  document.documentElement.classList.add('stale');
  setText(byId('pulse'), 'not connected');
  setText(staleText, text);
  setText(staleDetail, detail);
  show(byId('disconnected'), true);
  setUnknown();
}

connect();
