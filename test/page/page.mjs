// Checks the dashboard in Chromium. Reads its input from page_test.go on standard input, and
// writes one line of JSON per check. The argument is the directory of node_modules.

import { execFile } from 'node:child_process';
import { createRequire } from 'node:module';
import { join, resolve } from 'node:path';
import { readFileSync } from 'node:fs';
import { promisify } from 'node:util';

const { chromium } = createRequire(join(resolve(process.argv[2]), 'package.json'))('playwright-core');
const { urls, daemon, nasty, pictures } = JSON.parse(readFileSync(0, 'utf8'));

const wait = { timeout: 120000 };
const desktop = { viewport: { width: 1280, height: 900 }, colorScheme: 'light' };
const phone = { width: 375, height: 812 };

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium',
  args: ['--no-sandbox', '--disable-background-networking', '--disable-component-update', '--disable-sync', '--no-first-run'],
});

// check opens a scenario, runs inspect(page), and reports the errors, with those of the browser.
async function check(name, scenario, options, inspect, expected = []) {
  const context = await browser.newContext(options);
  const errors = [];
  try {
    await context.addInitScript(() => document.addEventListener('securitypolicyviolation',
      (e) => console.error(`policy violated: ${e.violatedDirective} ${e.blockedURI}`)));
    const page = await context.newPage();
    page.setDefaultTimeout(wait.timeout);
    page.on('console', (m) => {
      if (['error', 'warning'].includes(m.type()) && !expected.some((e) => m.text().includes(e))) errors.push(`console: ${m.text()}`);
    });
    page.on('pageerror', (e) => errors.push(`exception: ${e.stack}`));
    page.on('request', (r) => {
      const { protocol, origin } = new URL(r.url());
      if (protocol !== 'data:' && origin !== new URL(urls[scenario]).origin) errors.push(`request to another origin: ${r.url()}`);
    });
    await page.goto(urls[scenario]);
    await page.waitForFunction(() => document.getElementById('pulse').textContent.startsWith('live'), null, wait);
    await inspect(page, (ok, error) => ok || errors.push(error));
  } catch (e) {
    errors.push(String(e.stack ?? e));
  } finally {
    await context.close();
  }
  console.log(JSON.stringify({ name, error: errors.join('\n') }));
}

const text = (page, selector) => page.$eval(selector, (e) => e.textContent);
const column = (page, table, n) => page.$$eval(`${table} tbody tr > :nth-child(${n})`, (cells) => cells.map((c) => c.textContent));
const focused = (page) => page.evaluate(() => {
  const e = document.activeElement;
  return {
    what: `${e.tagName} ${e.id || e.textContent.slice(0, 40)}`, table: e.closest('table')?.id ?? '',
    outlined: getComputedStyle(e).outlineStyle !== 'none', tab: e.getAttribute('role') === 'tab',
  };
});

const headlines = {
  idle: ['good', 'Conformant. No traffic is throttled.'],
  overload: ['warn', 'Conformant. 3 limits throttle traffic.'],
  violated: ['bad', 'Conformance is violated.'],
  bypass: ['bad', 'Bypass is on. Limits only observe.'],
  observe: ['info', 'Observing only. No limit is enforced.'],
  trouble: ['warn', 'Conformant. 3 limits throttle traffic.'],
  unavailable: ['bad', 'No downstream is up at db.'],
  many: ['warn', 'Conformant. 48 limits throttle traffic.'],
  empty: ['info', 'No limits configured.'],
  shared: ['warn', 'Conformant. 3 limits throttle traffic.'],
  alone: ['bad', 'Not limited together.'],
};

