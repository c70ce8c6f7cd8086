// Draws the charts of a report from the JSON in #data, whose form is in report.cpp. When all are drawn, the document's
// element says how many charts and series there are: data-charts and data-series, the latter counting those of which at
// least one point lies in its chart.
'use strict';
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const root = document.documentElement;
  const colour = name => getComputedStyle(root).getPropertyValue(name).trim();
  const compact = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 });
  const axes = [
    { key: 'steps', label: () => 'step', of: (s, i) => s.s[i] },
    { key: 'tokens', label: () => 'tokens', of: (s, i) => s.k[i] },
    { key: 'time', label: unit => 'time in training steps, ' + unit.name, of: (s, i, unit) => s.t[i] / unit.seconds },
    { key: 'FLOPs', label: () => 'FLOPs of the model', of: (s, i) => s.k[i] * s.f },
  ];
  const units = [{ name: 'seconds', seconds: 1 }, { name: 'minutes', seconds: 60 }, { name: 'hours', seconds: 3600 }];
  const unitOf = chart => {
    const most = Math.max(...chart.series.map(s => s.t ? s.t[s.t.length - 1] : 0));
    return units[most < 300 ? 0 : most < 3 * 3600 ? 1 : 2];
  };
  let axis = axes[0], charts = [], drawn = new Set();

  const finite = x => x !== null && Number.isFinite(x);
  function points(chart, series) {
    const xOf = series.x ? i => series.x[i] : i => axis.of(series, i, unitOf(chart));
    const all = series.y.map((y, i) => ({ x: xOf(i), y })).filter(p => finite(p.x));
    const end = () => Math.max(...chart.series.map(s => axis.of(s, s.y.length - 1, unitOf(chart))));
    const half = chart.lastHalf ? end() / 2 : -Infinity;
    return all.filter(p => p.x >= half && !(chart.logX && p.x <= 0))
      .map(p => chart.logY && p.y <= 0 ? { x: p.x, y: null } : p);
  }

  function dataset(chart, series) {
    const c = colour('--series-' + series.colour % 8), isFaint = series.style === 'faint';
    const radius = series.style === 'dots' ? 5 : series.style === 'points' ? 3 : series.y.length < 3 ? 2 : 0;
    return {
      label: series.name, data: points(chart, series), parsing: false, spanGaps: false,
      showLine: series.style !== 'dots',
      borderColor: isFaint ? c + '55' : c, backgroundColor: c, borderWidth: isFaint ? 1 : 2,
      borderDash: series.colour < 8 ? [] : [2, 2],
      pointRadius: radius, pointHitRadius: 6, pointHoverRadius: 4, order: isFaint ? 1 : 0,
    };
  }

  const countDrawn = {
    id: 'countDrawn',
    afterDatasetDraw(chart, { index, meta }) {
      const a = chart.chartArea;
      const isIn = p => !p.skip && p.x >= a.left - 1 && p.x <= a.right + 1 && p.y >= a.top - 1 && p.y <= a.bottom + 1;
      if (meta.data.some(isIn)) drawn.add(chart.canvas.id + '/' + index);
    },
  };

  function scale(title, isLog) {
    const ticks = { color: colour('--quiet'), maxTicksLimit: 8,
                    callback: value => Math.abs(value) >= 1e4 ? compact.format(value) : +value.toPrecision(4) };
    return { type: isLog ? 'logarithmic' : 'linear', title: { display: true, text: title, color: colour('--quiet') },
             ticks, grid: { color: colour('--grid') } };
  }

  function draw(chart, i) {
    if (chart.drawn) chart.drawn.destroy();
    const ink = colour('--ink'), pointStyle = chart.x ? 'circle' : 'line';
    const xLabel = () => chart.x || axis.label(unitOf(chart));
    chart.drawn = new Chart(document.getElementById('chart-' + i), {
      type: chart.x ? 'scatter' : 'line',
      data: { datasets: chart.series.map(s => dataset(chart, s)) },
      plugins: [countDrawn],
      options: {
        animation: false, responsive: true, maintainAspectRatio: false, normalized: false,
        interaction: { mode: 'nearest', axis: chart.x ? 'xy' : 'x', intersect: false },
        scales: { x: scale(xLabel(), chart.logX), y: scale(chart.y, chart.logY) },
        plugins: {
          legend: { display: chart.series.length > 1,
                    labels: { color: ink, usePointStyle: true, pointStyle, boxHeight: 8 } },
          tooltip: { callbacks: {
            title: items => items.length ? xLabel() + ' ' + (+items[0].parsed.x.toPrecision(6)) : '',
            label: item => item.dataset.label + ': ' + (+item.parsed.y.toPrecision(6)) } },
        },
      },
    });
  }

  function drawAll() {
    drawn = new Set();
    charts.forEach(draw);
    root.dataset.charts = charts.length;
    root.dataset.series = drawn.size;
  }

  function button(text, isPressed, onClick) {
    const b = document.createElement('button');
    b.textContent = text;
    b.setAttribute('aria-pressed', isPressed);
    b.addEventListener('click', () => onClick(b));
    return b;
  }

  function addFigure(chart, i) {
    const figure = document.createElement('figure'), caption = document.createElement('figcaption');
    const title = document.createElement('span');
    const plot = document.createElement('div'), canvas = document.createElement('canvas');
    title.textContent = chart.title;
    caption.append(title);
    const switches = [['log x', 'logX'], ['log y', 'logY']];
    if (!chart.x) switches.unshift(['last half', 'lastHalf']);
    for (const [text, key] of switches)
      caption.append(button(text, chart[key] === true, b => {
        chart[key] = !chart[key];
        b.setAttribute('aria-pressed', chart[key]);
        draw(chart, i);
      }));
    canvas.id = 'chart-' + i;
    plot.className = 'plot';
    plot.append(canvas);
    figure.append(caption, plot);
    document.getElementById(chart.place).append(figure);
  }

  if (typeof Chart === 'undefined') {
    document.getElementById('axes').textContent =
      'The program that wrote this page was built without Chart.js (Debian and Ubuntu: ' +
      'libjs-chart.js), so that there are no charts; `./report`, built with it, writes them from the same folder.';
    return;
  }
  const choices = document.getElementById('axes');
  for (const a of axes)
    choices.append(button(a.key, a === axis, b => {
      axis = a;
      for (const other of choices.querySelectorAll('button')) other.setAttribute('aria-pressed', other === b);
      charts.forEach(draw);
    }));
  charts = data.charts;
  charts.forEach(addFigure);
  drawAll();
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
})();
