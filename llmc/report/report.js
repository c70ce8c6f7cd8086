// Draws the charts of a report from the JSON in #data, whose form is in parts.h. When all are drawn, the document's
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
  // The points of a series, or those of its 'low' or 'high'.
  function points(chart, series, key = 'y') {
    const xOf = series.x ? i => series.x[i] : i => axis.of(series, i, unitOf(chart));
    const half = chart.lastHalf ? Math.max(...chart.series.flatMap(s => s.s)) / 2 : -Infinity;
    return series[key].map((y, i) => ({ x: xOf(i), y: chart.logY && y <= 0 ? null : y }))
      .filter((p, i) => finite(p.x) && !(series.s && series.s[i] < half) && !(chart.logX && p.x <= 0));
  }

  // The two ends of a band, the second filled down to the first; none for a series without one.
  function band(chart, series) {
    const fill = { borderWidth: 0, pointRadius: 0, pointHitRadius: 0, parsing: false, isBand: true, order: 2,
                   label: series.name, backgroundColor: colour('--series-' + series.colour % 8) + '28' };
    return !series.low ? [] : [{ ...fill, data: points(chart, series, 'low') },
                               { ...fill, data: points(chart, series, 'high'), fill: '-1' }];
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
      if (!meta._dataset.isBand && meta.data.some(isIn)) drawn.add(chart.canvas.id + '/' + index);
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
      data: { datasets: chart.series.flatMap(s => [...band(chart, s), dataset(chart, s)]) },
      plugins: [countDrawn],
      options: {
        animation: false, responsive: true, maintainAspectRatio: false, normalized: false,
        interaction: { mode: 'nearest', axis: chart.x ? 'xy' : 'x', intersect: false },
        scales: { x: scale(xLabel(), chart.logX), y: scale(chart.y, chart.logY) },
        plugins: {
          legend: { display: chart.series.length > 1,
                    labels: { color: ink, usePointStyle: true, pointStyle, boxHeight: 8,
                              filter: (item, data) => !data.datasets[item.datasetIndex].isBand },
                    onClick: (event, item, legend) => {  // a curve goes with its band
                      const all = legend.chart, shown = !all.isDatasetVisible(item.datasetIndex);
                      all.data.datasets.forEach((d, i) => d.label === item.text && all.setDatasetVisibility(i, shown));
                      all.update();
                    } },
          tooltip: { filter: item => !item.dataset.isBand, callbacks: {
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