// contrasts returns the contrast of texts with their background, by WCAG 2.2.
function contrasts(selectors) {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const over = (colors) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const c of colors) {
      canvas.fillStyle = c;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return selectors.flatMap((s) => [...document.querySelectorAll(s)].slice(0, 4).map((e) => {
    const behind = [];
    for (let p = e; p; p = p.parentElement) behind.unshift(getComputedStyle(p).backgroundColor);
    const [a, b] = [luminance(over([...behind, getComputedStyle(e).color])), luminance(over(behind))];
    return [s, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  }));
}

const textSelectors = ['#headline h1', '#headline dt', '#headline dd', '#headline small', '.notices strong', '.notices span', 'thead button', '.badge',
  '.card .conformance', '.card .soft', '.card .override', 'figcaption span', '.figures dt', '.tabs button', '.level', '.events time', '.lead', '.alarm', '#shared-table td', '#host-table td', '#host-table th'];

// checkColors checks that the background is light or dark, and the contrast of the text.
async function checkColors(page, name, scheme, must) {
  const [r, g, b] = (await page.evaluate(() => getComputedStyle(document.body).backgroundColor)).match(/\d+/g).map(Number);
  must(scheme === 'dark' ? r + g + b < 120 : r + g + b > 650, `${name}: the background is ${r}, ${g}, ${b}`);
  const found = await page.evaluate(contrasts, textSelectors);
  must(found.length > 20, `${name}: only ${found.length} texts found`);
  for (const [selector, contrast] of found) must(contrast >= 4.5, `${name}: ${selector} has a contrast of ${contrast.toFixed(2)}`);
  if (pictures) {
    await page.waitForTimeout(500);
    await page.screenshot({ path: join(pictures, `${name}.png`) });
  }
}

// These checks mostly wait, and so run in parallel with the others.
const live = check('live', 'overload', desktop, async (page, must) => {
  const plot = await page.getAttribute('.plot', 'aria-label');
  must(/now .* of 80 Mbit\/s$/.test(plot), `the label of the chart is "${plot}"`);
  const events = await page.$$eval('#event-list > li', (l) => l.length);
  must(events >= 12, `${events} events`);
  // Updates reuse all elements, except events.
  const count = () => page.evaluate(() => document.querySelectorAll('*').length - document.querySelectorAll('#event-list *').length);
  await page.$eval('#overview tbody tr', (tr) => { tr.dataset.same = 'yes'; });
  const elements = await count();
  for (const [selector, attribute] of [['#vitals'], ['#overview tbody tr'], ['.spark path', 'd'], ['.plot', 'aria-label'], ['#process']]) {
    await page.waitForFunction(([s, a]) => {
      const e = document.querySelector(s);
      const now = a ? e.getAttribute(a) : e.textContent;
      window.before ??= {};
      window.before[s] ??= now;
      return window.before[s] !== now;
    }, [selector, attribute], wait).catch(() => must(false, `${selector} does not change`));
  }
  await page.waitForFunction((n) => document.querySelectorAll('#event-list > li').length >= n + 2, events, wait);
  must(await page.$eval('#overview tbody tr', (tr) => tr.dataset.same) === 'yes', 'the rows were recreated');
  must(await count() === elements, `${elements} elements became ${await count()}`);
});

const connection = check('connection', 'disconnected', desktop, async (page, must) => {
  await fetch(`${urls.disconnected}/disconnect`, { method: 'POST' });
  await page.waitForSelector('#disconnected:not([hidden])', wait);
  must((await text(page, '#disconnected')).startsWith('No connection to the daemon since '), `the banner is "${await text(page, '#disconnected')}"`);
  must((await text(page, '#headline-text')).startsWith('Unknown'), 'the headline is not "Unknown"');
  must(await page.evaluate(() => getComputedStyle(document.querySelector('main')).filter !== 'none'), 'the data is not grayed out');
  must((await page.title()).startsWith('no connection'), 'the title does not show it');
  await fetch(`${urls.disconnected}/reconnect`, { method: 'POST' });
  await page.waitForSelector('#disconnected', { state: 'hidden', ...wait });
  must((await text(page, '#headline-text')) === headlines.overload[1], 'the headline is not restored');
  must(await page.evaluate(() => getComputedStyle(document.querySelector('main')).filter === 'none'), 'the data is still grayed out');
}, ['503']);

const slow = check('slow link', 'slow', desktop, async (page, must) => {
  must(await page.isHidden('#disconnected'), 'the banner of a lost connection is visible');
  await page.waitForFunction(() => document.querySelector('.spark path').getAttribute('d').includes('L'), null, wait)
    .catch(() => must(false, 'the charts stay empty'));
  must(await page.$$eval('.plot canvas', (l) => l.length) > 0, 'there are no charts');
});

const real = check('daemon', 'daemon', desktop, async (page, must) => {
  const shaperd = (...args) => promisify(execFile)(daemon.binary, [...args, '--control', daemon.control]);
  const matches = (selector, pattern) => page.waitForFunction(
    ([s, p]) => new RegExp(p).test(document.querySelector(s)?.textContent), [selector, pattern], wait)
    .catch(async () => { throw new Error(`${selector} is "${await text(page, selector)}", want /${pattern}/`); });

  await matches('#headline-text', 'Conformant. 1 limit throttles traffic.');
  await matches('#overview tbody tr', '^database.*throttling[\\d.]+ Mbit/sof 8 Mbit/s');
  await matches('.card .conformance', '^Conformant: largest excess .* allowed');
  await matches('#vitals', 'Most delayed[\\d.]+ m?s/s127.0.0.1');
  await matches('#talkers-table', '127.0.0.1');
  await matches('#downstream-table', 'db.*up');
  await matches('#event-list', 'info');
  must(await page.$$eval('.plot canvas', (l) => l.length) >= 3, 'there are no charts');

  await shaperd('set', 'limit', 'database', 'rate=16Mbit/s', '--for', '5m');
  await matches('#notices', 'Override.*database: rate = 16Mbit/s.*[34] min \\d+ s left');
  await matches('#overview tbody tr', 'of 16 Mbit/s');
  await shaperd('bypass', 'on');
  await matches('#headline-text', 'Bypass is on. Limits only observe.');
  must(await page.isVisible('#bypass'), 'the bypass banner is hidden');
  await shaperd('bypass', 'off');
  await matches('#headline-text', 'Conformant');
  if (pictures) await page.screenshot({ path: join(pictures, 'daemon.png') });
});

for (const [scenario, [tone, words]] of Object.entries(headlines)) {
  await check(`scenario/${scenario}`, scenario, desktop, async (page, must) => {
    // On a busy machine the page may be reconnecting after a timeout.
    await page.waitForFunction((w) => document.querySelector('#headline-text').textContent === w, words, wait).catch(() => {});
    must(await text(page, '#headline-text') === words, `the headline is "${await text(page, '#headline-text')}", want "${words}"`);
    must(await page.$eval('#headline', (e) => e.dataset.tone) === tone, `the tone is not ${tone}`);
    must(await page.isVisible('#bypass') === (scenario === 'bypass'), 'the visibility of the bypass banner is wrong');
    must(await page.isHidden('#disconnected'), 'the banner of a lost connection is visible');
    await checkColors(page, `${scenario}-light`, 'light', must);

    await page.emulateMedia({ colorScheme: 'dark' });
    await checkColors(page, `${scenario}-dark`, 'dark', must);

    await page.setViewportSize(phone);
    await checkColors(page, `${scenario}-phone`, 'dark', must);
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    must(width <= phone.width, `the page is ${width} px wide on a phone`);
  });
}

await check('charts', 'many', desktop, async (page, must) => {
  const plots = await page.$$eval('.plot', (l) => l.length);
  must(plots > 150, `${plots} charts for 64 limits`);
  for (const where of ['cards', 'talkers']) {
    await page.evaluate((id) => document.getElementById(id).scrollIntoView({ behavior: 'instant' }), where);
    await page.waitForFunction((id) => {
      const n = document.querySelectorAll('.plot canvas').length;
      return n > 0 && n < 40 && (id !== 'talkers' || !document.querySelector('.plot').hasChildNodes());
    }, where, wait);
  }
  const drawn = await page.$$eval('.plot canvas', (list) => list.some((c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v > 0)));
  must(drawn, 'the charts are empty');
  await page.fill('#filter', 'PLC-1');
  must((await column(page, '#overview', 1)).length === 7, 'the filter does not select rows');
  must(await page.$$eval('.card', (l) => l.length) === 7, 'the filter does not select cards');
  await page.fill('#filter', 'no such');
  must(await page.isVisible('#limits-none') && await page.isHidden('#overview'), 'no message for a filter without matches');
  await page.fill('#filter', '');
  must(await page.$$eval('.card', (l) => l.length) === 64, 'clearing the filter does not restore the cards');
});

await check('keyboard', 'overload', desktop, async (page, must) => {
  await page.keyboard.press('Tab');
  must((await focused(page)).what.startsWith('A Skip'), `the first tab stop is ${(await focused(page)).what}`);
  await page.keyboard.press('Enter');
  must((await focused(page)).what === 'MAIN main', `the skip link leads to ${(await focused(page)).what}`);

  const reached = { tables: new Set(), tabs: 0, log: false };
  for (let i = 0; i < 80 && !reached.log; i++) {
    await page.keyboard.press('Tab');
    const f = await focused(page);
    must(f.outlined, `${f.what} has no visible focus`);
    if (f.what.startsWith('BUTTON') && f.table) reached.tables.add(f.table);
    if (f.tab) reached.tabs++;
    reached.log = f.what === 'OL event-list';
  }
  for (const t of ['overview', 'talkers-table', 'downstream-table', 'listener-table']) must(reached.tables.has(t), `no heading of ${t} can be focused`);
  must(reached.tabs === 1, `${reached.tabs} tab stops in the tab list, want one`);
  must(reached.log, 'the events cannot be focused');

  await page.focus('#overview th:nth-child(1) button');
  for (const [key, sort, first] of [['Enter', 'ascending', 'database'], ['Space', 'descending', 'plc'], ['Enter', null, 'database']]) {
    await page.keyboard.press(key);
    must(await page.getAttribute('#overview th:nth-child(1)', 'aria-sort') === sort, `after ${key}, aria-sort is not ${sort}`);
    must((await column(page, '#overview', 1))[0] === first, `after ${key}, the limits are ${await column(page, '#overview', 1)}`);
  }
  await page.focus('#talkers-table th:nth-child(2) button');
  await page.keyboard.press('Enter');
  await page.keyboard.press('Enter');
  must((await column(page, '#talkers-table', 1))[0].startsWith('198.51.100.98'), 'the sources are not sorted by rate');

  await page.focus('#tab-source');
  for (const [key, tab, name] of [['ArrowRight', 'prefix', '2001:db8:'], ['ArrowRight', 'asn', 'AS645'], ['ArrowRight', 'source', '198.51'], ['End', 'asn', 'AS645']]) {
    await page.keyboard.press(key);
    must((await focused(page)).what === `BUTTON tab-${tab}`, `${key} leads to ${(await focused(page)).what}`);
    must(await page.getAttribute(`#tab-${tab}`, 'aria-selected') === 'true', `${key} does not select ${tab}`);
    must((await column(page, '#talkers-table', 1)).every((n) => n.startsWith(name)), `${key} shows ${await column(page, '#talkers-table', 1)}`);
    if (tab === 'prefix') must((await column(page, '#talkers-table', 1))[0].startsWith('2001:db8:1007:'), 'another tab does not keep the sort order');
  }

  await page.focus('#overview tbody a');
  await page.keyboard.press('Enter');
  must(await page.$eval('.card', (c) => c.matches(':target')), 'a limit of the table does not lead to its card');
  await page.reload();
  await page.waitForSelector('.card:target', wait).catch(() => must(false, 'a page opened at a card does not scroll to it'));
});

await check('hostile text', 'trouble', desktop, async (page, must) => {
  must(!(await page.title()).includes('pwned'), 'a script ran');
  must(await page.$$eval('main img, main script', (l) => l.length) === 0, 'text became markup');
  for (const s of ['#overview tbody', '#cards', '#talkers-table', '#event-list', '#notices']) {
    must((await text(page, s)).includes(nasty), `${s} does not show the text as it is`);
  }
  await page.click(`#overview tbody tr:last-child a`);
  must(await page.$eval('.card:last-child', (c) => c.matches(':target')), 'the link to its card is broken');
});

await check('shared', 'shared', desktop, async (page, must) => {
  must(await page.isVisible('#shared') && await page.isVisible('#shared-link'), 'the section of shared limits is hidden');
  must((await text(page, '#shared-vitals')).includes('Statejoinedfor 3 h'), `the state is "${await text(page, '#shared-vitals')}"`);
  must((await text(page, '#shared-vitals')).includes('2 of 4live, 1 gone'), `the hosts are "${await text(page, '#shared-vitals')}"`);
  const limits = await column(page, '#shared-table', 3);
  must(/^[\d.]+ % of 80 Mbit\/s = [\d.]+ Mbit\/s$/.test(limits[0]), `database: ${limits[0]}`);
  must(limits[1] === '37 of 100 slots', `connections: ${limits[1]}`);
  must(limits.includes('25 % of 10 Mbit/s = 2.5 Mbit/s') && limits.includes('25 % of 5/s = 1.25/s new connections'), `cold buckets: ${limits}`);
  const others = await column(page, '#shared-table', 4);
  must(others[0].startsWith('gw2 20 %, gw4 ') && others[1] === 'gw2 20', `others: ${others}`);
  must((await column(page, '#host-table', 2)).join() === 'counted,counted,absent,gone', `hosts: ${await column(page, '#host-table', 2)}`);
  must((await text(page, '#notices')).includes('Host awaygw3 has not called for 5m'), 'no notice names the host that is away');
  must(/of [\d.]+ Mbit\/s/.test((await column(page, '#overview', 3))[0]) && !(await column(page, '#overview', 3))[0].includes('of 80 Mbit/s'), `the ceiling is ${await column(page, '#overview', 3)}`);
  // The bars have a segment for each host, and follow it.
  const bars = () => page.$$eval('#shared-table .shares', (l) => l.map((s) => [...s.children].map((r) => Number(r.getAttribute('width')))));
  const [database, slots] = await bars();
  must(slots.join() === '37,20', `the bar of connections: ${slots}`);
  must(database.length === 3 && database[1] === 20 && Math.abs(database.reduce((a, b) => a + b) - 95) < 0.01, `the bar of database: ${database}`);
  await page.waitForFunction((was) => Number(document.querySelectorAll('#shared-table .shares')[0].children[0].getAttribute('width')) !== was, database[0], wait)
    .catch(() => must(false, 'the bar does not change'));
});

await check('quotas', 'observe', desktop, async (page, must) => {
  must(await page.isVisible('#quotas'), 'the section of quotas is hidden');
  must((await column(page, '#quota-table', 3)).slice(0, 3).join() === '100 %,50 %,33.3 %', `used parts: ${await column(page, '#quota-table', 3)}`);
  must((await column(page, '#quota-table', 7))[0] === '2 d 4 h', `ends: ${await column(page, '#quota-table', 7)}`);
  must((await column(page, '#quota-table', 2))[1] === nasty, `keys: ${await column(page, '#quota-table', 2)}`);
  must((await text(page, '#quotas-note')).includes('And 32 keys with smaller parts. 1 key used up.'), `the note is "${await text(page, '#quotas-note')}"`);
});

await check('errors of files', 'trouble', desktop, async (page, must) => {
  const all = await text(page, '#notices');
  for (const words of ['Rolled backRevision 5f0c61 of ', `Old sourcesThey are in use, because a file has an error./etc/shaperd/gold.txt:3: ${nasty}`,
    `could not be applied: no memory ${nasty}.`, `Not savedA restart loses the latest overrides: read-only file system ${nasty}.`, `Not availablemetrics: address in use ${nasty}`]) {
    must(all.includes(words), `no notice contains "${words}": "${all}"`);
  }
  must((await text(page, '#notices')).includes(`Quotas waitTheir file cannot be written: no space left on device ${nasty}`), `the notices are "${await text(page, '#notices')}"`);
});

await check('not shared', 'overload', desktop, async (page, must) => {
  must(await page.isHidden('#shared') && await page.isHidden('#shared-link'), 'the section of shared limits is visible');
  must(await page.isHidden('#quotas'), 'the section of quotas is visible');
});

await check('alone', 'alone', desktop, async (page, must) => {
  const why = await text(page, '#headline-detail');
  must(why.startsWith(`No ledger answers: connection refused ${nasty}. This host has been alone for 1m13s, and with alone = "open"`) && why.endsWith('may exceed it.'), `the reason is "${why}"`);
  must((await page.title()).startsWith('Not limited together'), 'the title does not show it');
  const all = await text(page, '#notices');
  must(all.includes(`Hosts disagreeabout limit ${nasty}`) && !all.includes('Not limited together'), `the notices are "${all}"`);
  must((await column(page, '#shared-table', 3)).includes('100 % of 80 Mbit/s = 80 Mbit/s'), `shares: ${await column(page, '#shared-table', 3)}`);
  must(await page.isHidden('#host-table') && (await text(page, '#hosts-unknown')).startsWith('The hosts are unknown: connection refused'), 'unknown hosts are shown');
  must(await page.$$eval('main img, main script', (l) => l.length) === 0, 'text became markup');
});

await check('unavailable', 'unavailable', desktop, async (page, must) => {
  const why = await text(page, '#headline-detail');
  must(why.startsWith(`10.0.0.5:5432 is failing (connection refused ${nasty}), `) && why.endsWith('10.0.0.7:5432 is drained.'), `the reason is "${why}"`);
  must((await page.title()).startsWith('NO DOWNSTREAM'), 'the title does not show it');
  must((await text(page, '#notices')).includes('Failing'), 'no notice names the downstream');
  must((await column(page, '#downstream-table', 3)).includes('failing'), 'the table does not show the failing downstream');
});

await check('trouble', 'trouble', desktop, async (page, must) => {
  const all = await text(page, '#notices');
  for (const words of ['Stopping', 'Reload failed', 'shaperd.toml:14:12:', '50-sms.toml:3:1:', 'Down', 'Not enforced', 'rate = 20Mbit/s', '192.0.2.0/24', 'min', 'until the next reload', 'until it is removed']) {
    must(all.includes(words), `no notice contains "${words}"`);
  }
  // Each override has its own notice, and the card shows all of them.
  must(/rate = 20Mbit\/s, since .* left.*max_connections = 100, since .*, until the next reload/.test(all), 'an override has no notice');
  const override = await text(page, '.card .override');
  must(/^Override: rate = 20Mbit\/s \(.* left\), max_connections = 100 \(until the next reload\)$/.test(override), `the override on the card is "${override}"`);
  must(all.includes('Downstream 10.0.0.7:5432 of listener db gets no new connections.'), 'no notice of the drained downstream');
  must((await column(page, '#overview', 3)).some((c) => c.endsWith('each 2/h')), `the ceilings are ${await column(page, '#overview', 3)}`);
  must(all.includes('12 sources blocked') && all.includes('1 source would be blocked'), 'no notice of the penalties');
  const cards = await text(page, '#cards');
  must(/Penalizes\s*12 sources \(40 times in total\)/.test(cards) && /Would penalize\s*1 source \(3 times in total\)/.test(cards), 'the cards do not show the penalties');
  await page.waitForFunction(() => document.getElementById('event-list').textContent.includes('3 events not shown.'), null, wait)
    .catch(() => must(false, 'no message about omitted events'));
});

await Promise.all([live, connection, slow, real]);
await browser.close();
