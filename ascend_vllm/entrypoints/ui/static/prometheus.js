// Reads the text format of Prometheus as far as /metrics uses it.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const BOUND = /(?:^|,)le="([^"]*)"/;

const number = (text) => (text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text));

/** The samples of one scrape. Those of several engines are added up. */
export class Scrape {
  constructor(text, time) {
    this.time = time;
    this.values = new Map(); // name → [sum, samples]
    this.buckets = new Map(); // histogram → Map(upper bound → cumulative count)
    this.info = new Map(); // name → labels, as text
    for (const line of text.split("\n")) {
      const match = LINE.exec(line);
      if (!match) continue;
      const [, name, labels, text] = match;
      const value = number(text);
      const [sum, count] = this.values.get(name) || [0, 0];
      this.values.set(name, [sum + value, count + 1]);
      if (labels && name.endsWith("_info")) this.info.set(name, labels);
      const bound = name.endsWith("_bucket") && labels ? BOUND.exec(labels) : null;
      if (!bound) continue;
      const histogram = name.slice(0, -"_bucket".length);
      const buckets = this.buckets.get(histogram) || new Map();
      buckets.set(number(bound[1]), (buckets.get(number(bound[1])) || 0) + value);
      this.buckets.set(histogram, buckets);
    }
  }

  has(name) {
    return this.values.has(name);
  }

  sum(name) {
    return this.values.get(name)?.[0] ?? 0;
  }

  mean(name) {
    const [sum, count] = this.values.get(name) || [0, 0];
    return count ? sum / count : 0;
  }

  label(name, label) {
    return new RegExp(`(?:^|,)${label}="([^"]*)"`).exec(this.info.get(name) || "")?.[1];
  }

  /** Cumulative counts of a histogram by upper bound, less those of an earlier scrape. */
  histogram(name, earlier) {
    const before = earlier?.buckets.get(name);
    const buckets = [...(this.buckets.get(name) || new Map())].sort((one, other) => one[0] - other[0]);
    return buckets.map(([bound, count]) => [bound, count - (before?.get(bound) || 0)]);
  }
}

/** The value below which a share of the observations is, as Prometheus' histogram_quantile estimates it. */
export function quantile(share, buckets) {
  const total = buckets.at(-1)?.[1] || 0;
  if (!total) return NaN;
  const rank = share * total;
  let [lower, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= rank && count > below) {
      return bound === Infinity ? lower : lower + ((bound - lower) * (rank - below)) / (count - below);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}
