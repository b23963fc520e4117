/**
 * What is on the page as one SVG without HTML in it, which any program can open: boxes, text by
 * lines, pictures of canvases, and the page's own SVGs with their styles written out.
 */

const SVG = "http://www.w3.org/2000/svg";
const MOST = 20_000; // elements; a picture of more is no use to anyone

const STYLES = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-opacity",
  "stroke-dasharray",
  "stroke-linejoin",
  "stroke-linecap",
  "opacity",
  "font-family",
  "font-size",
  "font-weight",
  "text-anchor",
  "dominant-baseline",
  "display",
  "visibility",
  "paint-order",
  "marker-end",
];

export interface Picture {
  svg: SVGSVGElement;
  width: number;
  height: number;
}

interface Pen {
  origin: DOMRect;
  out: SVGElement;
  left: number;
  clips: number;
}

function make(name: string, attributes: Record<string, string | number>): SVGElement {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) {
    made.setAttribute(key, typeof value === "number" ? String(Math.round(value * 100) / 100) : value);
  }
  return made;
}

const transparent = (colour: string): boolean =>
  colour === "transparent" || colour === "" || /(,\s*0|\/\s*0%?)\)$/.test(colour);

/** The picture of an element and all in it, as it is now. */
export function picture(root: Element): Picture {
  const origin = root.getBoundingClientRect();
  const [width, height] = [Math.ceil(origin.width), Math.ceil(origin.height)];
  const svg = make("svg", { xmlns: SVG, width, height, viewBox: `0 0 ${width} ${height}` });
  const ground = getComputedStyle(document.body).backgroundColor;
  svg.append(make("rect", { width, height, fill: transparent(ground) ? "white" : ground }));
  draw(root, { origin, out: svg, left: MOST, clips: 0 });
  return { svg: svg as SVGSVGElement, width, height };
}

function draw(at: Element, pen: Pen): void {
  if (pen.left-- <= 0) return;
  const style = getComputedStyle(at);
  const area = at.getBoundingClientRect();
  if (style.display === "none" || style.visibility === "hidden" || hidden(at, style, area)) return;
  if (Number(style.opacity) === 0) return;
  if (at instanceof SVGSVGElement) return inline(at, area, pen);
  if (at instanceof HTMLCanvasElement) return canvas(at, area, pen);
  box(style, area, pen);
  outline(style, area, pen);
  for (const pseudo of ["::before", "::after"]) dot(at, pseudo, area, pen);
  if (at instanceof HTMLInputElement || at instanceof HTMLSelectElement) {
    return control(at, style, area, pen);
  }
  const inside = scrolls(at) ? clipped(area, pen) : pen;
  for (const child of at.childNodes) {
    if (child instanceof Element) draw(child, inside);
    else if (child.nodeType === Node.TEXT_NODE) words(child as Text, style, inside);
  }
  pen.left = inside.left;
  pen.clips = inside.clips;
}

/** What only screen readers get, or nobody. */
const hidden = (at: Element, style: CSSStyleDeclaration, area: DOMRect): boolean =>
  (area.width <= 1 && area.height <= 1 && style.position === "absolute") ||
  at.tagName === "SCRIPT" ||
  at.tagName === "STYLE";

const scrolls = (at: Element): boolean =>
  at.scrollHeight > at.clientHeight + 1 && getComputedStyle(at).overflowY !== "visible";

function clipped(area: DOMRect, pen: Pen): Pen {
  const id = `clip-${pen.clips}`;
  const clip = make("clipPath", { id });
  clip.append(make("rect", place(area, pen)));
  const group = make("g", { "clip-path": `url(#${id})` });
  pen.out.append(clip, group);
  return { ...pen, out: group, clips: pen.clips + 1 };
}

const place = (area: DOMRect, pen: Pen): Record<string, number> => ({
  x: area.left - pen.origin.left,
  y: area.top - pen.origin.top,
  width: area.width,
  height: area.height,
});

function box(style: CSSStyleDeclaration, area: DOMRect, pen: Pen): void {
  if (!area.width || !area.height) return;
  const radius = Math.min(parseFloat(style.borderTopLeftRadius) || 0, area.height / 2);
  const sides = ["Top", "Right", "Bottom", "Left"] as const;
  const edges = sides.map((side) => ({
    size: parseFloat(style[`border${side}Width`]) || 0,
    colour: style[`border${side}Color`],
  }));
  const all = edges.every((edge) => edge.size > 0);
  const { x = 0, y = 0, width = 0, height = 0 } = place(area, pen);
  const ground = transparent(style.backgroundColor) ? "none" : style.backgroundColor;
  if (ground !== "none" || all) {
    const half = all ? edges[0]!.size / 2 : 0;
    pen.out.append(
      make("rect", {
        x: x + half,
        y: y + half,
        width: Math.max(0, width - 2 * half),
        height: Math.max(0, height - 2 * half),
        rx: radius,
        fill: ground,
        stroke: all ? edges[0]!.colour : "none",
        "stroke-width": all ? edges[0]!.size : 0,
      }),
    );
  }
  if (all) return;
  const lines = [
    { x, y, width, height: edges[0]!.size },
    { x: x + width - edges[1]!.size, y, width: edges[1]!.size, height },
    { x, y: y + height - edges[2]!.size, width, height: edges[2]!.size },
    { x, y, width: edges[3]!.size, height },
  ];
  lines.forEach((line, n) => {
    if (edges[n]!.size) pen.out.append(make("rect", { ...line, fill: edges[n]!.colour }));
  });
}

