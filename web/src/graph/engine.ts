/** Asks the worker for layouts; where none can start the page lays out itself, in a simpler way. */
import { layout, ranked, type Job, type Plan } from "./layout";
import type { Answer, Question } from "./worker";
import Maker from "./worker?worker&inline";

type Done = (plans: Plan[]) => void;

let worker: Worker | null | undefined;
let last = 0;
const waiting = new Map<number, { jobs: Job[]; done: Done }>();

function ready(): Worker | null {
  if (worker !== undefined) return worker;
  try {
    const made = new Maker();
    made.onmessage = ({ data }: MessageEvent<Answer>) => {
      waiting.get(data.id)?.done(data.plans);
      waiting.delete(data.id);
    };
    made.onerror = (event) => {
      event.preventDefault();
      worker = null;
      for (const { jobs, done } of waiting.values()) done(layout(jobs, ranked));
      waiting.clear();
    };
    worker = made;
  } catch {
    worker = null;
  }
  return worker;
}

/** Calls back once with the layout. Returns a way to say that it is not wanted any more. */
export function plan(jobs: Job[], done: Done): () => void {
  const id = ++last;
  const helper = ready();
  if (helper) {
    waiting.set(id, { jobs, done });
    helper.postMessage({ id, jobs } satisfies Question);
    return () => waiting.delete(id);
  }
  const timer = setTimeout(() => done(layout(jobs, ranked)));
  return () => clearTimeout(timer);
}
