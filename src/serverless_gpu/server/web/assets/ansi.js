// Converts terminal output to lines of styled text. A state machine per output stream: no HTML, no links, no cursor
// movement. Colours become the class of one of 16 colours, so that they stay readable in the light and the dark theme.
"use strict";

export const LINE_MAX = 4096; // Characters of a line. Further characters only count.
const SEQUENCE_MAX = 64; // Characters of the parameters of a control sequence.
const STRING_MAX = 2048; // Characters of an operating system command, such as the address of a link.

const SPECIAL = /[\x00-\x08\x0a-\x1f\x7f-\x9f]/g; // Control characters except the tab.
const TEXT = 0, ESCAPE = 1, INTERMEDIATE = 2, SEQUENCE = 3, STRING = 4, STRING_ESCAPE = 5;

// A style is a number: 5 bits of the foreground (0 or 1 + colour), 5 bits of the background, and flags.
const BACK = 5, BOLD = 1 << 10, DIM = 1 << 11, ITALIC = 1 << 12, UNDERLINE = 1 << 13, INVERSE = 1 << 14, STRIKE = 1 << 15;
const FLAGS = [[BOLD, "bold"], [DIM, "dim"], [ITALIC, "italic"], [UNDERLINE, "underline"], [INVERSE, "inverse"], [STRIKE, "strike"]];
const ON = {1: BOLD, 2: DIM, 3: ITALIC, 4: UNDERLINE, 7: INVERSE, 9: STRIKE, 21: UNDERLINE};
const OFF = {22: BOLD | DIM, 23: ITALIC, 24: UNDERLINE, 27: INVERSE, 29: STRIKE};
const names = new Map([[0, ""]]);

export function className(style) {
  let name = names.get(style);
  if (name === undefined) {
    const parts = FLAGS.filter(([flag]) => style & flag).map(([, word]) => word);
    if (style & 31) parts.push(`fg${(style & 31) - 1}`);
    if (style >> BACK & 31) parts.push(`bg${(style >> BACK & 31) - 1}`);
    name = parts.join(" ");
    names.set(style, name);
  }
  return name;
}

// The nearest of the 16 colours of a terminal.
function nearest(red, green, blue) {
  const high = Math.max(red, green, blue), low = Math.min(red, green, blue);
  if (high - low < 48) return high < 64 ? 0 : high < 160 ? 8 : high < 232 ? 7 : 15;
  const half = (high + low) / 2;
  return (red > half ? 1 : 0) | (green > half ? 2 : 0) | (blue > half ? 4 : 0) | (high > 200 ? 8 : 0);
}

function indexed(index) {
  if (!(index >= 0 && index < 256)) return -1;
  if (index < 16) return index;
  if (index >= 232) return nearest(...Array(3).fill(8 + 10 * (index - 232)));
  const level = value => value ? 55 + 40 * value : 0;
  return nearest(level(Math.floor((index - 16) / 36)), level(Math.floor((index - 16) / 6) % 6), level((index - 16) % 6));
}

function changed(style, parameters) {
  const codes = parameters.split(/[;:]/).map(Number);
  for (let at = 0; at < codes.length; at++) {
    const code = codes[at];
    let colour = -1;
    if (code === 0) style = 0;
    else if (ON[code]) style |= ON[code];
    else if (OFF[code]) style &= ~OFF[code];
    else if (code === 38 || code === 48) {
      if (codes[at + 1] === 5) { colour = indexed(codes[at + 2]); at += 2; }
      else if (codes[at + 1] === 2) { colour = nearest(codes[at + 2] | 0, codes[at + 3] | 0, codes[at + 4] | 0); at += 4; }
      if (colour >= 0) style = code === 38 ? style & ~31 | colour + 1 : style & ~(31 << BACK) | colour + 1 << BACK;
    }
    else if (code >= 30 && code <= 37) style = style & ~31 | code - 29;
    else if (code >= 90 && code <= 97) style = style & ~31 | code - 81;
    else if (code === 39) style &= ~31;
    else if (code >= 40 && code <= 47) style = style & ~(31 << BACK) | code - 39 << BACK;
    else if (code >= 100 && code <= 107) style = style & ~(31 << BACK) | code - 91 << BACK;
    else if (code === 49) style &= ~(31 << BACK);
  }
  return style;
}

// A line. `runs` is null, or alternates the end of a run in `text` and its style. `version` changes with the line.
export function newLine(source, offset) {
  return {source, offset, text: "", runs: null, cut: 0, isReturned: false, version: 0, gap: null};
}

