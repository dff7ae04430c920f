// The Markdown that models write, as elements: headings, lists, tables, quotes, code, emphasis, links. No HTML gets through.

import { copyButton, h } from "./dom.js";

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*([^\s*](?:[\s\S]*?[^\s])?)\*\*|\*([^\s*](?:[^*]*?[^\s*])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;

/** The elements of *text*, which may still be growing. */
export function markdown(text) {
  return blocks(text.split("\n"));
}

function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const fence = /^\s*(`{3,}|~{3,})\s*(\S*)/.exec(line);
    if (fence) {
      const close = lines.findIndex((later, i) => i > at && later.trim().startsWith(fence[1]));
      const end = close < 0 ? lines.length : close;
      found.push(codeBlock(lines.slice(at + 1, end).join("\n"), fence[2]));
      at = end + 1;
    } else if (line.trim() === "") {
      at += 1;
    } else {
      const reader = READERS.find(({ begins }) => begins(line, lines[at + 1])) ?? PARAGRAPH;
      let end = at + 1;
      while (end < lines.length && reader.goesOn(lines[end], end - at)) end += 1;
      found.push(reader.make(lines.slice(at, end)));
      at = end;
    }
  }
  return found;
}

const LIST = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const isBlank = (line) => line.trim() === "";
const isTableRule = (line) => line !== undefined && line.includes("-") && line.includes("|") && /^[\s|:-]+$/.test(line);
const startsBlock = (line) => isBlank(line) || /^(#{1,6} |>|\s*(```|~~~))/.test(line) || LIST.test(line);

const READERS = [
  { begins: (line) => /^#{1,6} /.test(line), goesOn: () => false,
    // the page's own headings come first: a model's begin below them
    make: ([line]) => h(`h${Math.min(6, line.indexOf(" ") + 2)}`, {}, inline(line.replace(/^#+ /, ""))) },
  { begins: (line) => /^\s*([-*_])(\s*\1){2,}\s*$/.test(line), goesOn: () => false, make: () => h("hr") },
  { begins: (line) => line.startsWith(">"), goesOn: (line) => line.startsWith(">"),
    make: (lines) => h("blockquote", {}, blocks(lines.map((line) => line.replace(/^> ?/, "")))) },
  { begins: (line, next) => line.includes("|") && isTableRule(next), goesOn: (line) => line.includes("|"), make: table },
  { begins: (line) => LIST.test(line), goesOn: (line) => LIST.test(line) || (/^\s+\S/.test(line)), make: list },
];

const PARAGRAPH = {
  goesOn: (line) => !startsBlock(line),
  make: (lines) => h("p", {}, inline(lines.join("\n"))),
};

function list(lines) {
  const [, indent, number] = LIST.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = LIST.exec(line);
    if (item && item[1].length <= indent.length) items.push([item[3]]);
    else items.at(-1).push(line.slice(Math.min(indent.length + 2, line.length - line.trimStart().length)));
  }
  const made = items.map((item) => h("li", {}, item.length === 1 ? inline(item[0]) : [...inline(item[0]), ...blocks(item.slice(1))]));
  return number === undefined ? h("ul", {}, made) : h("ol", { start: number }, made);
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const [head, , ...rows] = lines;
  return h("div.scroll", {}, h("table", {},
    h("thead", {}, h("tr", {}, cells(head).map((cell) => h("th", {}, cell)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, cells(row).map((cell) => h("td", {}, cell)))))));
}

function codeBlock(text, language) {
  return h("div.code-block", {}, h("div.code-bar", {}, h("span.help", {}, language), copyButton(() => text)), h("pre", {}, h("code", {}, text)));
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, strong, emphasis, label, target] = match;
    if (match.index > end) parts.push(text.slice(end, match.index));
    if (code !== undefined) parts.push(h("code", {}, code));
    else if (strong !== undefined) parts.push(h("strong", {}, inline(strong)));
    else if (emphasis !== undefined) parts.push(h("em", {}, inline(emphasis)));
    else parts.push(h("a", { href: target, rel: "noopener noreferrer", target: "_blank" }, label));
    end = match.index + whole.length;
  }
  if (end < text.length) parts.push(text.slice(end));
  return parts;
}
