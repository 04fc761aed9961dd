/* Lets pointer and keyboard read a chart: what stands around the drawing, the box beside the cursor, zoom. */

/* In a drawing that is narrower than this, in pixels, the box would cover what is read: it stands under it. */
const ROOM_FOR_BOX = 416;

class Chart extends Drawing {
  constructor(figure) {
    super(JSON.parse(figure.querySelector("script").textContent));
    this.figure = figure;
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
      this.tip.style.minHeight = "";
    }
    this.tip.classList.toggle("under", width < ROOM_FOR_BOX);
  }

  redraw() {
    if (this.plot === undefined) return;
    this.samples();
    this.plot.redraw(false, true);
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
    if (tip.classList.contains("under")) {
      /* The room that it has had stays: what follows does not move with every value. */
      tip.style.minHeight = `${tip.offsetHeight}px`;
      tip.classList.add("stays");
      return;
    }
    const { left, top } = plot.over.getBoundingClientRect();
    const whole = this.place.getBoundingClientRect();
    const x = left - whole.left + plot.valToPos(this.told.at[index], "x");
    const room = whole.width - tip.offsetWidth - 2;
    const beside = x + 14 > room ? x - tip.offsetWidth - 14 : x + 14;
    tip.style.left = `${Math.max(2, Math.min(room, beside))}px`;
    /* A dot that the box would cover stands above it. */
    const dot = this.told.kind === "dots" ? plot.valToPos(this.values(index)[0]?.value ?? 0, "y") : Infinity;
    const low = dot < tip.offsetHeight + 18 ? Math.max(6, plot.over.clientHeight - tip.offsetHeight - 6) : 6;
    tip.style.top = `${top - whole.top + low}px`;
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
    const values = this.values(index).map(({ name, value }) => `${name} ${digits(value)}`);
    this.said.textContent = `${this.heading(index)}: ${values.join(", ")} ${told.y}`.trim();
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

const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Chart(figure));
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