function append(line, text, style) {
  if (line.isReturned) Object.assign(line, {text: "", runs: null, cut: 0, isReturned: false});
  const room = LINE_MAX - line.text.length;
  if (text.length > room) {
    line.cut += text.length - room;
    text = text.slice(0, room);
    if (!text) return;
  }
  if (style || line.runs) {
    line.runs ??= line.text ? [line.text.length, 0] : [];
    const last = line.runs.length - 2, end = line.text.length + text.length;
    if (last >= 0 && line.runs[last + 1] === style) line.runs[last] = end;
    else line.runs.push(end, style);
  }
  line.text += text;
}

function erase(line) { // Backspace: removes the last character.
  const pair = /[\udc00-\udfff]$/.test(line.text) ? 2 : 1;
  line.text = line.text.slice(0, -pair);
  while (line.runs?.length && (line.runs.at(-4) ?? 0) >= line.text.length) line.runs.splice(-2);
  if (line.runs?.length) line.runs[line.runs.length - 2] = line.text.length;
}

export class Terminal {
  constructor() {
    this.style = 0;
    this.state = TEXT;
    this.sequence = "";
    this.length = 0;
  }

  endLine() { this.state = TEXT; } // The style continues on the next line. A sequence does not.

  write(line, text) {
    line.version++;
    let at = 0;
    while (at < text.length) {
      if (this.state !== TEXT) { at = this.control(line, text, at); continue; }
      SPECIAL.lastIndex = at;
      const end = SPECIAL.exec(text)?.index ?? text.length;
      if (end > at) append(line, at || end < text.length ? text.slice(at, end) : text, this.style);
      at = end;
      if (at < text.length) this.special(line, text.charCodeAt(at++));
    }
  }

  special(line, code) {
    this.sequence = "";
    this.length = 0;
    if (code === 0x1b) this.state = ESCAPE;
    else if (code === 0x0d) line.isReturned = true;
    else if (code === 0x08) erase(line);
    else if (code === 0x9b) this.state = SEQUENCE;
    else if (code === 0x90 || code === 0x98 || code >= 0x9d && code <= 0x9f) this.state = STRING;
    else if (code === 0x7f) append(line, "\u2421", this.style);
    else if (code < 0x20 && code !== 0x07) append(line, String.fromCharCode(0x2400 + code), this.style);
  }

  // Reads one character of a sequence, and returns the place of the next character to read.
  control(line, text, at) {
    const code = text.charCodeAt(at), char = text[at];
    const state = this.state;
    if (state === STRING || state === STRING_ESCAPE) {
      if (code === 0x07 || code === 0x9c || state === STRING_ESCAPE && char === "\\" || ++this.length > STRING_MAX) this.state = TEXT;
      else if (state === STRING_ESCAPE) { this.state = ESCAPE; return at; }
      else if (code === 0x1b) this.state = STRING_ESCAPE;
      return at + 1;
    }
    if (code === 0x1b || code < 0x20 || code > 0x7e) { this.state = TEXT; return at; } // An incomplete sequence.
    if (state === ESCAPE) {
      if (char === "[") this.state = SEQUENCE;
      else if ("PX^_]".includes(char)) this.state = STRING;
      else this.state = code < 0x30 ? INTERMEDIATE : TEXT;
    }
    else if (state === INTERMEDIATE) { if (code >= 0x30 || ++this.length > SEQUENCE_MAX) this.state = TEXT; }
    else if (code >= 0x40) {
      if (char === "m" && /^[0-9;:]*$/.test(this.sequence)) this.style = changed(this.style, this.sequence);
      else if (char === "K" && this.sequence === "2") line.isReturned = true;
      this.state = TEXT;
    }
    else {
      this.sequence += char;
      if (this.sequence.length > SEQUENCE_MAX) this.state = TEXT;
    }
    return at + 1;
  }
}

// Shows a line in an element. All content is text.
export function show(line, element) {
  if (!line.runs) { element.textContent = line.text; return; }
  const parts = [];
  let start = 0;
  for (let at = 0; at < line.runs.length; at += 2) {
    const text = line.text.slice(start, line.runs[at]);
    start = line.runs[at];
    if (!line.runs[at + 1]) { parts.push(text); continue; }
    const span = document.createElement("span");
    span.className = className(line.runs[at + 1]);
    span.textContent = text;
    parts.push(span);
  }
  element.replaceChildren(...parts);
}
