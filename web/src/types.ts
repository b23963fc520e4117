/**
 * What Python hands to the report (gradtrace/report). The two sides share nothing else.
 *
 * The page holds one string: base64 of gzip of a container. The container is four bytes (little
 * endian) with the length of a JSON text, the text, zeros up to a multiple of 8, and a blob. In
 * the JSON, `{"$": "f8", "o": 16, "n": 3}` stands for a typed array: its kind, where it begins in
 * the blob (a multiple of 8), how many numbers it has. Numbers of JSON that are not finite are
 * the strings "nan", "inf", "-inf". Every string is untrusted text: shown, never run.
 */
export type Kind = "f4" | "f8" | "i4" | "u1";
export type Column = Float32Array | Float64Array | Int32Array | Uint8Array;

export interface Report {
  schema: 1;
  title: string;
  /** Versions and the like, in the order to show them. */
  made: [string, string][];
  /** One, or none: a report of training alone. */
  traces: Trace[];
  training: Training | null;
  timing: Timing | null;
  /** What moves a scalar, and by which routes; none unless it was handed over. */
  attribution: Attribution | null;
}

/** A pruned graph; nodes by rank, edges by influence, the largest first. */
export interface Attribution {
  value: number; // the scalar
  total: number; // the sum of all scores
  rule: string;
  points: number; // 0: the gradient at the inputs; else of so many points between baseline and inputs
  defect: number; // how far what enters a node is from what leaves it, as a part of the largest edge
  whole: [number, number]; // nodes and edges before pruning
  kept: [number, number]; // shares of influence that are left
  nodes: AttributionNode[];
  edges: AttributionEdge[];
}

export interface AttributionNode {
  name: string;
  kind: string; // "input", "head", "module", "output"
  label: string;
  rank: number; // the longest way from the inputs
  score: number; // what passes it, with its sign
  influence: number; // share of the output that comes through it, 0 to 1
}

export interface AttributionEdge {
  source: number; // into nodes
  target: number;
  score: number;
  influence: number;
}

export interface Trace {
  name: string;
  rule: "greedy" | "edge" | "viterbi";
  notes: string[];
  /** Words that columns refer to: operators' names. */
  words: string[];
  shapes: number[][];
  modules: Module[];
  operators: Operators;
  edges: Edges;
  leaves: Leaf[];
  forest: Forest;
  /** Routes of a uniform sample of elements, the most frequent first. */
  routes: Route[];
  sample: Sample;
  /** Influence by kind of component: "" (modules), "classes", "operators", ... */
  tables: Record<string, Influence>;
  flow: Flow;
  /** What part of their elements' gradients the paths carry. */
  coverage: Coverage | null;
  /** Where paths divide, the most informative first; none if there are too many. */
  choices: Fork[] | null;
  /** What is wrong; none unless it was asked for (gt.watch(model, diagnose=True)). */
  diagnosis: Diagnosis | null;
}

export interface Diagnosis {
  findings: Finding[]; // worst first
  remarks: string[]; // on the diagnosis itself
}

export interface Finding {
  kind: string; // "silent", "zero gradient", "not finite", ...
  severity: "error" | "warning" | "note";
  title: string;
  module: number; // into modules, -1 for none of them
  place: string; // the module in words
  parameters: string[];
  line: string; // of the user's code: "model.py:12: return x.detach()"
  evidence: string;
  advice: string; // what to do
}

export interface Coverage {
  median: number;
  lower: number; // quartiles
  upper: number;
  opposite: number; // share of elements whose path has the sign opposite to their gradient
  cancelled: number;
  elements: number;
  words: string[]; // the same in words
}

/** An operator that joins branches, or a tensor whose slices are labelled. */
export interface Fork {
  name: string;
  module: number; // into modules, -1 outside any
  branches: Branch[];
}

/** The shares of a fork's branches add up to 1. */
export interface Branch {
  name: string;
  module: number; // into modules, -1 for other branches
  elements: number; // whose paths take it, of those that could take another
  share: number;
  weighted: number; // the same by |gradient|
  error: number; // standard error of share over losses; NaN for one loss
}

/** The first is the model itself, named "". Parents come before their children. */
export interface Module {
  name: string; // dotted, from the root
  kind: string; // its class
  parent: number; // -1 for the root
  calls: number;
  parameters: number; // elements, with all inside; tied ones once
  /** The first sibling made alike (classes, operators, shapes); itself if it is the first. */
  like: number;
}

