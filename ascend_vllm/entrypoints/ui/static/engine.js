// The live view of the engine: reads /metrics each second while it can be seen, and draws the last two minutes.

import { getText, ServerError } from "./api.js";
import { find, make, makeSvg } from "./dom.js";
import { quantile, Scrape } from "./prometheus.js";

const INTERVAL_MS = 1000;
const KEPT = 120; // scrapes
const WINDOW_S = 60;
const WIDTH = 240;
const HEIGHT = 56;

const DRAFTED = "vllm:spec_decode_num_draft_tokens_total";
const ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total";

const whole = (value) => Math.round(value).toLocaleString("en");
const rate = (value) => (value >= 100 ? whole(value) : value.toFixed(value >= 10 || value === 0 ? 0 : 1));
const percent = (value) => (Number.isNaN(value) ? "–" : value > 0 && value < 0.001 ? "< 0.1 %" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`);
const share = (part, all) => (all > 0 ? part / all : NaN);
const plural = (count, noun) => `${whole(count)} ${noun}${count === 1 ? "" : "s"}`;

function seconds(value) {
  if (Number.isNaN(value)) return "–";
  if (value < 0.9995) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

const HISTOGRAMS = [
  ["First token", "vllm:time_to_first_token_seconds"],
  ["Between tokens", "vllm:inter_token_latency_seconds"],
  ["Whole request", "vllm:e2e_request_latency_seconds"],
  ["In the queue", "vllm:request_queue_time_seconds"],
];

const FIRST = HISTOGRAMS[0][1];

/** What a tile shows of the scrapes: `now`, the one before, the one a minute ago, and rates. */
const TILES = [
  {
    id: "generation",
    title: "Generated",
    unit: "tokens/s",
    series: ["generated", "read"],
    names: ["generated", "prompt"],
    value: (view) => rate(view.point.generated),
    detail: (view) =>
      `${rate(view.point.read)} prompt tokens/s · ${whole(view.now.sum("vllm:generation_tokens_total"))} since start`,
  },
  {
    id: "requests",
    title: "Running",
    unit: (view) => (view.point.running === 1 ? "request" : "requests"),
    series: ["running", "waiting"],
    names: ["running", "waiting"],
    value: (view) => whole(view.point.running),
    detail: (view) => `${whole(view.point.waiting)} waiting · ${whole(view.now.sum("vllm:request_success_total"))} finished since start`,
  },
  {
    id: "cache",
    title: "KV cache in use",
    series: ["cache"],
    names: ["in use"],
    top: 1,
    value: (view) => percent(view.point.cache),
    detail: (view) => cacheSize(view.now),
  },
  {
    id: "prefix",
    title: "Prefix cache hits",
    series: ["hits"],
    names: ["hits"],
    top: 1,
    value: (view) => percent(view.hits),
    detail: (view) =>
      view.now.label("vllm:cache_config_info", "enable_prefix_caching") === "False"
        ? "The prefix cache is off"
        : `last minute · ${percent(view.hitsSinceStart)} since start`,
  },
  {
    id: "first",
    title: "First token",
    unit: (view) => (Number.isNaN(view.point.first) ? "" : "median"),
    series: ["first"],
    names: ["median"],
    write: seconds,
    value: (view) => seconds(view.point.first),
    detail: (view) => `last minute · ${seconds(view.firstSinceStart)} since start`,
  },
  {
    id: "drafts",
    title: "Accepted drafts",
    series: ["accepted"],
    names: ["accepted"],
    top: 1,
    exists: (view) => view.now.has(DRAFTED),
    value: (view) => percent(view.accepted),
    detail: (view) => `last minute · ${percent(view.acceptedSinceStart)} since start`,
  },
  {
    id: "preemptions",
    title: "Preemptions",
    series: ["preempted"],
    names: ["preemptions"],
    value: (view) => whole(view.preemptions),
    detail: (view) => `last minute · ${whole(view.now.sum("vllm:num_preemptions_total"))} since start`,
  },
];

function cacheSize(now) {
  const blocks = Number(now.label("vllm:cache_config_info", "num_gpu_blocks"));
  const size = Number(now.label("vllm:cache_config_info", "block_size"));
  return blocks && size ? `of ${plural(blocks, "block")} of ${plural(size, "token")}` : "";
}

export class EngineView {
  constructor() {
    this.scrapes = [];
    this.points = [];
    this.isShown = false;
    this.isPaused = false;
    this.timer = 0;
    this.reading = null;
    this.tiles = TILES.map((tile) => makeTile(tile));
    find("tiles").append(...this.tiles.map((tile) => tile.element));
    find("pause").addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      find("pause").setAttribute("aria-pressed", String(this.isPaused));
      find("pause").textContent = this.isPaused ? "Go on" : "Pause";
      this.update();
    });
    for (const input of document.getElementsByName("period")) input.addEventListener("change", () => this.draw());
    document.addEventListener("visibilitychange", () => this.update());
  }

  setShown(isShown) {
    this.isShown = isShown;
    this.update();
  }

  /** Starts or stops reading. */
  update() {
    const reads = this.isShown && !this.isPaused && document.visibilityState === "visible";
    if (reads && !this.timer) {
      this.timer = setInterval(() => this.read(), INTERVAL_MS);
      this.read();
    } else if (!reads && this.timer) {
      clearInterval(this.timer);
      this.timer = 0;
      this.reading?.abort();
    }
  }

  async read() {
    // a server that is slow to answer is not asked more often
    if (this.reading) return;
    this.reading = new AbortController();
    try {
      const text = await getText("metrics", this.reading.signal);
      this.take(new Scrape(text, performance.now() / 1000));
      this.say("Read from /metrics each second while you look at it.");
    } catch (error) {
      if (error.name === "AbortError") return;
      this.say(error instanceof ServerError ? error.message : `The metrics cannot be read: ${error.message}`, true);
    } finally {
      this.reading = null;
    }
  }

  say(text, isError = false) {
    const status = find("engine-status");
    if (status.textContent !== text) status.textContent = text;
    status.classList.toggle("error", isError);
  }

  take(now) {
    if (!now.has("vllm:generation_tokens_total")) {
      throw new ServerError("This server keeps no statistics of its engine (--disable-log-stats).");
    }
    const before = this.scrapes.at(-1);
    // another server answers at this address, or this one was started again
    if (before && now.sum("vllm:generation_tokens_total") < before.sum("vllm:generation_tokens_total")) {
      this.scrapes = [];
      this.points = [];
      return this.take(now);
    }
    const elapsed = before ? now.time - before.time : 0;
    const increase = (name) => (before ? now.sum(name) - before.sum(name) : 0);
    this.points.push({
      time: now.time,
      generated: elapsed ? increase("vllm:generation_tokens_total") / elapsed : 0,
      read: elapsed ? increase("vllm:prompt_tokens_total") / elapsed : 0,
      running: now.sum("vllm:num_requests_running"),
      waiting: now.sum("vllm:num_requests_waiting"),
      cache: now.mean("vllm:kv_cache_usage_perc"),
      hits: share(increase("vllm:prefix_cache_hits_total"), increase("vllm:prefix_cache_queries_total")),
      accepted: share(increase(ACCEPTED), increase(DRAFTED)),
      preempted: increase("vllm:num_preemptions_total"),
      first: quantile(0.5, now.histogram(FIRST, this.earlier(now))),
    });
    this.scrapes.push(now);
    if (this.scrapes.length > KEPT) {
      this.scrapes.shift();
      this.points.shift();
    }
    this.draw();
  }

  /** The scrape of a minute ago: the first one until the view is as old as that. */
  earlier(now) {
    return this.scrapes.find((scrape) => now.time - scrape.time <= WINDOW_S + 0.5) ?? now;
  }

  draw() {
    const now = this.scrapes.at(-1);
    if (!now) return;
    const earlier = this.earlier(now);
    const lately = (name) => now.sum(name) - earlier.sum(name);
    const [hits, queries] = ["vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"];
    const view = {
      now,
      point: this.points.at(-1),
      hits: share(lately(hits), lately(queries)),
      hitsSinceStart: share(now.sum(hits), now.sum(queries)),
      accepted: share(lately(ACCEPTED), lately(DRAFTED)),
      acceptedSinceStart: share(now.sum(ACCEPTED), now.sum(DRAFTED)),
      firstSinceStart: quantile(0.5, now.histogram(FIRST)),
      preemptions: lately("vllm:num_preemptions_total"),
    };
    for (const tile of this.tiles) tile.show(view, this.points);
    const isMinute = document.querySelector("[name=period]:checked").value === "minute";
    const rows = HISTOGRAMS.map(([title, name]) => {
      const buckets = now.histogram(name, isMinute ? earlier : null);
      const times = [0.5, 0.9, 0.99].map((part) => seconds(quantile(part, buckets)));
      const cells = [...times, whole(buckets.at(-1)?.[1] || 0)].map((text) => make("td", { textContent: text }));
      return make("tr", { "data-histogram": name }, make("th", { scope: "row", textContent: title }), ...cells);
    });
    find("latency-rows").replaceChildren(...rows);
  }
}

function makeTile(tile) {
  const value = make("span", { className: "tile-value", textContent: "–" });
  const unit = make("span", { className: "tile-unit" });
  const detail = make("p", { className: "tile-detail" });
  const chart = makeSvg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  chart.setAttribute("aria-label", "Nothing yet");
  const shapes = tile.series.map((_, index) => ({
    area: index === 0 ? makeSvg("path", { class: "area" }) : null,
    line: makeSvg("path", { class: `line line-${index}` }),
  }));
  chart.append(makeSvg("line", { class: "axis", x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5 }));
  for (const { area, line } of shapes) chart.append(...(area ? [area] : []), line);
  const top = make("span", { className: "chart-top", "aria-hidden": "true" });
  const element = make(
    "section",
    { className: "tile", id: `tile-${tile.id}`, "aria-label": tile.title },
    make("h3", { textContent: tile.title }),
    make("p", { className: "tile-number" }, value, unit),
    make("div", { className: "chart-box" }, chart, top),
    detail,
  );
  return {
    element,
    show(view, points) {
      element.hidden = tile.exists ? !tile.exists(view) : false;
      value.textContent = tile.value(view);
      unit.textContent = typeof tile.unit === "function" ? tile.unit(view) : tile.unit || "";
      // names the dashed line
      const key = make("span", { className: "tile-key", "aria-hidden": "true" }, "┄ ");
      detail.replaceChildren(...(tile.series.length > 1 ? [key] : []), tile.detail(view));
      const write = tile.top ? percent : tile.write || whole;
      const values = tile.series.map((name) => points.map((point) => point[name]));
      const most = tile.top ?? niceTop(Math.max(0, ...values.flat().filter((one) => !Number.isNaN(one))), tile.write);
      top.textContent = write(most);
      shapes.forEach(({ area, line }, index) => {
        const path = pathOf(values[index], most);
        line.setAttribute("d", path);
        area?.setAttribute("d", areaOf(values[index], most));
      });
      const last = values.map((list, index) => `${tile.names[index]} ${write(list.at(-1))}`);
      chart.setAttribute("aria-label", `The last two minutes: now ${last.join(", ")}, top of the chart ${top.textContent}`);
    },
  };
}

/** 1, 2 or 5 times a power of ten, at least `most`; of what is counted at least 1. */
function niceTop(most, isFraction) {
  if (!isFraction && most <= 1) return 1;
  if (most <= 0) return 1;
  const scale = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * scale).find((top) => top >= most);
}

const xOf = (index, count) => WIDTH - (count - 1 - index) * (WIDTH / (KEPT - 1));
const yOf = (value, most) => HEIGHT - 1 - (HEIGHT - 3) * Math.min(1, value / most);

/** A line through the values; it has gaps where there are none. */
function pathOf(values, most) {
  let isGap = true;
  let path = "";
  values.forEach((value, index) => {
    if (Number.isNaN(value)) {
      isGap = true;
      return;
    }
    path += `${isGap ? "M" : "L"}${xOf(index, values.length).toFixed(1)} ${yOf(value, most).toFixed(1)}`;
    isGap = false;
  });
  return path;
}

function areaOf(values, most) {
  const filled = values.map((value) => (Number.isNaN(value) ? 0 : value));
  if (filled.length < 2) return "";
  return `${pathOf(filled, most)}L${WIDTH} ${HEIGHT}L${xOf(0, filled.length).toFixed(1)} ${HEIGHT}Z`;
}
