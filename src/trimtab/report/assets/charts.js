/* Draws each figure of a page with uPlot, and lets pointer and keyboard read it. The figures hold their data as JSON;
   every text goes in as text, nothing is fetched. */
(() => {
  "use strict";

  const DASHES = [[], [8, 4], [2, 3], [12, 3, 2, 3], [16, 5], [5, 2, 2, 2, 2, 2]];
  /* Distances of ticks between which nothing is: 1, 2, 5, 10, … */
  const WHOLE = Array.from({ length: 14 }, (_, power) => [1, 2, 5].map((first) => first * 10 ** power)).flat();
  /* No wider on paper, in pixels of CSS: what A4 and Letter have room for between the margins and the box. */
  const PAPER = 620;
  const KEYS = "Left and right go from point to point, plus and minus zoom, 0 shows all.";
  const root = document.documentElement;
  const charts = [];

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const paint = (n) => colour(`--series-${n % 8}`);

  function element(kind, name, parent, words) {
    const made = document.createElement(kind);
    if (name) made.className = name;
    if (words !== undefined) made.textContent = words;
    if (parent) parent.append(made);
    return made;
  }

  /* A number in about five digits. */
  function digits(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-4 || size >= 1e9)) return value.toExponential(3);
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1e5 ? 9 : 5, useGrouping: size >= 1e4 });
  }

  /* The numbers beside an axis, with as many places as their distance needs. */
  function ticks(plot, splits, _axis, _space, step) {
    const most = Math.max(...splits.map(Math.abs));
    const shown = splits.map((value) => {
      if (value === 0) return "0";
      if (most >= 1e7 || most < 1e-3) return String(Number(value.toPrecision(6)).toExponential()).replace("e+", "e");
      let places = 0;
      while (places < 9 && Math.abs(Number(step.toFixed(places)) - step) > step * 1e-6) places++;
      return value.toLocaleString("en", { maximumFractionDigits: places });
    });
    return shown;
  }

  /* A square of the n-th area's colour and hatching: areas are told apart without their colour as well. */
  function hatched(n, ratio) {
    const side = 8 * ratio;
    const tile = element("canvas");
    tile.width = tile.height = side;
    const pen = tile.getContext("2d");
    pen.fillStyle = paint(n);
    pen.fillRect(0, 0, side, side);
    pen.strokeStyle = colour("--hatch");
    pen.lineWidth = 1.2 * ratio;
    const line = (...ends) => {
      pen.beginPath();
      pen.moveTo(ends[0] * side, ends[1] * side);
      pen.lineTo(ends[2] * side, ends[3] * side);
      pen.stroke();
    };
    const ways = [
      [],
      [[-0.5, 0.5, 0.5, -0.5], [0, 1, 1, 0], [0.5, 1.5, 1.5, 0.5]],
      [[0, 0.5, 1, 0.5]],
      [[-0.5, 0.5, 0.5, 1.5], [0, 0, 1, 1], [0.5, -0.5, 1.5, 0.5]],
      [[0.5, 0, 0.5, 1]],
      [[0, 0.5, 1, 0.5], [0.5, 0, 0.5, 1]],
      [[0.4, 0.5, 0.6, 0.5]],
      [[0, 0, 1, 1], [0, 1, 1, 0]],
    ];
    for (const ends of ways[n % ways.length]) line(...ends);
    return tile;
  }

  class Chart {
    constructor(figure) {
      this.told = JSON.parse(figure.querySelector("script").textContent);
      this.figure = figure;
      this.hidden = new Set();
      this.forced = null;
      this.build();
      new ResizeObserver(() => this.fit()).observe(this.place);
    }

    build() {
      const { told, figure } = this;
      const bar = element("div", "bar");
      this.legend = element("div", "legend", bar);
      const alone = told.series.length === 1;
      if (!alone) told.series.forEach((one, n) => this.key(one, n));
      this.unit = element("div", "unit", alone ? this.legend : null, told.y);
      const tools = element("div", "tools", bar);
      const tool = (sign, label, deed) => {
        const button = element("button", "", tools, sign);
        button.type = "button";
        button.title = label;
        button.setAttribute("aria-label", `${label}: ${told.title}`);
        button.addEventListener("click", deed);
        return button;
      };
      tool("+", "Zoom in", () => this.zoom(0.5));
      tool("−", "Zoom out", () => this.zoom(2));
      this.all = tool("Show all", "Show all", () => this.reset());
      this.place = element("div", "plot");
      this.place.tabIndex = 0;
      this.place.setAttribute("role", "application");
      this.place.setAttribute("aria-roledescription", "chart");
      this.place.setAttribute("aria-label", `${told.title}. ${KEYS}`);
      this.place.addEventListener("keydown", (event) => this.pressed(event));
      this.place.addEventListener("blur", () => this.leave());
      const below = element("div", "unit below", null, told.x);
      this.said = element("p", "spoken");
      this.said.setAttribute("aria-live", "polite");
      figure.querySelector("noscript").replaceWith(bar, ...(alone ? [] : [this.unit]), this.place, below, this.said);
    }

    key(one, n) {
      const button = element("button", "", this.legend);
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const sample = element("canvas", "", button);
      sample.setAttribute("aria-hidden", "true");
      element("span", "", button, one.name);
      button.addEventListener("click", () => this.toggle(n, button));
    }

    toggle(n, button) {
      const gone = this.hidden.has(n);
      if (gone) this.hidden.delete(n);
      else this.hidden.add(n);
      button.setAttribute("aria-pressed", String(gone));
      if (this.plot === undefined) return;
      this.plot.batch(() => {
        const { min, max } = this.plot.scales.x;
        this.columns.forEach((column, place) => {
          if (column.of === n) this.plot.setSeries(place + 1, { show: gone });
        });
        if (this.told.kind === "stack") {
          this.plot.setData(this.data(), false);
          this.plot.setScale("x", { min, max });
        }
      });
    }

    /* The samples beside the names, in the colours of the moment. */
    samples() {
      const ratio = devicePixelRatio;
      this.legend.querySelectorAll("canvas").forEach((sample, n) => {
        sample.width = 26 * ratio;
        sample.height = 12 * ratio;
        const pen = sample.getContext("2d");
        if (this.area(n)) {
          pen.fillStyle = pen.createPattern(hatched(this.shade(n), ratio), "repeat");
          pen.fillRect(0, 0, sample.width, sample.height);
          return;
        }
        pen.strokeStyle = pen.fillStyle = this.paint(n);
        pen.lineWidth = 2.5 * ratio;
        if (this.told.kind === "dots") {
          this.shape(pen, n, 13 * ratio, 6 * ratio, 4.5 * ratio);
          return;
        }
        pen.setLineDash(this.dash(n).map((part) => part * ratio));
        pen.beginPath();
        pen.moveTo(0, 6 * ratio);
        pen.lineTo(sample.width, 6 * ratio);
        pen.stroke();
      });
    }

    shade(n) {
      return this.told.series[n].shade ?? n;
    }

    paint(n) {
      return this.told.kind === "stack" && this.told.series[n].level ? colour("--peak") : paint(this.shade(n));
    }

    dash(n) {
      return this.told.kind === "stack" ? DASHES[1] : DASHES[n % DASHES.length];
    }

    area(n) {
      return this.told.kind === "stack" && !this.told.series[n].level;
    }

    /* The n-th kind of point: filled circle, square, triangle, open circle. */
    shape(pen, n, x, y, size) {
      pen.beginPath();
      if (n % 4 === 1) pen.rect(x - size * 0.85, y - size * 0.85, 1.7 * size, 1.7 * size);
      else if (n % 4 === 2) {
        pen.moveTo(x, y - size);
        pen.lineTo(x + size, y + size * 0.8);
        pen.lineTo(x - size, y + size * 0.8);
        pen.closePath();
      } else pen.arc(x, y, size * 0.9, 0, 2 * Math.PI);
      if (n % 4 === 3) pen.stroke();
      else pen.fill();
    }

    /* What uPlot draws: a column for each line, and for a band its two edges. Areas stand on one another. */
    data() {
      const { told } = this;
      this.columns = [];
      const found = [told.at];
      if (told.kind === "stack") {
        let below = told.at.map(() => 0);
        told.series.forEach((one, n) => {
          if (this.area(n) && !this.hidden.has(n)) below = below.map((sum, place) => sum + (one.values[place] ?? 0));
          this.columns.push({ of: n });
          found.push(this.area(n) ? below : one.values);
        });
        return found;
      }
      told.series.forEach((one, n) => {
        this.columns.push({ of: n });
        found.push(one.values);
      });
      told.series.forEach((one, n) => {
        for (const edge of one.low ? [one.low, one.high] : []) {
          this.columns.push({ of: n, edge: true });
          found.push(edge);
        }
      });
      return found;
    }

    options(width) {
      const { told } = this;
      const data = this.data();
      const few = told.at.length <= 60;
      const bands = [];
      const series = this.columns.map(({ of, edge }, place) => {
        if (this.area(of)) {
          const fill = (plot) => plot.ctx.createPattern(hatched(this.shade(of), devicePixelRatio), "repeat");
          if (place) bands.push({ series: [place + 1, place], fill });
          return {
            stroke: () => colour("--back"),
            width: 0.5,
            fill: place ? undefined : fill,
            paths: uPlot.paths.stepped({ align: 1 }),
            points: { show: false },
          };
        }
        if (edge) return { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        const stroke = () => this.paint(of);
        if (told.kind === "dots") return { stroke, paths: () => null, points: { show: false } };
        return {
          stroke,
          width: 2,
          dash: this.dash(of),
          spanGaps: true,
          points: { show: few && !told.series[of].level, size: 5, fill: stroke, stroke },
        };
      });
      for (let place = 0; place < this.columns.length; place++) {
        if (!this.columns[place].edge) continue;
        const { of } = this.columns[place];
        bands.push({ series: [place + 2, place + 1], fill: () => `${this.paint(of)}30` });
        place++;
      }
      const ink = () => colour("--ink");
      const axis = {
        stroke: ink,
        font: "12px system-ui, sans-serif",
        grid: { stroke: () => colour("--grid"), width: 1 },
        ticks: { stroke: () => colour("--grid"), width: 1, size: 5 },
        values: ticks,
        gap: 4,
      };
      const wide = (plot, values) => 14 + 7 * Math.max(3, ...(values ?? []).map((value) => value.length));
      const incrs = told.at.every(Number.isInteger) && told.kind !== "dots" ? WHOLE : undefined;
      return {
        width,
        height: this.height(width),
        padding: [told.marks.length ? 20 : 8, 14, 0, 0],
        series: [{}, ...series],
        bands,
        scales: { x: { time: false, range: (plot, low, high) => this.across(low, high) }, y: this.upward() },
        axes: [{ ...axis, size: 28, space: 60, incrs }, { ...axis, size: wide, space: 36 }],
        legend: { show: false },
        cursor: {
          y: false,
          dataIdx: (plot, column, near) => this.forced ?? near,
          drag: { x: true, y: false, dist: 5 },
          points: { show: told.kind === "dots" ? false : undefined, size: 8 },
        },
        hooks: {
          setCursor: [() => this.pointed()],
          setScale: [(plot, name) => name === "x" && this.zoomed()],
          draw: [(plot) => this.over(plot)],
        },
        data,
      };
    }

    height(width) {
      return (this.told.kind === "stack" ? 330 : 250) - (width < 420 ? 40 : 0);
    }

    /* Places across: a single one has room around it, and dots do not stand on the edge. */
    across(low, high) {
      const { at, kind } = this.told;
      if (low === null) return [0, 1];
      if (low === high) return [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
      if (kind !== "dots" || low !== at[0] || high !== at[at.length - 1]) return [low, high];
      const near = this.told.marks.map((mark) => mark.at).filter((place) => place < 1.6 * high);
      const end = Math.max(high, ...near);
      return [Math.min(low, Math.max(0, low - (end - low) * 0.05)), end + (end - low) * 0.08];
    }

    upward() {
      const { kind } = this.told;
      if (kind === "lines") {
        return { range: (plot, low, high) => (low === null ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true)) };
      }
      return { range: (plot, low, high) => [0, (high || 1) * (this.told.marks.length ? 1.06 : 1.12)] };
    }

    fit(most = Infinity) {
      const width = Math.min(most, Math.floor(this.place.clientWidth));
      if (!width) return;
      if (this.plot === undefined) {
        const { data, ...options } = this.options(width);
        this.plot = new uPlot(options, data, this.place);
        this.tip = element("div", "tip", this.place);
        this.tip.hidden = true;
        this.plot.over.addEventListener("mousemove", () => (this.forced = null));
        this.samples();
        this.zoomed();
      } else if (width !== this.plot.width) {
        this.plot.setSize({ width, height: this.height(width) });
      }
    }

    redraw() {
      if (this.plot === undefined) return;
      this.samples();
      this.plot.redraw(false, true);
    }

    /* What stands over the drawing: marks across, the names of areas, dots, the peak. */
    over(plot) {
      const { told } = this;
      const pen = plot.ctx;
      const ratio = uPlot.pxRatio;
      const { left, top, width, height } = plot.bbox;
      pen.save();
      pen.font = `${12 * ratio}px system-ui, sans-serif`;
      pen.textBaseline = "middle";
      let taken = left - 4 * ratio;
      for (const { at, name } of told.marks) {
        const x = plot.valToPos(at, "x", true);
        if (x < left - 1 || x > left + width + 1) continue;
        pen.strokeStyle = colour("--ink");
        pen.lineWidth = ratio;
        pen.setLineDash([3 * ratio, 3 * ratio]);
        pen.beginPath();
        pen.moveTo(x, top - 4 * ratio);
        pen.lineTo(x, top + height);
        pen.stroke();
        pen.setLineDash([]);
        const size = pen.measureText(name).width;
        const start = Math.min(x, left + width - size);
        if (start > taken) {
          pen.fillStyle = colour("--ink");
          pen.textAlign = "left";
          pen.fillText(name, start, top - 11 * ratio);
          taken = start + size + 8 * ratio;
        }
      }
      if (told.kind === "stack") this.nameAreas(plot, pen, ratio);
      if (told.kind === "dots") this.dots(plot, pen, ratio);
      if (told.peak) this.peak(plot, pen, ratio);
      pen.restore();
    }

    label(pen, ratio, words, x, y, side) {
      const size = pen.measureText(words).width;
      const start = side === "left" ? x - size : side === "right" ? x : x - size / 2;
      pen.fillStyle = colour("--back");
      pen.globalAlpha = 0.88;
      pen.fillRect(start - 4 * ratio, y - 9 * ratio, size + 8 * ratio, 18 * ratio);
      pen.globalAlpha = 1;
      pen.fillStyle = colour("--ink");
      pen.textAlign = "left";
      pen.fillText(words, start, y + ratio);
    }

    /* A name inside each area that has room for it, where it is thickest. */
    nameAreas(plot, pen, ratio) {
      const { told } = this;
      const { left, width } = plot.bbox;
      const columns = plot.data;
      const edges = (place, x) => {
        const index = Math.max(0, this.before(plot.posToVal(x - left, "x", true)));
        const height = (column) => plot.valToPos(column === 0 ? 0 : columns[column][index], "y", true);
        return [height(place + 1), height(place)];
      };
      told.series.forEach((one, place) => {
        if (this.hidden.has(place) || one.level) return;
        const half = pen.measureText(one.name).width / 2 + 6 * ratio;
        let best = null;
        for (let n = 0; n <= 40; n++) {
          const x = left + half + ((width - 2 * half) * n) / 40;
          const there = [x - half, x, x + half].map((at) => edges(place, at));
          const upper = Math.max(...there.map(([high]) => high));
          const lower = Math.min(...there.map(([, low]) => low));
          const found = { room: lower - upper, x, y: (upper + lower) / 2, aside: Math.abs(n - 20) };
          const thicker = best === null ? 1 : Math.round((found.room - best.room) / ratio);
          if (thicker > 0 || (thicker === 0 && found.aside < best.aside)) best = found;
        }
        if (best.room > 22 * ratio) this.label(pen, ratio, one.name, best.x, best.y, "middle");
      });
    }

    before(value) {
      const { at } = this.told;
      let found = -1;
      for (let low = 0, high = at.length - 1; low <= high; ) {
        const middle = (low + high) >> 1;
        if (at[middle] <= value) [found, low] = [middle, middle + 1];
        else high = middle - 1;
      }
      return found;
    }

    dots(plot, pen, ratio) {
      const { told } = this;
      told.series.forEach((one, n) => {
        if (this.hidden.has(n)) return;
        pen.fillStyle = pen.strokeStyle = this.paint(n);
        pen.lineWidth = 2 * ratio;
        one.values.forEach((value, index) => {
          if (value === null) return;
          const [x, y] = [plot.valToPos(told.at[index], "x", true), plot.valToPos(value, "y", true)];
          const chosen = this.index === index;
          this.shape(pen, n, x, y, (chosen ? 8 : 5) * ratio);
        });
      });
    }

    peak(plot, pen, ratio) {
      const { at, value, text } = this.told.peak;
      const { left, width } = plot.bbox;
      const [x, y] = [plot.valToPos(at, "x", true), plot.valToPos(value, "y", true)];
      if (x < left - 1 || x > left + width + 1 || this.hidden.size) return;
      pen.beginPath();
      pen.arc(x, y, 5 * ratio, 0, 2 * Math.PI);
      pen.fillStyle = colour("--peak");
      pen.strokeStyle = colour("--back");
      pen.lineWidth = 2 * ratio;
      pen.fill();
      pen.stroke();
      const right = x - left < width / 2;
      const down = Math.max(y, plot.bbox.top + 10 * ratio);
      this.label(pen, ratio, text, x + (right ? 14 : -14) * ratio, down, right ? "right" : "left");
    }

    values(index) {
      const { told } = this;
      const shown = told.series.map((one, n) => ({ n, name: one.name, value: one.values[index] ?? null }));
      const there = shown.filter(({ n }) => !this.hidden.has(n));
      if (told.kind === "dots") return there.filter(({ value }) => value !== null);
      if (told.kind !== "stack") return there;
      const areas = there.filter(({ n, value }) => value && this.area(n)).reverse();
      return [{ name: "all", value: areas.reduce((sum, { value }) => sum + value, 0) }, ...areas];
    }

    heading(index) {
      const { told } = this;
      const mark = told.marks.filter(({ at }) => at <= told.at[index]).pop();
      const during = told.kind === "stack" && mark ? `, ${mark.name}` : "";
      return told.names?.[index] ?? `${told.x} ${digits(told.at[index])}${during}`;
    }

    pointed() {
      const { plot, tip } = this;
      if (tip === undefined) return;
      const index = plot.cursor.idx;
      const before = this.index;
      this.index = index ?? undefined;
      if (this.told.kind === "dots" && before !== this.index) plot.redraw(false);
      tip.hidden = index === null || index === undefined || plot.cursor.left < 0;
      if (tip.hidden) return;
      tip.replaceChildren();
      element("strong", "", tip, this.heading(index));
      for (const { n, name, value } of this.values(index)) {
        const row = element("div", "", tip);
        const spot = element("i", "", row);
        spot.style.background = n === undefined ? "transparent" : this.paint(n);
        element("span", "", row, name);
        element("b", "", row, `${digits(value)}${value !== null && this.told.y ? ` ${this.told.y}` : ""}`);
      }
      if (this.told.kind === "dots") {
        const row = element("div", "", tip);
        element("i", "", row);
        element("span", "", row, this.told.x);
        element("b", "", row, digits(this.told.at[index]));
      }
      const { left, top } = plot.over.getBoundingClientRect();
      const whole = this.place.getBoundingClientRect();
      const x = left - whole.left + plot.valToPos(this.told.at[index], "x");
      const room = whole.width - tip.offsetWidth - 2;
      const beside = x + 14 > room ? x - tip.offsetWidth - 14 : x + 14;
      tip.style.left = `${Math.max(2, Math.min(room, beside))}px`;
      tip.style.top = `${top - whole.top + 6}px`;
    }

    pressed(event) {
      if (this.plot === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      const last = this.told.at.length - 1;
      const here = this.index ?? (event.key === "ArrowLeft" ? last + 1 : -1);
      const deeds = {
        ArrowLeft: () => this.go(here - 1),
        ArrowRight: () => this.go(here + 1),
        PageUp: () => this.go(here + Math.max(1, Math.round(last / 10))),
        PageDown: () => this.go(here - Math.max(1, Math.round(last / 10))),
        Home: () => this.go(0),
        End: () => this.go(last),
        "+": () => this.zoom(0.5),
        "=": () => this.zoom(0.5),
        "-": () => this.zoom(2),
        0: () => this.reset(),
        Escape: () => {
          this.leave();
          this.reset();
        },
      };
      if (!(event.key in deeds)) return;
      event.preventDefault();
      deeds[event.key]();
    }

    /* The cursor on a point, which is told; the part that is shown moves with it. */
    go(wanted) {
      const { plot, told } = this;
      const index = Math.max(0, Math.min(told.at.length - 1, wanted));
      const at = told.at[index];
      const { min, max } = plot.scales.x;
      if (at < min || at > max) {
        const half = (max - min) / 2;
        this.show(at - half, at + half);
      }
      this.forced = index;
      plot.setCursor({ left: plot.valToPos(at, "x"), top: plot.over.clientHeight / 2 });
      const told_ = this.values(index).map(({ name, value }) => `${name} ${digits(value)}`);
      this.said.textContent = `${this.heading(index)}: ${told_.join(", ")} ${told.y}`.trim();
    }

    zoom(times) {
      const { plot, told } = this;
      if (plot === undefined || told.at.length < 2) return;
      const { min, max } = plot.scales.x;
      const middle = this.index === undefined ? (min + max) / 2 : told.at[this.index];
      const whole = told.at[told.at.length - 1] - told.at[0];
      const span = Math.max((max - min) * times, (2 * whole) / told.at.length);
      const share = (middle - min) / (max - min);
      if (span >= whole) this.reset();
      else this.show(middle - span * share, middle + span * (1 - share));
      this.said.textContent = this.shown();
    }

    shown() {
      const { min, max } = this.plot.scales.x;
      return `${this.told.x} from ${digits(min)} to ${digits(max)}`;
    }

    /* At once: what follows reads the scale. */
    show(low, high) {
      const { at } = this.told;
      const span = high - low;
      const start = Math.max(at[0], Math.min(low, at[at.length - 1] - span));
      this.plot.batch(() => this.plot.setScale("x", { min: start, max: start + span }));
      this.forced = this.index ?? null;
    }

    reset() {
      if (this.plot === undefined) return;
      const { at } = this.told;
      this.plot.batch(() => this.plot.setScale("x", { min: at[0], max: at[at.length - 1] }));
    }

    zoomed() {
      const { at } = this.told;
      const { min, max } = this.plot?.scales.x ?? {};
      this.all.hidden = !(min > at[0] || max < at[at.length - 1]);
    }

    leave() {
      if (this.plot === undefined) return;
      this.forced = null;
      this.plot.setCursor({ left: -10, top: -10 });
    }
  }

  for (const figure of document.querySelectorAll("figure.chart")) charts.push(new Chart(figure));
  const again = () => charts.forEach((chart) => chart.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("beforeprint", () => {
    root.classList.add("paper");
    charts.forEach((chart) => chart.fit(PAPER));
    again();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("paper");
    charts.forEach((chart) => chart.fit());
    again();
  });
})();