/** Columns with a row for each operator and leaf. Row 0 is the loss; each comes after its users. */
export interface Operators {
  name: Int32Array; // into words
  module: Int32Array; // the innermost, into modules
  call: Int32Array; // which call of that module
  shape: Int32Array; // of the first output, into shapes
  leaf: Int32Array; // into leaves, -1 for operators
  view: Uint8Array; // 1: only moves elements (view, transpose, expand...); folded by default
  mass: Float64Array; // Σ |gradient| at its output
}

/** Columns with a row for each argument that needs a gradient. */
export interface Edges {
  consumer: Int32Array; // the operator that uses...
  producer: Int32Array; // ...this one (or leaf)
  position: Int32Array; // as which argument
  mass: Float64Array; // Σ |gradient| that went this way, consumer to producer
  share: Float32Array; // of all that reached the producer
}

export interface Leaf {
  name: string;
  names: string[]; // all its names: tied weights have several
  operator: number;
  module: number; // whose parameter it is; 0 for inputs
  parameter: boolean;
  shape: number[];
  elements: number;
  zero: number; // elements whose gradient is 0
  norm: number;
  largest: number; // max |gradient|
  /** Its elements of the largest |gradient|, largest first: columns. */
  element: Int32Array; // flat index
  gradient: Float64Array; // signed
  start: Int32Array; // its vertex in the forest; -1: it has no path; -2: not in this report
}

/** Paths that join: each vertex once, with the next one towards the loss. */
export interface Forest {
  operator: Int32Array; // into operators
  word: Int32Array; // what it is called (a part of an operator that was opened), into words
  shape: Int32Array;
  element: Int32Array; // flat index; -1 if it is too large a number
  derivative: Float64Array; // of the next vertex by this one; at the loss its weight
  gradient: Float64Array;
  share: Float32Array; // of the gradient here, the part that came this way
  next: Int32Array; // -1 at the loss
}

export interface Route {
  operators: number[]; // from the first operator above the leaf to the loss
  modules: number[]; // each once in a row, from leaf to loss
  count: number; // sampled paths that run this way
  share: number; // of sampled paths
  weighted: number; // of their |gradient|
  starts: number[]; // some of them, vertices of the forest
}

export interface Sample {
  paths: number; // that were followed
  drawn: number; // elements drawn (those without a path among them)
  elements: number; // in all leaves
  seed: number;
}

/** Columns with a row for each component. */
export interface Influence {
  name: string[];
  module: Int32Array; // into modules, -1 for other components
  share: Float64Array; // of eligible elements those whose path runs through; NaN: none eligible
  weighted: Float64Array; // the same by |gradient|
  error: Float64Array; // standard error of share over losses; NaN for one loss
  through: Float64Array;
  eligible: Float64Array;
  unreached: Float64Array;
  own: Float64Array;
  notes: string[];
  series: Uint8Array; // 1: every path that could pass it does
}

export interface Flow {
  findings: string[];
  depth: Int32Array; // the profile, from the loss on
  norm: Float64Array;
  rms: Float64Array;
  zeros: Float64Array; // share of exact zeros
  operator: string[];
  module: string[];
  rows: FlowRow[];
}

export interface FlowRow {
  module: number; // into modules, 0 for operators outside any
  depth: number;
  norm: number | string;
  gain: number | string | null;
  zeros: number;
  own: number | string | null; // norm of its parameters' gradients
  verdict: string; // "", "dead", "mostly dead", "vanishing", "exploding", "not finite"
}

/** Influence over training, as gt.Monitor wrote it. Columns have one number a traced step. */
export interface Training {
  step: Int32Array;
  loss: Float64Array;
  components: string[];
  share: Float64Array[]; // by component
  weighted: Float64Array[];
  cost: number; // share of training time that monitoring took; NaN if unknown
  running: boolean; // the file had no end mark: training goes on, or was killed
  notes: string[];
}

export interface Timing {
  step: Int32Array;
  seconds: Float64Array; // a step each
  verdict: string; // in words
  grows: boolean | null; // null: too few steps to say
  slope: number; // seconds a step
  low: number; // interval of the slope
  high: number;
}
