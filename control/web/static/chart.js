// Charts of the last five minutes, drawn by uPlot, and sparklines for tables.

import { el, setAttr, setText } from './text.js';

const uPlot = window.uPlot;

// span is the number of seconds that the charts show, and of samples that are retained.
export const span = 300;

// Only visible charts are drawn, and exist: 64 limits have about 250.
const charts = new Map(); // by host
const visibility = new IntersectionObserver((entries) => {
  for (const e of entries) charts.get(e.target)?.setVisible(e.isIntersecting);
}, { rootMargin: '150px' });
const widths = new ResizeObserver((entries) => {
  for (const e of entries) charts.get(e.target)?.resize();
});

// The colors are those of the style sheet, and change with it.
window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  for (const c of charts.values()) {
    if (!c.plot) continue;
    c.setVisible(false);
    c.setVisible(true);
  }
});

// integerSteps are 1, 2, 5, 10, ...: the tick distances of an axis of integers.
const integerSteps = Array.from({ length: 30 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Chart is a chart with a caption, and the current values or those at the pointer.
export class Chart {
  // spec has
  //   name     the caption
  //   series   [{key, color, name, scale}]: values of the data source, multiplied by scale
  //   format   formats a value of the axis
  //   integer  whether the axis has integers only
  //   minHeight  the minimum height of the axis, so that a chart of zeros is flat
  //   main     whether it is the large chart, with a time axis
  // data is {times, of(key)}; charts of the same group share their pointer.
  constructor(spec, data, group) {
    this.spec = spec;
    this.source = data;
    this.group = group;
    this.ceiling = 0;
    this.now = '';
    this.value = el('span', { class: 'value' });
    this.host = el('div', { class: 'plot', role: 'img' });
    this.root = el('figure', { class: spec.main ? 'chart main' : 'chart' },
      el('figcaption', {}, el('span', {}, spec.name), this.value), this.host);
    charts.set(this.host, this);
    visibility.observe(this.host);
    widths.observe(this.host);
  }

  // show sets the text of the current values, and redraws. A ceiling of 0 is none.
  show(now, ceiling = 0) {
    this.now = now;
    this.ceiling = ceiling;
    setAttr(this.host, 'aria-label', `${this.spec.name}, last five minutes; now ${now}`);
    if (this.plot) this.plot.setData(this.data());
    this.showValue();
  }

  data() {
    return [this.source.times, ...this.spec.series.map((s) => {
      const values = this.source.of(s.key);
      return s.scale ? values.map((v) => v === null ? null : v * s.scale) : values;
    })];
  }

  showValue() {
    const at = this.plot?.cursor.idx;
    if (at === undefined || at === null || !this.plot.data[0][at]) {
      setText(this.value, this.now);
      return;
    }
    const parts = this.spec.series.map((s, i) => {
      const v = this.plot.data[i + 1][at];
      return v === null ? '' : `${this.spec.format(v)} ${s.name ?? ''}`.trim();
    });
    setText(this.value, `${timeOfDay(this.plot.data[0][at], true)}  ${parts.filter(Boolean).join(', ')}`);
  }

  setVisible(visible) {
    if (visible && !this.plot) {
      this.plot = new uPlot(this.options(), this.data(), this.host);
    } else if (!visible && this.plot) {
      this.plot.destroy();
      this.plot = null;
    }
  }

  resize() {
    const width = this.host.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: this.host.clientHeight });
  }

  remove() {
    this.setVisible(false);
    visibility.unobserve(this.host);
    widths.unobserve(this.host);
    charts.delete(this.host);
  }

  options() {
    const { spec } = this;
    const soft = color('soft');
    const grid = { stroke: color('grid'), width: 1 };
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    return {
      width: this.host.clientWidth,
      height: this.host.clientHeight,
      padding: [6, 4, spec.main ? 0 : 4, 0],
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: false, y: false },
        points: { size: 6 },
        sync: { key: this.group, scales: ['x', null] },
      },
      scales: {
        x: { time: false, range: (u, min, max) => [(max ?? 0) - span, max ?? 0] },
        y: { range: (u, min, max) => [0, Math.max(this.ceiling * 1.18, (max ?? 0) * 1.08, spec.minHeight)] },
      },
      axes: [
        {
          show: spec.main, size: 22, font, stroke: soft, grid, ticks: { show: false }, gap: 3,
          incrs: [60], space: 40,
          values: (u, at) => at.map((t) => { // no space at the edges
            const x = u.valToPos(t, 'x');
            return x < 12 || x > u.over.clientWidth - 14 ? '' : timeOfDay(t);
          }),
        },
        {
          size: spec.main ? 78 : 58, font, stroke: soft, grid, ticks: { show: false }, gap: 4,
          space: spec.main ? 30 : 26, incrs: spec.integer ? integerSteps : undefined, values: (u, at) => at.map((v) => spec.format(v)),
        },
      ],
      series: [{}, ...spec.series.map((s) => ({
        stroke: color(s.color),
        fill: s.fill === false ? undefined : `${color(s.color)}22`,
        width: 1.5,
        points: { show: false },
      }))],
      hooks: {
        draw: [(u) => this.drawCeiling(u, font)],
        setCursor: [() => this.showValue()],
      },
    };
  }

  drawCeiling(u, font) {
    if (!this.ceiling) return;
    const { ctx } = u;
    const ratio = uPlot.pxRatio;
    const y = Math.round(u.valToPos(this.ceiling, 'y', true)) + 0.5;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = color('ceiling');
    ctx.lineWidth = 1.5 * ratio;
    ctx.setLineDash([6 * ratio, 4 * ratio]);
    ctx.beginPath();
    ctx.moveTo(u.bbox.left, y);
    ctx.lineTo(u.bbox.left + u.bbox.width, y);
    ctx.stroke();
    ctx.font = font.replace('11px', `${11 * ratio}px`);
    ctx.textAlign = 'left';
    ctx.textBaseline = 'bottom';
    if (this.spec.main) ctx.fillText(`ceiling ${this.spec.format(this.ceiling)}`, u.bbox.left + 5 * ratio, y - 3 * ratio);
    ctx.restore();
  }
}

function timeOfDay(t, exact = false) {
  return new Date(t * 1000).toTimeString().slice(0, exact ? 8 : 5);
}

// sparkline returns an SVG element for a table cell, and a function that updates it. A ceiling
// other than 0 is the top of the line.
export function sparkline() {
  const ns = 'http://www.w3.org/2000/svg';
  const svg = document.createElementNS(ns, 'svg');
  const path = svg.appendChild(document.createElementNS(ns, 'path'));
  for (const [k, v] of Object.entries({ class: 'spark', viewBox: '0 0 100 24', preserveAspectRatio: 'none', 'aria-hidden': 'true' })) {
    svg.setAttribute(k, v);
  }
  return [svg, (values, ceiling) => {
    // Each point is the mean of three seconds: about a pixel.
    const points = [];
    for (let i = values.length % 3; i < values.length; i += 3) {
      if (values[i] !== null) points.push((values[i] + values[i + 1] + values[i + 2]) / 3);
    }
    const top = Math.max(ceiling, ...points, 1e-9);
    const x = (i) => (100 - points.length + 1 + i).toFixed(0);
    setAttr(path, 'd', points.map((v, i) => `${i ? 'L' : 'M'}${x(i)} ${(23 - 22 * v / top).toFixed(1)}`).join('') || 'M0 23');
  }];
}
