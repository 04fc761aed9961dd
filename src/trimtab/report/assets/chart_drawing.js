/* Draws one chart with uPlot: what its lines, areas or dots are, and what stands over them. */

class Drawing {
  constructor(told) {
    this.told = told;
    this.hidden = new Set();
    /* The point that keys have gone to; a pointer that moves takes over. */
    this.forced = null;
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
      padding: [(plot) => this.above(plot.width), 14, 0, 0],
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

  /* Room for the names of marks: a second row where two of them would meet. */
  above(width) {
    const { marks, at } = this.told;
    const [low, high] = at.length ? this.across(at[0], at[at.length - 1]) : [0, 1];
    const each = (width - 80) / (high - low || 1);
    const room = (n) => (marks[n].at - marks[n - 1].at) * each - 7 * marks[n - 1].name.length - 8;
    return !marks.length ? 8 : marks.some((_, n) => n && room(n) < 0) ? 36 : 20;
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
    const [begin, end] = [Math.min(low, ...near), Math.max(high, ...near)];
    return [Math.min(begin, Math.max(0, begin - (end - begin) * 0.05)), end + (end - begin) * 0.08];
  }

  upward() {
    const { kind } = this.told;
    if (kind === "lines") {
      return { range: (plot, low, high) => (low === null || (low === 0 && high === 0) ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true)) };
    }
    return { range: (plot, low, high) => [0, (high || 1) * (this.told.marks.length ? 1.06 : 1.12)] };
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
        shape(pen, n, 13 * ratio, 6 * ratio, 4.5 * ratio);
        return;
      }
      pen.setLineDash(this.dash(n).map((part) => part * ratio));
      pen.beginPath();
      pen.moveTo(0, 6 * ratio);
      pen.lineTo(sample.width, 6 * ratio);
      pen.stroke();
    });
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
    const taken = [left - 4 * ratio, left - 4 * ratio];
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
      const row = taken.findIndex((end) => start > end);
      if (row < 0) continue;
      label(pen, ratio, name, start, top - (12 + 16 * row) * ratio, "right");
      taken[row] = start + size + 8 * ratio;
    }
    if (told.kind === "stack") this.nameAreas(plot, pen, ratio);
    if (told.kind === "dots") this.dots(plot, pen, ratio);
    if (told.peak) this.peak(plot, pen, ratio);
    pen.restore();
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
      if (best.room > 22 * ratio) label(pen, ratio, one.name, best.x, best.y, "middle");
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
        shape(pen, n, x, y, (chosen ? 8 : 5) * ratio);
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
    label(pen, ratio, text, x + (right ? 14 : -14) * ratio, down, right ? "right" : "left");
  }
}
