// A small part of Markdown, made of elements and texts: nothing that a model writes becomes HTML.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*).*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

// In the order in which they are tried: code, bold, italic, struck, link. None is long, so that a text which opens many
// and closes none takes time in proportion to its length.
const INLINE =
  /(?<!`)(`{1,3})(?<code>[^`]|[^`].{0,1000}?[^`])\1(?!`)|\*\*(?<bold>\S(?:.{0,1000}?\S)?)\*\*|(?<![\w*])[*_](?<italic>[^\s*_](?:[^*_]{0,1000}[^\s*_])?)[*_](?![\w*])|~~(?<struck>\S(?:.{0,1000}?\S)?)~~|\[(?<label>[^\]\n]{1,500})\]\((?<address>[^()\s]{1,2000})\)/s;

/** Appends a text with code, emphasis and links to an element. */
function addInline(parent, text, depth = 0) {
  while (text) {
    const match = depth < 4 && text.length < 20_000 ? INLINE.exec(text) : null;
    if (!match) {
      parent.append(text);
      return;
    }
    parent.append(text.slice(0, match.index));
    const { code, bold, italic, struck, label, address } = match.groups;
    if (code !== undefined) parent.append(make("code", { textContent: code }));
    else if (label !== undefined) parent.append(makeLink(label, address, match[0]));
    else {
      const element = make(bold !== undefined ? "strong" : italic !== undefined ? "em" : "s");
      addInline(element, bold ?? italic ?? struck, depth + 1);
      parent.append(element);
    }
    text = text.slice(match.index + match[0].length);
  }
}

/** A link to the web; any other address, such as javascript:, stays text. */
function makeLink(label, address, source) {
  if (!/^https?:\/\//i.test(address)) return source;
  return make("a", { href: address, textContent: label, rel: "noopener noreferrer", target: "_blank", title: address });
}

/** Cuts a text into blocks: paragraphs, fenced code, lists, tables, quotes. */
export function splitBlocks(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const end = () => {
    if (lines.length) blocks.push(lines.join("\n"));
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (fence) {
      lines.push(line);
      if (line.trim().startsWith(fence) && /^\s*[`~]+\s*$/.test(line)) {
        fence = null;
        end();
      }
      continue;
    }
    const opening = FENCE.exec(line);
    if (opening) {
      end();
      fence = opening[1];
      lines.push(line);
    } else if (!line.trim()) end();
    else if (HEADING.test(line) || RULE.test(line)) {
      end();
      lines.push(line);
      end();
    } else {
      const isItem = ITEM.test(line);
      const inList = lines.length > 0 && ITEM.test(lines[0]);
      if (isItem && lines.length && !inList) end();
      lines.push(line);
    }
  }
  end();
  return blocks;
}

function makeList(lines) {
  const root = [];
  const stack = [{ indent: -1, children: root }];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (!match) {
      stack.at(-1).text += ` ${line.trim()}`;
      continue;
    }
    const indent = match[1].length;
    while (stack.length > 1 && stack.at(-1).indent >= indent) stack.pop();
    const item = { indent, ordered: /\d/.test(match[2]), number: parseInt(match[2], 10), text: match[3], children: [] };
    stack.at(-1).children.push(item);
    if (stack.length < 8) stack.push(item);
  }
  const build = (items) => {
    const list = make(items[0].ordered ? "ol" : "ul");
    if (items[0].ordered) list.start = items[0].number;
    for (const item of items) {
      const element = make("li");
      addInline(element, item.text);
      if (item.children.length) element.append(build(item.children));
      list.append(element);
    }
    return list;
  };
  return build(root);
}

const cellsOf = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());

function makeTable(lines) {
  const row = (line, tag) => {
    const element = make("tr");
    for (const cell of cellsOf(line)) {
      const box = make(tag);
      addInline(box, cell);
      element.append(box);
    }
    return element;
  };
  const body = make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return make("div", { className: "table-scroll", tabIndex: 0, role: "group", "aria-label": "Table" }, make("table", {}, make("thead", {}, row(lines[0], "th")), body));
}

function makeBlock(block) {
  const lines = block.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) {
    const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence[1]);
    const code = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    return make("pre", { tabIndex: 0, role: "group", "aria-label": fence[2] ? `Code, ${fence[2]}` : "Code" }, make("code", { textContent: code }));
  }
  const heading = HEADING.exec(block);
  if (heading) {
    // below the page's own headings
    const element = make(`h${Math.min(6, heading[1].length + 2)}`);
    addInline(element, heading[2]);
    return element;
  }
  if (RULE.test(block)) return make("hr");
  if (ITEM.test(lines[0])) return makeList(lines);
  if (lines.length > 1 && lines[0].includes("|") && TABLE_RULE.test(lines[1])) return makeTable(lines);
  if (lines.every((line) => QUOTE.test(line))) {
    const quote = make("blockquote");
    addInline(quote, lines.map((line) => QUOTE.exec(line)[1]).join("\n"));
    return quote;
  }
  const paragraph = make("p");
  addInline(paragraph, block);
  return paragraph;
}

/** Shows a text in an element. Blocks that it shows already are kept, so that a growing text costs its end only. */
export function showMarkdown(element, text) {
  const blocks = splitBlocks(text);
  const known = element.blocks || [];
  let same = 0;
  while (same < known.length && same < blocks.length && known[same] === blocks[same]) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) element.append(makeBlock(block));
  element.blocks = blocks;
}