/** What marks a cell that is picked. */
function outline(style: CSSStyleDeclaration, area: DOMRect, pen: Pen): void {
  const size = parseFloat(style.outlineWidth) || 0;
  if (style.outlineStyle === "none" || style.outlineStyle === "auto" || !size) return;
  const { x = 0, y = 0, width = 0, height = 0 } = place(area, pen);
  const by = size / 2 + (parseFloat(style.outlineOffset) || 0);
  pen.out.append(
    make("rect", {
      x: x - by,
      y: y - by,
      width: width + 2 * by,
      height: height + 2 * by,
      fill: "none",
      stroke: style.outlineColor,
      "stroke-width": size,
    }),
  );
}

/** Points and lines that style sheets draw; their places are known only when they are absolute. */
function dot(at: Element, pseudo: string, area: DOMRect, pen: Pen): void {
  const style = getComputedStyle(at, pseudo);
  if (style.position !== "absolute" || style.content === "none") return;
  const [width, height] = [parseFloat(style.width), parseFloat(style.height)];
  const [left, top] = [parseFloat(style.left), parseFloat(style.top)];
  if (![width, height, left, top].every(Number.isFinite)) return;
  const { x, y } = { x: area.left + left, y: area.top + top };
  if (style.content === '""') box(style, new DOMRect(x, y, width, height), pen);
  else {
    const text = style.content.replace(/^"|"$/g, "");
    if (!text.startsWith("attr") && text !== "normal") write(text, x, y + height / 2, style, pen);
  }
}

function write(text: string, x: number, middle: number, style: CSSStyleDeclaration, pen: Pen): void {
  const size = parseFloat(style.fontSize) || 14;
  const made = make("text", {
    x: x - pen.origin.left,
    y: middle - pen.origin.top + size * 0.35,
    fill: style.color,
    "font-family": style.fontFamily,
    "font-size": size,
    "font-weight": style.fontWeight,
  });
  made.style.whiteSpace = "pre";
  made.textContent = text;
  pen.out.append(made);
}

/** A text line by line, as the browser broke it. */
function words(node: Text, style: CSSStyleDeclaration, pen: Pen): void {
  const text = node.data;
  if (!text.trim() || pen.left <= 0) return;
  const range = document.createRange();
  let line = "";
  let area: DOMRect | null = null;
  const flush = (): void => {
    if (area && line.trim()) {
      const shown = line.replace(/\s+/g, " ");
      write(shown, area.left, area.top + area.height / 2, style, pen);
    }
    line = "";
    area = null;
  };
  let at = 0;
  for (const character of [...text].slice(0, 5000)) {
    range.setStart(node, at);
    at += character.length;
    range.setEnd(node, at);
    const here = range.getClientRects()[0];
    if (!here || (!here.width && !line)) continue;
    if (area && Math.abs(here.top - (area as DOMRect).top) > 2) flush();
    area ??= here;
    line += character;
  }
  flush();
}

function control(at: HTMLInputElement | HTMLSelectElement, style: CSSStyleDeclaration, area: DOMRect, pen: Pen): void {
  if (at instanceof HTMLInputElement && at.type === "checkbox") {
    const { x = 0, y = 0, width = 0, height = 0 } = place(area, pen);
    pen.out.append(
      make("rect", { x, y, width, height, rx: 2, fill: at.checked ? style.accentColor : "none", stroke: style.color }),
    );
    return;
  }
  const text = at instanceof HTMLSelectElement ? (at.selectedOptions[0]?.text ?? "") : at.value || at.placeholder;
  const left = area.left + (parseFloat(style.paddingLeft) || 0) + (parseFloat(style.borderLeftWidth) || 0);
  write(text, left, area.top + area.height / 2, style, pen);
}

function canvas(at: HTMLCanvasElement, area: DOMRect, pen: Pen): void {
  if (!at.width || !at.height) return;
  pen.out.append(make("image", { ...place(area, pen), href: at.toDataURL("image/png"), preserveAspectRatio: "none" }));
}

/** An SVG of the page, with the styles that its sheets gave it written into it. */
export function inline(at: SVGSVGElement, area: DOMRect, pen: Pen): void {
  const copy = at.cloneNode(true) as SVGSVGElement;
  const [olds, news] = [at.querySelectorAll("*"), copy.querySelectorAll("*")];
  if (olds.length > pen.left) return;
  pen.left -= olds.length;
  olds.forEach((old, n) => written(old, news[n] as SVGElement));
  written(at, copy);
  for (const [key, value] of Object.entries(place(area, pen))) copy.setAttribute(key, String(value));
  copy.removeAttribute("class");
  copy.removeAttribute("tabindex");
  if (!copy.hasAttribute("viewBox")) copy.setAttribute("viewBox", `0 0 ${area.width} ${area.height}`);
  pen.out.append(copy);
}

function written(old: Element, made: SVGElement): void {
  const style = getComputedStyle(old);
  for (const name of STYLES) {
    const value = style.getPropertyValue(name);
    if (value && value !== "normal" && value !== "auto") made.style.setProperty(name, value);
  }
}

export function svgText({ svg }: Picture): string {
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(svg)}`;
}

/** The picture in pixels, twice as many as on the page where a canvas can be so large. */
export async function png(made: Picture): Promise<Blob> {
  const most = 8192;
  const scale = Math.min(2, most / made.width, most / made.height);
  const url = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svgText(made))}`;
  const image = new Image();
  await new Promise<void>((done, failed) => {
    image.onload = () => done();
    image.onerror = () => failed(new Error("the picture could not be drawn"));
    image.src = url;
  });
  const canvas = document.createElement("canvas");
  canvas.width = Math.ceil(made.width * scale);
  canvas.height = Math.ceil(made.height * scale);
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, failed) => {
    canvas.toBlob((blob) => (blob ? done(blob) : failed(new Error("no picture"))), "image/png");
  });
}
